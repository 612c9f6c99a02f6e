# SPDX-License-Identifier: Apache-2.0
"""`verify`: what it counts, and what it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from series.stock import Stock
from series.verify import inserted_lines, significant_lines, verify

if TYPE_CHECKING:
    from tests.series.conftest import Sample

ALPHA, BETA = "vllm/alpha.py", "vllm/beta.py"


def findings(sample: Sample) -> list[str]:
    return verify(sample.series(), Stock(sample.wheel()), "cpu")


def test_empty_series(sample: Sample) -> None:
    assert findings(sample) == []
    result = sample.run("verify", "--stock", sample.wheel())
    assert result.returncode == 0, result.stderr
    assert result.stdout == "    0  lines inserted by 0 patches\n"


def test_counts(sample: Sample) -> None:
    sample.write_patch("0001-a.patch", {ALPHA: [(2, ["x", "y"])], BETA: [(1, ["z"])]})
    sample.write_patch("0002-b.patch", {ALPHA: [(9, ["x"])]})
    assert findings(sample) == []
    assert inserted_lines(sample.series()) == {ALPHA: 3, BETA: 1}


def test_not_canonical(sample: Sample) -> None:
    place = sample.write_patch("0001-a.patch", {ALPHA: [(2, ["x"])]})
    place.write_bytes(place.read_bytes().replace(b"+3 @@", b"+3,1 @@"))
    assert findings(sample) == ["0001-a.patch is not as `refresh` writes it: run it"]


def test_copied_lines(sample: Sample) -> None:
    old = [f"old_{n} = {n}" for n in range(20)]
    sample.write_module("vllm/replaced.py", "\n".join(old[3:8]) + "\n")
    assert findings(sample) == []
    # Blank lines, imports and brackets neither count nor part a run.
    copied = ["new = 1", *old[3:6], "", "import os", ")", "  " + old[6], *old[7:9]]
    sample.write_module("vllm/replaced.py", "\n".join(copied) + "\n")
    (finding,) = findings(sample)
    assert finding.startswith("vllm/replaced.py, lines 2 to 10: ")
    result = sample.run("verify", "--stock", sample.wheel())
    assert result.returncode == 1
    assert result.stderr == f"error: {finding}\n"


def test_significant_lines() -> None:
    text = """# SPDX-License-Identifier: Apache-2.0

import os
from a.b import (
@property
    ):
a  =   1
from_here = 2
"""
    assert significant_lines(text.encode()) == [(7, "a = 1"), (8, "from_here = 2")]
