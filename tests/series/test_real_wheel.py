# SPDX-License-Identifier: Apache-2.0
"""This repository's series on the real stock wheels (fetched once, into the cache)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from wheel.wheelfile import WheelFile

from series.compose import compose, load, patched_lines
from series.export import export
from series.patch import FilePatch, Hunk, Patch, blob_id, join_lines
from series.release import version
from series.stock import Stock, find_stock
from series.verify import verify

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).resolve().parents[2]
PARTS = ("csrc", "vllm", "patches", "series", "requirements")
FILES = (
    "CMakeLists.txt",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "LICENSE",
    "README.md",
)
NATIVE = "vllm/v1/hidden_states/_pack.abi3.so"
TARGETS = ("cpu", "cuda")


def copy_repository(root: Path) -> Path:
    """Copies what a build needs, with one more patch on top."""
    root.mkdir()
    for name in PARTS:
        if (REPOSITORY / name).exists():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, root / name, ignore=ignore)
    for name in FILES:
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, root)
    series = load(root)
    stock = Stock(find_stock("cpu"))
    files = []
    for path in ("vllm/collect_env.py", "vllm/v1/worker/gpu_model_runner.py"):
        content = stock.read(path)
        assert content is not None
        lines = patched_lines(series, path, content)
        hunks = (Hunk(0, (b"# first\n",)), Hunk(len(lines), (b"# last\n", b"# end\n")))
        old = blob_id(join_lines(lines))
        file = FilePatch(path, old, "", "100644", hunks)
        new = blob_id(join_lines(file.insert(lines, "test.patch")))
        files.append(FilePatch(path, old, new, "100644", hunks))
    header = b"From: T <t@example.org>\nSubject: [PATCH] test\n\nA test.\n---\n"
    folder = root / "patches"
    folder.mkdir(exist_ok=True)
    patch = Patch("test.patch", header, tuple(files))
    (folder / patch.name).write_bytes(patch.format())
    names = [one.name for one in series.patches] + [patch.name]
    (folder / "series").write_text("".join(f"{name}\n" for name in names))
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_repository(tmp_path_factory.mktemp("real") / "repository")


# The CUDA wheel is the same code on another stock wheel, and takes a minute.
@pytest.fixture(
    scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.soak)]
)
def built(
    request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """What `pip wheel .` makes, in a build environment of its own."""
    output = tmp_path_factory.mktemp(request.param)
    before = sorted(path.name for path in root.iterdir())
    result = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-w", str(output)],
        cwd=root,
        env=os.environ | {"VLLM_TARGET_DEVICE": request.param},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(path.name for path in root.iterdir()) == before
    (wheel,) = output.iterdir()
    return request.param, wheel


@pytest.mark.parametrize("target", TARGETS)
def test_this_repository_verifies(target: str) -> None:
    stock = Stock(find_stock(target))
    assert verify(load(REPOSITORY), stock, target) == []


def test_wheel(root: Path, built: tuple[str, Path]) -> None:
    target, wheel = built
    stock = Stock(find_stock(target))
    tag = stock.location.name.split("-", 2)[2].removesuffix(".whl")
    assert wheel.name == f"vllm-{version(target)}-{tag}.whl"
    composed = compose(load(root), stock, target)
    info = f"vllm-{version(target)}.dist-info"
    expected = set(stock.paths()) | set(composed)
    if target == "cpu" and shutil.which("cc"):
        expected.add(NATIVE)
    with WheelFile(wheel) as archive:
        names = archive.namelist()
        package = {name for name in names if not name.startswith(f"{info}/")}
        assert package == expected
        for name in names:
            content = archive.read(name)  # checks the hash in RECORD
            if name in package - {NATIVE}:
                assert content == composed.get(name, stock.read(name)), name
        assert f"Tag: {tag}" in archive.read(f"{info}/WHEEL").decode().splitlines()
        assert archive.read(f"{info}/entry_points.txt") == stock.read(
            f"{stock.dist_info}/entry_points.txt"
        )
        licences = [name for name in names if "/licenses/" in name]
        assert licences == [
            f"{info}/licenses/LICENSE",
            f"{info}/licenses/hidden-states/LICENSE",
        ]


def test_metadata(built: tuple[str, Path]) -> None:
    target, wheel = built
    with WheelFile(wheel) as archive:
        path = f"{archive.dist_info_path}/METADATA"
        ours = message_from_bytes(archive.read(path))
    stock = Stock(find_stock(target))
    theirs = message_from_bytes(stock.read(f"{stock.dist_info}/METADATA") or b"")
    assert (ours["Name"], ours["Version"]) == ("vllm", version(target))
    new = [Requirement(text) for text in ours.get_all("Requires-Dist", [])]
    old = [Requirement(text) for text in theirs.get_all("Requires-Dist", [])]
    if target == "cuda":
        assert new == old
        return
    moved = {"torchvision": "vision", "torchaudio": "audio", "torchcodec": "audio"}
    for requirement in new:
        if requirement.name in moved:
            marker = requirement.marker
            assert marker is not None
            assert not marker.evaluate({"extra": ""})
            assert marker.evaluate(
                {"extra": moved[requirement.name], "platform_machine": "x86_64"}
            )
    assert [one for one in new if one.name not in moved] == [
        one for one in old if one.name not in moved
    ]
    assert "torch==2.13.0+cpu" in [f"{one.name}{one.specifier}" for one in new]


def test_installed_command(built: tuple[str, Path], tmp_path: Path) -> None:
    target, wheel = built
    if target != "cpu":
        pytest.skip("the CPU wheel is the one that runs anywhere")
    pytest.importorskip("torch")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target"]
    subprocess.run([*install, str(site), str(wheel)], check=True, capture_output=True)
    result = subprocess.run(
        [sys.executable, str(site / "bin/vllm"), "--version"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert result.stdout.split() == [version("cpu")], result.stderr


def test_git_am_of_the_export(root: Path, tmp_path: Path) -> None:
    stock = Stock(find_stock("cpu"))
    mails = export(load(root), stock, "cpu", tmp_path / "mails")
    upstream = tmp_path / "upstream"
    expected: dict[str, bytes] = {}
    for path in stock.paths():
        if path.endswith(".py"):
            expected[path] = stock.read(path) or b""
            (upstream / path).parent.mkdir(parents=True, exist_ok=True)
            (upstream / path).write_bytes(expected[path])
    name = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        ["commit", "-qm", "stock"],
        ["am", "-q", *map(str, mails)],
    ):
        subprocess.run(["git", *name, *words], cwd=upstream, check=True)
    expected |= compose(load(root), stock, "cpu")
    expected["vllm/_version.py"] = stock.read("vllm/_version.py") or b""
    found = {
        path.relative_to(upstream).as_posix(): path.read_bytes()
        for path in (upstream / "vllm").rglob("*")
        if path.is_file()
    }
    assert found == expected
