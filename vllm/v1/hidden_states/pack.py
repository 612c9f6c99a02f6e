# SPDX-License-Identifier: Apache-2.0
"""Gathers wanted rows: of several layers side by side, or single ones.

There is one kernel per kind of device, which does all in one pass: Triton's
(``pack_triton.py``) and, for CPUs, a native module (``csrc/hidden_states/pack.c``) that
a wheel has where it was built with a compiler. The torch reference is what both have to
equal bit for bit; it serves wherever there is neither.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from vllm.v1.hidden_states.dtypes import FLOAT8, FLOAT8_MAX, MIN_SCALE
from vllm.v1.hidden_states.plan import Span

# A mere copy of runs of so many bytes of a layer (their mean) is faster by torch, which
# has all of the engine's threads: by up to a half on two processors.
LONG_RUN = 256 << 10
# The order is that of pack.c.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, FLOAT8)


def pack_rows(
    layers: Sequence[torch.Tensor],
    spans: Sequence[Span],
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> int:
    """Copy the spans' rows of every layer, side by side, to the front of ``out``.

    Casts to ``out``'s dtype where a layer's differs, rounding to nearest. To
    float8_e4m3 each row ``[L, H]`` is divided by a scale of its own first, which is
    its largest magnitude divided by ``FLOAT8_MAX``. Never waits for the device.

    Args:
        layers: L tensors ``[N, H]``, in the order of the columns.
        spans: Rows to take, in the order in which they are to lie in ``out``.
        out: ``[rows, L, H]``, with at least as many rows as the spans have.
        scales: ``[rows]`` float32, for float8_e4m3.

    Returns:
        How many rows were packed.
    """
    runs = merge(spans)
    num_rows = sum(count for _, count in runs)
    if not num_rows:
        return 0
    if out.dtype == FLOAT8 and scales is None:
        raise ValueError("float8_e4m3 needs a scale for each row")
    _kernel(layers, runs, out)(layers, runs, out[:num_rows], scales)
    return num_rows


def pack_reference(
    layers: Sequence[torch.Tensor],
    runs: Sequence[tuple[int, int]],
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """What each kernel does, by torch.

    Args:
        layers, scales: See ``pack_rows``.
        runs: First rows and numbers of rows.
        out: ``[rows, L, H]``, as many rows as the runs have.
    """
    packed = 0
    for row, num_rows in runs:
        rows = slice(packed, packed + num_rows)
        taken = [layer[row : row + num_rows] for layer in layers]
        if scales is not None and out.dtype == FLOAT8:
            stacked = torch.stack(taken, dim=1).float()  # [num_rows, L, H]
            largest = stacked.abs().amax((1, 2))
            scales[rows] = (largest / FLOAT8_MAX).clamp(min=MIN_SCALE)
            out[rows] = (stacked / scales[rows, None, None]).to(FLOAT8)
        else:
            for column, layer in enumerate(taken):
                out[rows, column].copy_(layer)
        packed += num_rows


def pack_native(
    layers: Sequence[torch.Tensor],
    runs: Sequence[tuple[int, int]],
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """As ``pack_reference``, by the native module."""
    table = np.array(
        [
            [layer.data_ptr() for layer in layers],
            [layer.stride(0) * layer.element_size() for layer in layers],
        ],
        np.int64,
    )
    _native().pack(
        table,
        np.array(runs, np.int64),
        out.shape[2],
        DTYPES.index(layers[0].dtype),
        out.data_ptr(),
        DTYPES.index(out.dtype),
        0 if scales is None else scales.data_ptr(),
    )


def _kernel(
    layers: Sequence[torch.Tensor],
    runs: Sequence[tuple[int, int]],
    out: torch.Tensor,
) -> Any:
    """What packs these layers; all kernels want rows whose values are adjacent."""
    dtypes = {layer.dtype for layer in layers}
    is_simple = (
        len(dtypes) == 1
        and dtypes <= set(DTYPES[:-1])
        and out.dtype in DTYPES
        and out.is_contiguous()
        and all(layer.dim() == 2 and layer.stride(1) == 1 for layer in layers)
    )
    if is_simple and out.device.type == "cpu" and _native() is not None:
        is_copy = dtypes == {out.dtype}
        num_rows = sum(count for _, count in runs)
        row_bytes = out.shape[2] * out.element_size()
        is_long = num_rows * row_bytes >= LONG_RUN * len(runs)
        return pack_reference if is_copy and is_long else pack_native
    if is_simple and out.device.type == "cuda" and has_triton():
        from vllm.v1.hidden_states.pack_triton import pack_triton

        return pack_triton
    return pack_reference


@cache
def _native() -> Any:
    """The native module; None in a wheel that was built without a compiler."""
    try:
        from vllm.v1.hidden_states import _pack  # type: ignore[attr-defined]
    except ImportError:
        return None
    return _pack


def has_native() -> bool:
    """Whether CPUs have the native module."""
    return _native() is not None


@cache
def has_triton() -> bool:
    """Whether Triton can be imported, for GPUs."""
    return importlib.util.find_spec("triton") is not None


def gather_rows(hidden_states: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A copy of single rows, ``[len(rows), H]``; never waits for the device.

    Args:
        hidden_states: ``[N, H]``.
        rows: Which of them, in the order in which they are to come.
    """
    index = torch.tensor(rows, pin_memory=hidden_states.device.type != "cpu")
    index = index.to(hidden_states.device, non_blocking=True)
    return hidden_states.index_select(0, index)


def merge(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Spans that touch each other, merged into (first row, rows): fewer copies."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        if runs and sum(runs[-1]) == span.row:
            runs[-1] = (runs[-1][0], runs[-1][1] + span.num_rows)
        else:
            runs.append((span.row, span.num_rows))
    return runs
