# SPDX-License-Identifier: Apache-2.0
"""Exported mails, taken by `git am`."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from series.compose import compose
from series.errors import SeriesError
from series.export import export
from series.stock import Stock

if TYPE_CHECKING:
    from pathlib import Path

    from tests.series.conftest import Sample

ALPHA, BETA = "vllm/alpha.py", "vllm/beta.py"


def git(repository: Path, *words: str | Path) -> str:
    environment = os.environ | {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_AUTHOR_NAME": "x",
        "GIT_AUTHOR_EMAIL": "x@example.org",
        "GIT_COMMITTER_NAME": "x",
        "GIT_COMMITTER_EMAIL": "x@example.org",
    }
    return subprocess.run(
        ["git", *map(str, words)],
        cwd=repository,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_git_am_gives_the_composed_tree(sample: Sample) -> None:
    sample.write_patch("0001-one.patch", {ALPHA: [(2, ["one"]), (40, ["end"])]})
    sample.write_patch("0002-two.patch", {ALPHA: [(3, ["two"])], BETA: [(0, ["b"])]})
    sample.write_module("vllm/replaced.py", "new = 1\n\nlast = 2")  # no newline
    sample.write_module("vllm/added/new.py", "added = '\N{SNOWMAN}'\n")
    stock = Stock(sample.wheel())
    mails = export(sample.series(), stock, "cpu", sample.folder / "mails")
    assert [mail.name for mail in mails] == [
        "0001-hidden-states-modules.patch",
        "0002-0001-one.patch-insert.patch",
        "0003-0002-two.patch-insert.patch",
    ]
    assert " alpha 2\n+one\n alpha 3\n" in mails[1].read_text()

    upstream = sample.folder / "upstream"
    upstream.mkdir()
    git(upstream, "init", "-q")
    for path in stock.paths():
        content = stock.read(path)
        assert content is not None
        (upstream / path).parent.mkdir(parents=True, exist_ok=True)
        (upstream / path).write_bytes(content)
    git(upstream, "add", "-A")
    git(upstream, "commit", "-qm", "stock")
    git(upstream, "am", "-q", *mails)
    for path, content in compose(sample.series(), stock, "cpu").items():
        if path != "vllm/_version.py":  # a build makes it
            assert (upstream / path).read_bytes() == content, path
    log = git(upstream, "log", "-1", "--format=%an <%ae>%n%B")
    assert log.strip() == (
        "Jos\N{LATIN SMALL LETTER E WITH ACUTE} Writer <writer@example.org>\n"
        "0002-two.patch: insert\n\nThe reason of 0002-two.patch."
    )


def test_the_same_series_gives_the_same_mails(sample: Sample) -> None:
    sample.write_patch("0001-one.patch", {ALPHA: [(2, ["one"])]})
    for name in ("first", "second"):
        export(sample.series(), Stock(sample.stock), "cpu", sample.folder / name)
    first = sample.snapshot(sample.folder / "first")
    assert first == sample.snapshot(sample.folder / "second")
    assert len(first) == 1


def test_only_modules(sample: Sample) -> None:
    sample.write_module("vllm/added/new.py", "added = 1\n")
    done = sample.run("export", sample.folder / "out", "--stock", sample.stock)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("0001-hidden-states-modules.patch\n")


def test_directory_in_use(sample: Sample) -> None:
    with pytest.raises(SeriesError, match="not empty"):
        export(sample.series(), Stock(sample.stock), "cpu", sample.root)
