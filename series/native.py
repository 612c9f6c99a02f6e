# SPDX-License-Identifier: Apache-2.0
"""The native part of the wheel, built by CMake where that is possible."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .stock import package_files


def build_native(root: Path, target: str, directory: Path) -> dict[str, Path]:
    """Builds what `CMakeLists.txt` says, into `directory`.

    GPUs have Triton's kernels instead, and a vLLM works without either: whatever is
    amiss is told, and is no error.

    Returns:
        The built files by their paths in the wheel; none where nothing was built.
    """
    if target != "cpu" or not (root / "CMakeLists.txt").exists():
        return {}
    cmake = _cmake()
    if cmake is None:
        _tell("there is no cmake")
        return {}
    with tempfile.TemporaryDirectory(prefix="native-") as build:
        for command in (
            ["-S", str(root), "-B", build, f"-DPython_EXECUTABLE={sys.executable}"],
            ["--build", build],
            ["--install", build, "--prefix", str(directory)],
        ):
            done = subprocess.run(
                [cmake, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            if done.returncode != 0:
                _tell(f"cmake failed:\n{done.stdout}")
                return {}
    return {path: directory / path for path in package_files(directory)}


def _cmake() -> str | None:
    try:  # the package, whose command need not be on the path
        from cmake import CMAKE_BIN_DIR
    except ImportError:
        return shutil.which("cmake")
    return str(Path(CMAKE_BIN_DIR) / "cmake")


def _tell(cause: str) -> None:
    print(
        f"warning: this vLLM packs rows on a CPU by torch, which is slower: {cause}",
        file=sys.stderr,
    )
