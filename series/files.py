# SPDX-License-Identifier: Apache-2.0
"""Writing several files so that either all of them change or none does."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .errors import SeriesError


def write_all(root: Path, contents: Mapping[str, bytes]) -> None:
    """Writes `contents` (by path below `root`), all or nothing.

    Raises:
        SeriesError: a file could not be written; everything is as it was.
    """
    made: list[Path] = []  # directories, outermost first
    staged: list[tuple[Path, Path, Path | None]] = []  # destination, new, old
    replaced = 0
    destination = root
    try:
        for path, content in contents.items():
            destination = root / path
            _make_parents(destination.parent, made)
            new = destination.with_name(f".{destination.name}.series-new")
            old = destination.with_name(f".{destination.name}.series-old")
            exists = os.path.lexists(destination)
            staged.append((destination, new, old if exists else None))
            if destination.is_dir():
                raise IsADirectoryError(f"{destination} is a directory")
            new.write_bytes(content)
            if exists:
                shutil.copy2(destination, old, follow_symlinks=False)
                shutil.copymode(destination, new)
        for destination, new, _ in staged:
            os.replace(new, destination)
            replaced += 1
    except BaseException as error:
        for done, _, backup in reversed(staged[:replaced]):
            if backup is None:
                done.unlink()
            else:
                os.replace(backup, done)
        _clean(staged)
        for directory in reversed(made):
            with suppress(OSError):
                directory.rmdir()
        if isinstance(error, OSError):
            raise SeriesError(
                f"cannot write {destination} ({error.strerror or error}); "
                "everything is left as it was"
            ) from error
        raise
    _clean(staged)


def _make_parents(directory: Path, made: list[Path]) -> None:
    missing = [p for p in (directory, *directory.parents) if not p.exists()]
    for parent in reversed(missing):
        parent.mkdir()
        made.append(parent)


def _clean(staged: list[tuple[Path, Path, Path | None]]) -> None:
    for _, new, old in staged:
        for leftover in (new, old):
            if leftover is not None:
                with suppress(OSError):
                    leftover.unlink()
