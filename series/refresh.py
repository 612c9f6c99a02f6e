# SPDX-License-Identifier: Apache-2.0
"""Turns edits of a tree's copies back into patches.

Who gets an inserted line, in this order:

1. the patch that inserts it already;
2. the patch whose lines it replaces, or between whose lines it stands;
3. the patch named by `--patch`;
4. the patch whose lines it stands beside, or the only one that touches the file.

Where none of these says one name, the developer has to. Each patch's hunks and blob
ids are then written anew from the lines that it and the patches before it own. A new
patch starts as a mail header listed in `patches/series`; one to be dropped loses its
lines in the tree first, then, after `refresh`, its file.
"""

import os
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import TypeVar

from .compose import VERSION_MODULE, Series, load, patched_lines
from .errors import SeriesError
from .files import write_all
from .patch import (
    FilePatch,
    Line,
    Patch,
    blob_id,
    hunks_of,
    join_lines,
    split_lines,
)
from .stock import Stock, check_unedited
from .tree import load_state, real_files

Item = TypeVar("Item")
Opcode = tuple[str, int, int, int, int]


def refresh(series: Series, directory: Path, patch: str | None = None) -> list[str]:
    """Writes the tree's edits into `patches/`; returns what was done, in sentences.

    Raises:
        SeriesError: an edit does more than insert, it is not clear whose it is, or the
            tree is older than the patches. Nothing is changed then.
    """
    state = load_state(directory)
    stock = Stock(Path(state.stock))
    check_unedited(stock.location)
    if patch is not None and patch not in [one.name for one in series.patches]:
        raise SeriesError(
            f"patches/series names no {patch}: write its mail header (From, Subject, "
            "why, '---') into patches/ and add it there first"
        )
    notes: list[str] = []
    edited: dict[str, list[Line]] = {}
    modules: dict[str, bytes] = {}
    for path in real_files(directory):
        content = (directory / path).read_bytes()
        if path in series.modules:
            _check_newer(directory / path, series.modules[path])
            modules[path] = content
            continue
        original = stock.read(path)
        if path == VERSION_MODULE:
            continue
        if original is None:
            notes.append(f"{path} is in the tree alone: move it to {series.root}/vllm")
            continue
        composed = patched_lines(series, path, original)
        known = state.copies.get(path, blob_id(original))
        if blob_id(content) == known:
            continue  # not edited since the tree was composed
        if known != blob_id(join_lines(composed)):
            raise SeriesError(
                f"{path} was edited, and its patches have changed since the tree was "
                "composed: save your edit elsewhere, run `tree --force`, edit again"
            )
        edited[path] = assign(path, composed, split_lines(content), patch)

    changes = changed_patches(series, stock, edited)
    write_all(series.root, {f"patches/{name}": text for name, text in changes.items()})
    write_all(series.root, modules)
    for path in modules:
        (directory / path).unlink()
        (directory / path).symlink_to(series.modules[path].resolve())
    for path, lines in edited.items():
        state.copies[path] = blob_id(join_lines(lines))
    state.save(directory)
    load(series.root)
    notes += [f"took {path} into the repository" for path in modules]
    return notes + [f"refreshed patches/{name}" for name in changes]


def _check_newer(copy: Path, module: Path) -> None:
    if copy.read_bytes() == module.read_bytes():
        return
    if os.stat(copy).st_mtime_ns < os.stat(module).st_mtime_ns:
        raise SeriesError(
            f"{copy} was saved over its link, and {module} has changed since: keep one "
            "of the two"
        )


def changed_patches(
    series: Series, stock: Stock, edited: Mapping[str, Sequence[Line]]
) -> dict[str, bytes]:
    """Returns the texts of the patch files that have to change, by name.

    `edited` has the lines of each changed file with their owners. Without any, what
    comes back is what is not written as this package writes it.
    """
    lines = {
        path: patched_lines(series, path, stock.read(path) or b"")
        for path in series.patched()
    }
    lines |= {path: list(new) for path, new in edited.items()}
    modes = {f.path: f.mode for patch in series.patches for f in patch.files}
    names = [patch.name for patch in series.patches]
    changes = {}
    for number, patch in enumerate(series.patches):
        files = []
        for path in sorted(lines):
            hunks = hunks_of(lines[path], names[: number + 1])
            if hunks:
                old = _blob_with(lines[path], names[:number])
                new = _blob_with(lines[path], names[: number + 1])
                mode = modes.get(path, "100644")
                files.append(FilePatch(path, old, new, mode, hunks))
        text = Patch(patch.name, patch.header, tuple(files)).format()
        if text != (series.root / "patches" / patch.name).read_bytes():
            changes[patch.name] = text
    return changes


def _blob_with(lines: Sequence[Line], owners: Sequence[str]) -> str:
    return blob_id(join_lines(x for x in lines if x[0] is None or x[0] in owners))


def assign(
    path: str, composed: Sequence[Line], edited: Sequence[bytes], patch: str | None
) -> list[Line]:
    """Returns the edited lines with their owners, by the rule of this module.

    Raises:
        SeriesError: a stock line is changed or gone, or an owner is not clear.
    """
    is_stock = _find_stock_lines(path, composed, edited)
    old_runs = _runs([line[0] is None for line in composed], composed)
    new_runs = _runs(is_stock, edited)
    stock_lines = [line for line in composed if line[0] is None]
    names = {owner for owner, _ in composed if owner is not None}
    result: list[Line] = []
    for gap, (old, new) in enumerate(zip(old_runs, new_runs, strict=True)):
        if gap:
            result.append(stock_lines[gap - 1])
        result += _assign_run(path, old, new, patch, names)
    return result


def _runs(is_stock: Sequence[bool], lines: Sequence[Item]) -> list[list[Item]]:
    """Returns the inserted lines before each stock line and after the last."""
    runs: list[list[Item]] = [[]]
    for stock, line in zip(is_stock, lines, strict=True):
        if stock:
            runs.append([])
        else:
            runs[-1].append(line)
    return runs


def _assign_run(
    path: str, old: list[Line], new: list[bytes], patch: str | None, names: set[str]
) -> list[Line]:
    result: list[Line] = []
    for tag, i1, i2, j1, j2 in _opcodes([line for _, line in old], new):
        if tag == "equal":
            result += old[i1:i2]
        elif j1 < j2:
            replaced = {owner for owner, _ in old[i1:i2]}
            beside = {owner for owner, _ in old[max(i1 - 1, 0) : i2 + 1]}
            inside = beside if i1 > 0 and i2 < len(old) else set()
            owner = None
            for candidates in (replaced, inside, {patch} - {None}, beside, names):
                if len(candidates) == 1:
                    (owner,) = candidates
                    break
            if owner is None:
                raise SeriesError(
                    f"{path}: say with --patch NAME which patch takes "
                    f"{new[j1].decode(errors='replace').strip()!r}, since "
                    f"{'several touch' if names else 'none touches'} the file"
                )
            result += [(owner, line) for line in new[j1:j2]]
    return result


def _find_stock_lines(
    path: str, composed: Sequence[Line], edited: Sequence[bytes]
) -> list[bool]:
    """Tells for each edited line whether it is the stock file's.

    Where a line could be either, hunks stay in the place that they have.
    """
    stock: list[Line] = [line for line in composed if line[0] is None]
    plain = _opcodes([line for _, line in stock], edited)
    whole: list[Opcode] = [("replace", 0, len(stock), 0, len(edited))]
    for old, opcodes in (
        (composed, _opcodes([line for _, line in composed], edited)),
        (stock, plain),
        (stock, whole),
    ):
        found = _match(old, edited, opcodes)
        if found is not None:
            return found
    number, line = next(
        (i1, stock[i1][1]) for tag, i1, *_ in plain if tag in ("delete", "replace")
    )
    raise SeriesError(
        f"{path}: line {number + 1} of the stock file is changed or gone "
        f"({line.decode(errors='replace').strip()!r}), and patches only insert"
    )


def _match(
    old: Sequence[Line], new: Sequence[bytes], opcodes: Sequence[Opcode]
) -> list[bool] | None:
    is_stock = [False] * len(new)
    for tag, i1, i2, j1, j2 in opcodes:
        if tag == "equal":
            is_stock[j1:j2] = [owner is None for owner, _ in old[i1:i2]]
            continue
        place = j1
        for owner, line in old[i1:i2]:
            if owner is not None:
                continue
            while place < j2 and new[place] != line:
                place += 1
            if place == j2:
                return None
            is_stock[place] = True
            place += 1
    return is_stock


def _opcodes(old: Sequence[bytes], new: Sequence[bytes]) -> list[Opcode]:
    """Returns difflib's opcodes; common ends first, which is fast and stays put."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    middle = SequenceMatcher(
        None, old[head : len(old) - tail], new[head : len(new) - tail], autojunk=False
    )
    shifted = [
        (tag, i1 + head, i2 + head, j1 + head, j2 + head)
        for tag, i1, i2, j1, j2 in middle.get_opcodes()
    ]
    ends = [("equal", 0, head, 0, head)]
    ends += shifted
    ends += [("equal", len(old) - tail, len(old), len(new) - tail, len(new))]
    return ends
