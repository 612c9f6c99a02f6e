# SPDX-License-Identifier: Apache-2.0
"""What the pages say is so: links, options, counts of lines."""

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import MISSING, fields
from typing import Any
from xml.etree import ElementTree

import pytest


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        kept = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(kept.replace(" ", "-"))
    return found


def test_links_lead_somewhere(docs: Any) -> None:
    for page in docs.pages():
        text = (docs.ROOT / page).read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if link.startswith("https://"):
                continue
            path, _, anchor = link.partition("#")
            target = (docs.ROOT / page).parent / path if path else docs.ROOT / page
            assert target.exists(), f"{page}: {link}"
            if anchor:
                assert anchor in anchors(target.read_text()), f"{page}: {link}"


def test_every_page_is_in_the_index(docs: Any) -> None:
    index = (docs.ROOT / "docs" / "README.md").read_text()
    for page in docs.pages():
        if page.startswith("docs/") and page != "docs/README.md":
            assert f"({page.removeprefix('docs/')})" in index, page


def test_options_are_those_of_the_configuration(docs: Any) -> None:
    from vllm.config.hidden_states import HiddenStatesConfig

    defaults, computed = {}, {"num_writer_threads": "the number of processors, 2 to 8"}
    for field in fields(HiddenStatesConfig):
        default = getattr(field.default, "default", field.default)  # pydantic's
        defaults[field.name] = default
    table = docs.read_table(docs.FEATURE_PAGE, "options")
    assert [row[0] for row in table] == list(defaults)
    for option, written, _ in table:
        default = defaults[option]
        if option in computed:
            assert written == computed[option]
        elif default is not MISSING:
            default = list(default) if isinstance(default, tuple) else default
            assert json.loads(written) == default, option


def test_inserted_lines_are_those_of_the_patches(docs: Any) -> None:
    counts: Counter[str] = Counter()
    for patch in (docs.ROOT / "patches").glob("*.patch"):
        path = ""
        for line in patch.read_text().splitlines():
            if line.startswith("+++ "):
                path = line.removeprefix("+++ b/")
            elif line.startswith("+"):
                counts[path] += 1
    table = docs.read_table("docs/design/hidden_states.md", "inserted lines")
    *rows, total = [(row[0], int(row[1])) for row in table]
    assert dict(rows) == dict(counts)
    assert total == ("total", counts.total())
    assert counts.total() < 100


def test_sizes_are_those_of_the_simulation(docs: Any, engines: Any) -> None:
    page = (docs.ROOT / "docs/features/hidden_states_sizing.md").read_text()
    simulate = engines.import_file(docs.ROOT / "benchmarks" / "simulate.py")
    for mark in ("budget", "slowdowns"):
        table = getattr(simulate, mark)()
        assert f"<!-- checked: {mark} -->\n{table}" in page


def test_pictures_are_self_contained(docs: Any) -> None:
    """Well-formed, described, on a ground of their own, nothing from elsewhere."""
    name = "{http://www.w3.org/2000/svg}"
    for path in (docs.ROOT / "docs").rglob("*.svg"):
        picture = ElementTree.parse(path).getroot()
        assert picture.find(f"{name}title") is not None, path
        assert picture.find(f"{name}desc") is not None, path
        assert picture.find(f"{name}rect") is not None, path
        assert not re.search(r"href|url\((?!#)|<script", path.read_text()), path


@pytest.fixture(scope="module")
def collected(docs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the tool finds in the tests, in a process where pytest is not running."""
    path = tmp_path_factory.mktemp("collected") / "tests.json"
    done = subprocess.run(
        [sys.executable, "tools/scenarios.py", "--json", str(path)],
        cwd=docs.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


def test_scenarios_are_those_of_the_tests(docs: Any, collected: Any) -> None:
    page = (docs.ROOT / "docs/design/scenarios.md").read_text()
    assert page == collected["page"], "run python tools/scenarios.py"


def test_what_is_beside_the_last_hidden_state_is_tested(
    docs: Any, collected: Any
) -> None:
    """Each row of the page is one of the table that the tests write."""
    _, _, tested = collected["page"].partition("## The last hidden state")
    tested = tested.replace("`", "")  # as in the table read
    table = docs.read_table(docs.LAST_PAGE, "last hidden state")
    assert len(table) > 20
    for feature, works, _ in table:
        assert works == "yes"
        assert f"\n| {feature} | " in tested, feature


def test_promises_have_their_tests(docs: Any, collected: Any) -> None:
    found = docs.read_table("docs/features/hidden_states_promise.md", "promise")
    assert len(found) == 9
    for promise, tests in found:
        assert tests and set(tests.split(", ")) <= set(collected["tests"]), promise


@pytest.mark.parametrize(("table", "rows"), [("wrong data", 13), ("crashes", 11)])
def test_faults_have_their_tests(
    docs: Any, collected: Any, table: str, rows: int
) -> None:
    found = docs.read_table("docs/design/faults.md", table)
    assert len(found) == rows
    for _, scenario, tests in found:
        assert tests and set(tests.split(", ")) <= set(collected["tests"]), scenario
