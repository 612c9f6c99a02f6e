# SPDX-License-Identifier: Apache-2.0
"""Composing and applying, and every way in which it is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from series.compose import compose, load
from series.errors import SeriesError
from series.files import write_all
from series.stock import Stock

if TYPE_CHECKING:
    from tests.series.conftest import Sample

ALPHA, BETA = "vllm/alpha.py", "vllm/beta.py"


@pytest.fixture
def two(sample: Sample) -> Sample:
    """Two patches that share a file, a replaced module and a new one."""
    sample.write_patch("0001-one.patch", {ALPHA: [(2, ["one"])], BETA: [(0, ["b"])]})
    sample.write_patch("0002-two.patch", {ALPHA: [(3, ["two"]), (41, ["end"])]})
    sample.write_module("vllm/replaced.py", "new = 1\n")
    sample.write_module("vllm/added/new.py", "added = 1\n")
    return sample


def apply(sample: Sample) -> None:
    write_all(sample.stock, compose(sample.series(), Stock(sample.stock), "cpu"))


def refused(sample: Sample, message: str) -> str:
    """Applies, expecting an error that leaves the target as it was."""
    before = sample.snapshot(sample.stock)
    with pytest.raises(SeriesError, match=message) as caught:
        apply(sample)
    assert sample.snapshot(sample.stock) == before
    return str(caught.value)


def test_apply(two: Sample) -> None:
    before = two.snapshot(two.stock)
    mode = (two.stock / "vllm/tool.sh").stat().st_mode
    apply(two)
    after = two.snapshot(two.stock)
    lines = after[ALPHA].split(b"\n")
    assert lines[:5] == [b"alpha 1", b"alpha 2", b"one", b"two", b"alpha 3"]
    assert lines[-2:] == [b"end", b""]
    assert after[BETA] == b"b\n" + before[BETA]
    assert after["vllm/replaced.py"] == b"new = 1\n"
    assert after["vllm/added/new.py"] == b"added = 1\n"
    changed = {path for path in after if after[path] != before.get(path)}
    assert changed == {ALPHA, BETA, "vllm/replaced.py", "vllm/added/new.py"} | {
        "vllm/_version.py"
    }
    assert (two.stock / "vllm/tool.sh").stat().st_mode == mode


def test_version_module_has_upstreams_names(two: Sample) -> None:
    content = compose(two.series(), Stock(two.stock), "cpu")["vllm/_version.py"]
    names: dict[str, object] = {}
    exec(content, names)
    assert names["version"] == names["__version__"] == "0.32.0+hs.1.cpu"
    assert names["version_tuple"] == (0, 32, 0, "hs.1.cpu")
    assert names["__version_tuple__"] == names["version_tuple"]
    assert names["commit_id"] is names["__commit_id__"] is None


def test_a_wheel_gives_the_same_as_a_directory(two: Sample) -> None:
    series = two.series()
    from_wheel = compose(series, Stock(two.wheel()), "cpu")
    assert from_wheel == compose(series, Stock(two.stock), "cpu")


def test_unknown_file(two: Sample) -> None:
    (two.stock / BETA).write_bytes(b"changed\n")
    message = refused(two, "does not know")
    assert BETA in message
    assert "the patch is for vLLM 0.32.0" in message
    assert "holds vLLM 0.32.0" in message


def test_applied_twice(two: Sample) -> None:
    apply(two)
    refused(two, "already applied")


def test_applied_twice_without_patches(sample: Sample) -> None:
    apply(sample)
    refused(sample, "already applied")


@pytest.mark.parametrize("path", [BETA, "vllm/replaced.py", "vllm/_version.py"])
def test_half_applied(two: Sample, path: str) -> None:
    done = compose(two.series(), Stock(two.stock), "cpu")
    (two.stock / path).write_bytes(done[path])
    assert path in refused(two, "in part")


def test_half_applied_within_one_file(two: Sample) -> None:
    alpha = (two.stock / ALPHA).read_bytes()
    between = alpha.replace(b"alpha 2\n", b"alpha 2\none\n")
    (two.stock / ALPHA).write_bytes(between)
    assert ALPHA in refused(two, "in part")


@pytest.mark.parametrize("version", ["0.31.1", "0.32.1", "0.32.0+hs.9"])
def test_wrong_release(two: Sample, version: str) -> None:
    (two.stock / "vllm/_version.py").write_text(f"__version__ = version = '{version}'")
    message = refused(two, "series is for vLLM 0.32.0")
    assert f"holds vLLM {version}" in message


def test_upstreams_own_cpu_build_is_the_release(two: Sample) -> None:
    text = "__version__ = version = '0.32.0+cpu'\n"
    (two.stock / "vllm/_version.py").write_text(text)
    apply(two)


def test_no_vllm(two: Sample) -> None:
    with pytest.raises(SeriesError, match="holds no vLLM"):
        compose(two.series(), Stock(two.root / "patches"), "cpu")


def test_missing_file(two: Sample) -> None:
    (two.stock / BETA).unlink()
    assert BETA in refused(two, "has no such file")


def test_unwritable_target(two: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace
    seen: list[str] = []

    def fail(source: Path, destination: Path) -> None:
        seen.append(str(destination))
        if len(seen) == 3:
            raise PermissionError(13, "Permission denied")
        replace(source, destination)

    monkeypatch.setattr(os, "replace", fail)
    folders = {path for path in two.stock.rglob("*") if path.is_dir()}
    message = refused(two, "cannot write .* as it was")
    assert seen[2] in message
    assert {path for path in two.stock.rglob("*") if path.is_dir()} == folders


def test_target_in_the_way(two: Sample) -> None:
    (two.stock / "vllm/added/new.py").mkdir(parents=True)
    refused(two, "cannot read vllm/added/new.py")


def test_a_file_in_place_of_a_directory(two: Sample) -> None:
    (two.stock / "vllm/added").write_text("")
    refused(two, "cannot write")


def test_wrong_order(two: Sample) -> None:
    two.list_patches("0002-two.patch", "0001-one.patch")
    refused(two, "0001-one.patch .* out of order")


def test_first_patch_left_out(two: Sample) -> None:
    (two.root / "patches/0001-one.patch").unlink()
    two.list_patches("0002-two.patch")
    refused(two, "does not know")


def test_patch_changed_by_hand(two: Sample) -> None:
    place = two.root / "patches/0002-two.patch"
    place.write_bytes(place.read_bytes().replace(b"+end", b"+fin"))
    refused(two, "0002-two.patch .* changed by hand")


def test_listed_patch_missing(two: Sample) -> None:
    two.list_patches("0001-one.patch", "0002-two.patch", "0003-none.patch")
    refused(two, "0003-none.patch, and there is no such file")


def test_patch_not_listed(two: Sample) -> None:
    two.list_patches("0001-one.patch")
    refused(two, "0002-two.patch is not named")


def test_patch_listed_twice(two: Sample) -> None:
    two.list_patches("0001-one.patch", "0001-one.patch", "0002-two.patch")
    refused(two, "twice")


def test_patch_of_a_module(two: Sample) -> None:
    two.write_module(BETA, "ours\n")
    assert BETA in refused(two, "replaces")


def test_package_marker_must_stay_upstreams(two: Sample) -> None:
    two.write_module("vllm/__init__.py", "")
    refused(two, "must stay upstream's")


def test_caches_are_no_modules(two: Sample) -> None:
    two.write_module("vllm/added/__pycache__/new.pyc", "")
    two.write_module("vllm/.hidden/x.py", "")
    assert sorted(two.series().modules) == ["vllm/added/new.py", "vllm/replaced.py"]


def test_empty_repository(tmp_path: Path) -> None:
    series = load(tmp_path)
    assert not series.modules
    assert not series.patches


def test_insert_into_an_empty_file(sample: Sample) -> None:
    sample.write_patch("0001-one.patch", {"vllm/empty.py": [(0, ["first"])]})
    apply(sample)
    assert (sample.stock / "vllm/empty.py").read_bytes() == b"first\n"


def test_command(two: Sample) -> None:
    result = two.run("apply", two.stock)
    assert result.returncode == 0, result.stderr
    assert (two.stock / "vllm/added/new.py").exists()
    again = two.run("apply", two.stock)
    assert again.returncode == 1
    assert again.stderr.startswith("error: the series is already applied")
