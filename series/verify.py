# SPDX-License-Identifier: Apache-2.0
"""Checks of the repository's part against the stock release it is for."""

import re
from collections import Counter
from pathlib import Path

from .compose import Series, compose
from .refresh import changed_patches
from .stock import Stock

# So many non-trivial lines in a row that a stock file has too are a copy.
COPIED_LINES = 6
# Lines that two authors write alike: imports, decorators, comments on the licence,
# and what has no letter or digit in it.
_TRIVIAL = re.compile(
    r"(import\s|from\s+\S+\s+import\b|@|#\s*SPDX-|//\s*SPDX-)|[\W_]*$", re.ASCII
)


def inserted_lines(series: Series) -> Counter[str]:
    """Returns the number of lines that the patches insert, by upstream file."""
    counts: Counter[str] = Counter()
    for patch in series.patches:
        for file in patch.files:
            counts[file.path] += sum(len(hunk.lines) for hunk in file.hunks)
    return counts


def verify(series: Series, stock: Stock, target: str) -> list[str]:
    """Returns what is wrong, in sentences.

    That the patches insert only, and that their counts and order hold, was seen when
    the series was read.

    Raises:
        SeriesError: the series does not apply to `stock`.
    """
    compose(series, stock, target)
    findings = [
        f"{patch.name} inserts nothing" for patch in series.patches if not patch.files
    ]
    findings += [
        f"{name} is not as `refresh` writes it: run it"
        for name in changed_patches(series, stock, {})
    ]
    for path, module in series.modules.items():
        findings += _copied(path, module, stock.read(path))
    return findings


def _copied(path: str, module: Path, stock: bytes | None) -> list[str]:
    if stock is None:
        return []
    theirs = [text for _, text in significant_lines(stock)]
    known = {
        tuple(theirs[start : start + COPIED_LINES])
        for start in range(len(theirs) - COPIED_LINES + 1)
    }
    ours = significant_lines(module.read_bytes())
    runs = [
        ours[start : start + COPIED_LINES]
        for start in range(len(ours) - COPIED_LINES + 1)
    ]
    return [
        f"{path}, lines {run[0][0]} to {run[-1][0]}: the stock file has these "
        f"{COPIED_LINES} lines too"
        for run in runs
        if tuple(text for _, text in run) in known
    ]


def significant_lines(content: bytes) -> list[tuple[int, str]]:
    """Returns the lines that say something, white space made even, with numbers."""
    lines = content.decode(errors="replace").split("\n")
    return [
        (number, " ".join(line.split()))
        for number, line in enumerate(lines, 1)
        if not _TRIVIAL.match(line.strip())
    ]
