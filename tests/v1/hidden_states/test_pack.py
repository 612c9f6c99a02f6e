# SPDX-License-Identifier: Apache-2.0
"""The pack's kernels, and which of them is taken."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.hidden_states.pack_cases import MODEL_DTYPES, compare, make_case
from vllm.v1.hidden_states import pack
from vllm.v1.hidden_states.dtypes import FLOAT8, SCALES, dequantized
from vllm.v1.hidden_states.pack import DTYPES, pack_native, pack_reference, pack_rows
from vllm.v1.hidden_states.plan import Span

cases = given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(MODEL_DTYPES),
    out_dtype=st.sampled_from(DTYPES),
    num_layers=st.integers(1, 5),
    num_rows=st.integers(1, 12),
    hidden_size=st.one_of(st.integers(1, 70), st.sampled_from([128, 511, 2049, 4096])),
)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
@settings(deadline=None, max_examples=150)
@cases
def test_the_native_kernel(seed, dtype, out_dtype, num_layers, num_rows, hidden_size):
    assert pack.has_native(), "this vLLM was built without a compiler"
    compare(
        pack_native,
        *make_case(seed, dtype, num_layers, num_rows, hidden_size),
        out_dtype,
    )


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs in the next test's process, under Triton's interpreter",
)
@settings(deadline=None, max_examples=40)
@cases
def test_the_triton_kernel(seed, dtype, out_dtype, num_layers, num_rows, hidden_size):
    from vllm.v1.hidden_states.pack_triton import pack_triton

    compare(
        pack_triton,
        *make_case(seed, dtype, num_layers, num_rows, hidden_size),
        out_dtype,
    )


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="is in such a process already"
)
def test_the_triton_kernel_in_its_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--noconftest"]
    command += ["-k", "test_the_triton_kernel", __file__]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "1 passed, 1 skipped" in done.stdout, done.stdout[-2000:]


def taken(
    layers: list[torch.Tensor], out: torch.Tensor, runs: Sequence[Any] = ((0, 4),)
) -> str:
    return pack._kernel(layers, runs, out).__name__


def test_what_the_native_kernel_cannot_do_is_done_by_torch(monkeypatch):
    rows = torch.zeros(4, 6)
    out = torch.zeros(4, 2, 6)
    monkeypatch.setattr(pack, "_native", lambda: "the module")
    assert taken([rows, rows], out) == "pack_native"
    for layers, target in (
        ([rows, rows.bfloat16()], out),
        ([rows.double()] * 2, out),
        ([rows] * 2, out.double()),
        ([torch.zeros(6, 4).T] * 2, out),
        ([rows] * 2, torch.zeros(4, 6, 2).transpose(1, 2)),
        ([torch.zeros(4, dtype=torch.int64)], torch.zeros(4, 1, dtype=torch.int64)),
    ):
        assert taken(layers, target) == "pack_reference"
    monkeypatch.setattr(pack, "_native", lambda: None)
    assert taken([rows, rows], out) == "pack_reference"


def test_long_copies_are_left_to_torch(monkeypatch):
    """Runs of 256 KiB of a layer, in the mean."""
    monkeypatch.setattr(pack, "_native", lambda: "the module")
    rows, out = torch.zeros(512, 256), torch.zeros(512, 1, 256)  # 1 KiB each
    assert taken([rows], out, [(0, 512)]) == "pack_reference"
    assert taken([rows], out, [(0, 256), (256, 256)]) == "pack_reference"
    assert taken([rows], out, [(0, 255), (256, 256)]) == "pack_native"
    assert taken([rows], out, [(0, 255)]) == "pack_native"
    assert taken([rows], out.bfloat16(), [(0, 512)]) == "pack_native"
    narrow = rows[:, :127]
    assert taken([narrow], out[:, :, :127].clone(), [(0, 512)]) == "pack_native"


def test_float8_wants_scales():
    with pytest.raises(ValueError, match="needs a scale"):
        pack_rows(
            [torch.ones(2, 4)], [Span("a", 0, 0, 2)], torch.zeros(2, 1, 4).to(FLOAT8)
        )


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(MODEL_DTYPES),
    magnitude=st.floats(-6, 4),
)
def test_float8_gives_back_what_was_there(seed, dtype, magnitude):
    """Within half a step of the type, whose steps are an eighth of a power of two."""
    torch.manual_seed(seed)
    layers = [(torch.randn(5, 33) * 10.0**magnitude).to(dtype) for _ in range(3)]
    rows = torch.empty(5, 3, 33, dtype=FLOAT8)
    scales = torch.empty(5)
    pack_reference(layers, [(0, 5)], rows, scales)
    stored = {"hidden_states": rows, SCALES: scales[:, None, None]}
    loaded = dequantized(stored, "float32")
    assert list(loaded) == ["hidden_states"]
    expected = torch.stack(layers, dim=1).float()
    # The least step is 2^-9 scales; float16 has one of its own.
    bound = (expected.abs() / 16).maximum(scales[:, None, None] * 2.0**-10)
    assert ((loaded["hidden_states"] - expected).abs() <= bound * 1.001).all()
    # The row's largest value is there as it was.
    largest = expected.abs().amax((1, 2))
    assert torch.allclose(
        loaded["hidden_states"].abs().amax((1, 2)), largest, rtol=1e-6
    )
    assert dequantized(stored, "bfloat16")["hidden_states"].dtype == torch.bfloat16
    assert dequantized(stored, None)["hidden_states"].dtype == torch.float32
