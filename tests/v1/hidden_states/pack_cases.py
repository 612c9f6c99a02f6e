# SPDX-License-Identifier: Apache-2.0
"""Layers and rows to pack, and the comparison of a kernel with the reference.

Needs torch alone, so that it serves on a GPU machine without a vLLM, too.
"""

import random
from collections.abc import Callable

import torch

from vllm.v1.hidden_states.dtypes import FLOAT8
from vllm.v1.hidden_states.pack import DTYPES, pack_reference

MODEL_DTYPES = DTYPES[:-1]
ODD = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 65504.0, 65520.0)


def make_case(
    seed: int,
    dtype: torch.dtype,
    num_layers: int,
    num_rows: int,
    hidden_size: int,
    device: str = "cpu",
) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Layers ``[N, H]`` of any magnitude and stride, and runs of their rows."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(num_layers):
        # float32 has numbers of 1e-45 to 3e38, each a case of some cast.
        magnitude = 10.0 ** choose.uniform(-45, 38)
        padding = choose.choice([0, 0, 1, 5])
        shape = num_rows, hidden_size + padding
        layer = (torch.randn(shape, generator=generator) * magnitude).to(dtype)
        for _ in range(choose.randrange(3)):
            row, column = choose.randrange(num_rows), choose.randrange(hidden_size)
            layer[row, column] = choose.choice(ODD)
        if choose.random() < 0.1:
            layer[choose.randrange(num_rows)] = 0
        layers.append(layer.to(device)[:, :hidden_size])
    runs, row = [], choose.randrange(num_rows)
    while row < num_rows:
        count = choose.randint(1, num_rows - row)
        runs.append((row, count))
        row += count + choose.randrange(3)
    return layers, runs


def compare(
    kernel: Callable[..., None],
    layers: list[torch.Tensor],
    runs: list[tuple[int, int]],
    out_dtype: torch.dtype,
) -> None:
    """Assert that a kernel does what the reference does, bit for bit."""
    device = layers[0].device
    shape = sum(count for _, count in runs), len(layers), layers[0].shape[1]
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for pack, tensors in ((kernel, found), (pack_reference, expected)):
        # Beyond the rows, for what is written where it must not be.
        guarded = torch.full((shape[0] + 1, *shape[1:]), 3.0, device=device)
        rows = guarded.to(out_dtype)
        scales = torch.full((shape[0] + 1,), 3.0, device=device)
        needs_scales = out_dtype == FLOAT8
        pack(layers, runs, rows[:-1], scales[:-1] if needs_scales else None)
        assert (rows[-1].float() == 3).all() and scales[-1] == 3
        tensors += [rows, scales]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(bits(one), bits(other))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, bit for bit; all that is not a number counts as one."""
    is_number = ~tensor.float().isnan()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(integers).where(
        is_number, torch.zeros((), dtype=integers).to(tensor.device)
    )
