# SPDX-License-Identifier: Apache-2.0
"""Writes docs/design/scenarios.md from the tests, as pytest collects them.

    python tools/scenarios.py

A row is a name that tests give with the marker ``scenario``, a column the engine that
they run with (tests/columns.py). What stands in a cell is what the tests do there, so
that it cannot say what they do not.
"""

import argparse
import io
import json
import sys
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "design" / "scenarios.md"
sys.path.insert(0, str(ROOT / "tests"))

from columns import (  # type: ignore[import-not-found]  # noqa: E402
    COLUMNS,
    column_of,
    reason_without,
)

# What a cell says, by the marker of its tests; the first that any of them has counts.
WORDS = {
    "refused": "refused",
    "tested": "tested",
    "soak": "soak",
    "ray": "ray",
    "gpu": "GPU",
}
# Tests with these are not in `make test`, whatever else they are.
ELSEWHERE = ("gpu", "ray", "soak")

HEAD = """\
# Scenarios

Ways in which vLLM is run, and what is known of hidden states under each.

| in a cell | means |
| --- | --- |
| tested | a test in `make test` shows that the hidden states are right |
| refused | it is refused with a sentence; a test in `make test` shows that |
| soak | as tested, by `make soak`: it takes too long for every run |
| ray | by a test where Ray is installed (marker `ray`) and vLLM's Ray executor takes \
the device: "current platform cpu does not support ray" |
| GPU | by a test that needs a CUDA device, `make test-gpu`; none has run it here |
| a number | it does not run; the reason is below the table |

This page is written by `python tools/scenarios.py` from the tests' own parameters; a
test compares it with them.
"""

# The tables, by whether their tests have the marker ``last_hidden_state``.
TITLES = {
    False: "Extracted hidden states",
    True: "The last hidden state, beside other features",
}


class Collector:
    """A pytest plugin that keeps the tests as they are before any is replaced."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.items.append(item)


def collect() -> list[pytest.Item]:
    """All tests of the repository.

    Raises:
        RuntimeError: if they cannot be collected.
    """
    collector = Collector()
    output = io.StringIO()
    with redirect_stdout(output):
        status = pytest.main(
            [
                "--collect-only",
                "-q",
                f"--rootdir={ROOT}",
                *(str(ROOT / "tests" / name) for name in ("config", "v1")),
            ],
            plugins=[collector],
        )
    if status:
        raise RuntimeError(f"pytest collects no tests:\n{output.getvalue()}")
    return collector.items


def page_of(items: list[pytest.Item]) -> str:
    """The page's text.

    Raises:
        ValueError: naming the cells for which there is neither test nor reason.
    """
    reasons: list[str] = []
    page = HEAD
    for is_last, title in TITLES.items():
        chosen = [
            item
            for item in items
            if (item.get_closest_marker("last_hidden_state") is not None) == is_last
        ]
        page += f"\n## {title}\n\n{table_of(chosen, reasons)}\n"
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return page + "\n" + "\n".join(notes) + "\n"


def table_of(items: list[pytest.Item], reasons: list[str]) -> str:
    """One table's lines; adds to ``reasons`` what its cells refer to.

    Raises:
        ValueError: see ``page_of``.
    """
    cells: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    modules: dict[str, set[str]] = defaultdict(set)
    for item in items:
        for mark in item.iter_markers("scenario"):
            (row,) = mark.args
            # Without a column it is about what comes before any engine is built.
            column = column_of(item)
            for one in COLUMNS if column is None else (column,):
                cells[row, one].append(item)
            modules[row].add(item.path.stem)
    lines = [
        f"| scenario | {' | '.join(COLUMNS)} | tests |",
        f"| --- |{' --- |' * (len(COLUMNS) + 1)}",
    ]
    empty = []
    for row in sorted(modules, key=lambda row: (sorted(modules[row]), row)):
        words = []
        for column in COLUMNS:
            tests = cells[row, column]
            if not tests:
                empty.append(f"{row}, {column}")
            words.append(word_of(tests, reasons))
        names = ", ".join(f"`{name}`" for name in sorted(modules[row]))
        lines.append(f"| {row} | {' | '.join(words)} | {names} |")
    if empty:
        raise ValueError("neither test nor reason for: " + "; ".join(empty))
    return "\n".join(lines)


def word_of(tests: list[pytest.Item], reasons: list[str]) -> str:
    """What a cell says; adds to ``reasons`` what it refers to."""
    found = {kind_of(test) for test in tests if reason_without(test) is None}
    for name, word in WORDS.items():
        if name in found:
            return word
    (reason, *_) = {reason_without(test) for test in tests} or {"?"}
    reason = str(reason)
    if reason not in reasons:
        reasons.append(reason)
    return str(reasons.index(reason) + 1)


def kind_of(test: pytest.Item) -> str:
    """Which of the words is a test's."""
    for name in (*ELSEWHERE, "refused"):
        if test.get_closest_marker(name) is not None:
            return name
    return "tested"


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes docs/design/scenarios.md.")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="leave the page, and write what it would say and the tests' names there",
    )
    path = parser.parse_args().json
    items = collect()
    if path is None:
        PAGE.write_text(page_of(items), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
        return
    names = sorted({f"{item.path.name}::{name_of(item)}" for item in items})
    path.write_text(json.dumps({"page": page_of(items), "tests": names}))


def name_of(item: pytest.Item) -> str:
    """A test's name without its parameters."""
    return str(getattr(item, "originalname", None) or item.name)


if __name__ == "__main__":
    main()
