# SPDX-License-Identifier: Apache-2.0
"""A made-up stock vLLM, and a repository with a series for it."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from wheel.wheelfile import WheelFile

from series import release
from series.compose import Series, load, patched_lines
from series.patch import FilePatch, Hunk, Patch, blob_id, join_lines
from series.stock import Stock
from series.tree import make_tree

# This machine may be busy: a slow example is no failure.
settings.register_profile("series", deadline=None)
settings.load_profile("series")

REPOSITORY = Path(__file__).resolve().parents[2]

STOCK_FILES = {
    "vllm/__init__.py": b"from .version import __version__\n",
    "vllm/_version.py": b"version: str\n__version__ = version = '0.32.0'\n",
    "vllm/alpha.py": b"".join(b"alpha %d\n" % n for n in range(1, 41)),
    "vllm/beta.py": b"".join(b"beta %d\n" % n for n in range(1, 21)),
    "vllm/empty.py": b"",
    "vllm/native.abi3.so": bytes(range(256)),
    "vllm/replaced.py": b"".join(b"old_%d = %d\n" % (n, n) for n in range(20)),
    "vllm/inner/__init__.py": b"",
    "vllm/inner/gamma.py": b"def gamma():\n    return 1\n",
    "vllm/tool.sh": b"#!/bin/sh\n",
}

METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: 0.32.0
Summary: Upstream's summary
Maintainer-email: Someone <someone@example.org>
License-Expression: Apache-2.0
Project-URL: Bug Tracker, https://example.org/bugs
Project-URL: Homepage, https://example.org
Classifier: Programming Language :: Python :: 3.11
Classifier: Programming Language :: Python :: 3.14
Requires-Python: <3.15,>=3.11
Description-Content-Type: text/markdown
License-File: LICENSE
Requires-Dist: numpy
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchaudio; platform_machine != "s390x" or python_version < "3"
Requires-Dist: torchvision
Requires-Dist: torchcodec>=0.14; platform_machine != "riscv64"
Provides-Extra: audio
Requires-Dist: soundfile; extra == "audio"
Dynamic: requires-dist

How to install the stock wheel: see \N{SNOWMAN}.
"""

ENTRY_POINTS = b"[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n"

HEADER = """\
From: Jos\N{LATIN SMALL LETTER E WITH ACUTE} Writer <writer@example.org>
Subject: [PATCH] {name}: insert

The reason of {name}.
---
"""

# By path: (number of the line to insert after, the lines).
Inserts = Mapping[str, Sequence[tuple[int, Sequence[str]]]]


class Sample:
    """Files of one test: `stock`, the unpacked stock vLLM, and `root`, ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stock = folder / "stock"
        self.root = folder / "repository"
        self.directory = folder / "tree"
        (self.root / "patches").mkdir(parents=True)
        for name in ("LICENSE", "pyproject.toml", "setup.py", "MANIFEST.in"):
            shutil.copy(REPOSITORY / name, self.root)
        for name in ("series", "requirements"):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, self.root / name, ignore=ignore)
        for path, content in (STOCK_FILES | self.information("cpu")).items():
            (self.stock / path).parent.mkdir(parents=True, exist_ok=True)
            (self.stock / path).write_bytes(content)

    @staticmethod
    def information(target: str) -> dict[str, bytes]:
        """Returns the files of the stock wheel's dist-info directory."""
        name = release.STOCK_NAMES[target]
        folder = f"{name.replace('-', '_')}-0.32.0.dist-info"
        return {
            f"{folder}/METADATA": METADATA.format(name=name).encode(),
            f"{folder}/WHEEL": b"Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n",
            f"{folder}/entry_points.txt": ENTRY_POINTS,
            f"{folder}/top_level.txt": b"vllm\n",
            f"{folder}/licenses/LICENSE": b"Upstream's licence\n",
        }

    def wheel(self, target: str = "cpu") -> Path:
        """Writes the stock wheel for `target`."""
        name = release.STOCK_NAMES[target].replace("-", "_")
        path = self.folder / f"{name}-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
        if path.exists():
            return path
        with WheelFile(path, "w") as archive:
            for name, content in (STOCK_FILES | self.information(target)).items():
                archive.writestr(name, content)
        return path

    def series(self) -> Series:
        return load(self.root)

    def write_module(self, path: str, text: str) -> Path:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        return place

    def list_patches(self, *names: str) -> None:
        text = "# in order\n\n" + "".join(f"{name}\n" for name in names)
        (self.root / "patches" / "series").write_text(text)

    def write_patch(self, name: str, inserts: Inserts) -> Path:
        """Writes a patch on top of the others, and lists it."""
        series = self.series()
        files = []
        for path, hunks in inserts.items():
            stock = (self.stock / path).read_bytes()
            lines = patched_lines(series, path, stock)
            made = tuple(
                Hunk(after, tuple(f"{line}\n".encode() for line in inserted))
                for after, inserted in hunks
            )
            old = blob_id(join_lines(lines))
            file = FilePatch(path, old, "", "100644", made)
            new = blob_id(join_lines(file.insert(lines, name)))
            files.append(FilePatch(path, old, new, "100644", made))
        place = self.root / "patches" / name
        header = HEADER.format(name=name).encode()
        place.write_bytes(Patch(name, header, tuple(files)).format())
        self.list_patches(*[patch.name for patch in series.patches], name)
        return place

    def make_tree(self, force: bool = False) -> list[str]:
        stock = Stock(self.stock)
        return make_tree(self.series(), stock, "cpu", self.directory, force)

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs `python -m series` in the repository."""
        command = [sys.executable, "-m", "series", *map(str, words)]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True)

    def snapshot(self, folder: Path) -> dict[str, bytes]:
        """Returns all files below `folder`."""
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.delenv("VLLM_PRECOMPILED_WHEEL_LOCATION", raising=False)
    monkeypatch.setattr(release, "has_nvidia_driver", lambda: False)
    return Sample(tmp_path)
