# SPDX-License-Identifier: Apache-2.0
"""The native part: built where it can be, and done without elsewhere."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from series import native
from series.native import build_native

REPOSITORY = Path(__file__).resolve().parents[2]
MODULE = "vllm/v1/hidden_states/_pack.abi3.so"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_the_module_is_built_and_can_be_imported(tmp_path: Path) -> None:
    built = build_native(REPOSITORY, "cpu", tmp_path / "out")
    assert built == {MODULE: tmp_path / "out" / MODULE}
    # It needs nothing but Python: neither torch nor a vLLM.
    command = [sys.executable, "-I", "-c", "import _pack; print(_pack.pack.__doc__)"]
    command[-1] = f"import sys; sys.path.append({str(built[MODULE].parent)!r})\n" + (
        command[-1] + "\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "int64 [2, L]" in done.stdout


def test_a_gpu_needs_none(tmp_path: Path) -> None:
    assert build_native(REPOSITORY, "cuda", tmp_path) == {}


def test_no_cmake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "_cmake", lambda: None)
    assert build_native(REPOSITORY, "cpu", tmp_path) == {}
    assert "by torch, which is slower: there is no cmake" in capsys.readouterr().err


def test_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert build_native(REPOSITORY, "cpu", tmp_path) == {}
    error = capsys.readouterr().err
    assert "by torch, which is slower: cmake failed:" in error
    assert "/nowhere/cc" in error
