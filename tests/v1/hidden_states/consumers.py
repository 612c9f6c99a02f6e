# SPDX-License-Identifier: Apache-2.0
"""Packages that read our files, as they are, in a folder beside the environment.

They are for child processes alone: what they bring along must not disturb the tests'
own process, nor the environment.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from series.release import ROOT
from series.stock import cache_directory

REQUIREMENTS = ROOT / "requirements" / "consumers.txt"
SCRIPTS = Path(__file__).parent
# By this name dill, by which `datasets` makes its hashes, knows what is installed.
PACKAGES = "site-packages"
# Where pip finds no registry at all, it knows of no version either.
UNREACHABLE = "(from versions: none)"


def installed() -> Path:
    """The folder with the packages, installed once into the cache.

    Skips the test where the registry cannot be reached.
    """
    wanted = (
        REQUIREMENTS.read_text(),
        platform.python_version(),
        sysconfig.get_platform(),
    )
    digest = hashlib.sha256(repr(wanted).encode()).hexdigest()
    final = cache_directory() / f"consumers-{digest[:16]}"
    if final.is_dir():
        return final / PACKAGES
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".consumers-", dir=final.parent))
    try:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--retries=1"]
        command += ["--only-binary=:all:", f"--target={folder / PACKAGES}"]
        command += ["-r", str(REQUIREMENTS)]
        done = subprocess.run(command, capture_output=True, text=True)
        if UNREACHABLE in done.stderr:
            pytest.skip(f"no registry can be reached: {last_line(done.stderr)}")
        assert done.returncode == 0, done.stderr
        with suppress(OSError):  # another process was faster
            os.rename(folder, final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return final / PACKAGES


def last_line(text: str) -> str:
    """The last line that says something."""
    return ([line for line in text.splitlines() if line.strip()] or [""])[-1]


def environment(folder: Path) -> dict[str, str]:
    """The variables of a process that finds the packages in ``folder`` first."""
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def connectors_alone(folder: Path) -> Path:
    """A folder with ``hs_connectors`` and nothing else, for an engine's process."""
    alone = folder / "connectors"
    alone.mkdir()
    (alone / "hs_connectors").symlink_to(installed() / "hs_connectors")
    return alone


def start(script: str, *arguments: Any, **options: Any) -> "subprocess.Popen[str]":
    """Start one of the scripts beside this file with the packages on its path."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / script), *map(str, arguments)],
        env=os.environ | environment(installed()),
        text=True,
        **options,
    )
