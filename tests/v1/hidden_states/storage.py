# SPDX-License-Identifier: Apache-2.0
"""What stands in a directory of hidden states."""

from pathlib import Path

LOCK_SUFFIX = ".lock"


def files(folder: Path | str) -> list[Path]:
    """All but lock files, sorted: those stay for a while after their files' end."""
    return sorted(path for path in Path(folder).iterdir() if path.suffix != LOCK_SUFFIX)
