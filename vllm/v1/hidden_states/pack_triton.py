# SPDX-License-Identifier: Apache-2.0
"""The pack on a GPU: one launch for all layers and all rows of a step.

Needs torch and Triton. The layers' addresses and the rows' places go to the device in
one small table, so that the number of layers is no part of the kernel.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

FLOAT8_MAX = tl.constexpr(448.0)
MIN_SCALE = tl.constexpr(2.0**-126)
# Values that one step of a program takes.
MAX_BLOCK = 2048

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _source(table, layer, num_layers, dtype: tl.constexpr):
    """Where this program's row of a layer is."""
    row = tl.load(table + 2 * num_layers + tl.program_id(0))
    address = tl.load(table + layer).to(tl.pointer_type(dtype))
    return address + row * tl.load(table + num_layers + layer)


@triton.jit
def _to_float32(values):
    """By hand for bfloat16: the interpreter would lose its smallest numbers."""
    if values.dtype == tl.bfloat16:
        bits = values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def _to_bfloat16(values):
    """Rounded to nearest, by hand: Triton's interpreter would round down."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(values != values, 0x7FC0, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _pack(
    table, out, num_layers, hidden_size, dtype: tl.constexpr, block: tl.constexpr
):
    """Program (row, layer, block): copies values, and casts them."""
    layer = tl.program_id(1)
    source = _source(table, layer, num_layers, dtype)
    target = out + (tl.program_id(0).to(tl.int64) * num_layers + layer) * hidden_size
    offsets = tl.program_id(2) * block + tl.arange(0, block)
    mask = offsets < hidden_size
    values = tl.load(source + offsets, mask=mask)
    if out.dtype.element_ty == dtype:
        tl.store(target + offsets, values, mask=mask)
    elif out.dtype.element_ty == tl.bfloat16:
        tl.store(target + offsets, _to_bfloat16(_to_float32(values)), mask=mask)
    else:
        converted = _to_float32(values).to(out.dtype.element_ty)
        tl.store(target + offsets, converted, mask=mask)


@triton.jit
def _to_float8(values):
    """Bits of float8_e4m3, rounded to nearest: not all GPUs have an instruction.

    See ``to_float8`` in csrc/hidden_states/pack.c.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000  # the bits of 2^14
    rounded = tl.where(magnitude < 0x3C800000, subnormal, normal)  # of 2^-6
    rounded = tl.where(magnitude > 0x7F800000, 0x7F, rounded)
    return (((bits >> 24) & 0x80) | rounded).to(tl.uint8)


@triton.jit
def _quantize(
    table,
    out,
    scales,
    num_layers,
    hidden_size,
    dtype: tl.constexpr,
    block: tl.constexpr,
):
    """Program (row,): finds the scale of the row's layers, then divides by it."""
    # Bits of floats without their sign are in the order of what they stand for; what
    # is not a number is above all.
    largest = tl.zeros([block], tl.int32)
    for layer in range(num_layers):
        source = _source(table, layer, num_layers, dtype)
        for first in range(0, hidden_size, block):
            offsets = first + tl.arange(0, block)
            values = tl.load(source + offsets, mask=offsets < hidden_size, other=0.0)
            bits = _to_float32(values).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            largest = tl.maximum(largest, bits)
    magnitude = tl.max(largest, axis=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(magnitude, FLOAT8_MAX)
    scale = tl.where(scale < MIN_SCALE, MIN_SCALE, scale)
    row = tl.program_id(0).to(tl.int64)
    tl.store(scales + row, scale)
    for layer in range(num_layers):
        source = _source(table, layer, num_layers, dtype)
        target = out + (row * num_layers + layer) * hidden_size
        for first in range(0, hidden_size, block):
            offsets = first + tl.arange(0, block)
            mask = offsets < hidden_size
            values = _to_float32(tl.load(source + offsets, mask=mask, other=0.0))
            divisor = tl.zeros([block], tl.float32) + scale
            tl.store(
                target + offsets, _to_float8(tl.div_rn(values, divisor)), mask=mask
            )


def pack_triton(
    layers: Sequence[torch.Tensor],
    runs: Sequence[tuple[int, int]],
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """As ``pack_reference``, on a GPU; never waits for it."""
    num_rows, num_layers, hidden_size = out.shape
    # [L] addresses, [L] values from row to row, [rows] rows.
    table = torch.from_numpy(
        np.concatenate(
            [
                np.array([layer.data_ptr() for layer in layers], np.int64),
                np.array([layer.stride(0) for layer in layers], np.int64),
                *(np.arange(first, first + count) for first, count in runs),
            ]
        )
    )
    if out.device.type != "cpu":
        # Pinned, or the copy would wait; kept by torch until it is done.
        table = table.pin_memory().to(out.device, non_blocking=True)
    dtype = TRITON_DTYPES[layers[0].dtype]
    block = min(triton.next_power_of_2(hidden_size), MAX_BLOCK)
    if out.dtype == torch.float8_e4m3fn:
        assert scales is not None
        _quantize[(num_rows,)](
            table, out.view(torch.uint8), scales, num_layers, hidden_size, dtype, block
        )
    else:
        grid = (num_rows, num_layers, triton.cdiv(hidden_size, block))
        _pack[grid](table, out, num_layers, hidden_size, dtype, block)
