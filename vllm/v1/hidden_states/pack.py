# SPDX-License-Identifier: Apache-2.0
"""Gathers wanted rows: of several layers side by side, or single ones."""

from collections.abc import Sequence

import torch

from vllm.v1.hidden_states.plan import Span


def pack_rows(
    layers: Sequence[torch.Tensor], spans: Sequence[Span], out: torch.Tensor
) -> int:
    """Copy the spans' rows of every layer, side by side, to the front of ``out``.

    The torch reference. Casts to ``out``'s dtype where a layer's differs.

    Args:
        layers: L tensors ``[N, H]``, in the order of the columns.
        spans: Rows to take, in the order in which they are to lie in ``out``.
        out: ``[rows, L, H]``, with at least as many rows as the spans have.

    Returns:
        How many rows were packed.
    """
    num_packed = 0
    for row, num_rows in _runs(spans):
        target = out[num_packed : num_packed + num_rows]  # [num_rows, L, H]
        for column, layer in enumerate(layers):
            target[:, column].copy_(layer[row : row + num_rows])
        num_packed += num_rows
    return num_packed


def gather_rows(hidden_states: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A copy of single rows, ``[len(rows), H]``; never waits for the device.

    Args:
        hidden_states: ``[N, H]``.
        rows: Which of them, in the order in which they are to come.
    """
    index = torch.tensor(rows, pin_memory=hidden_states.device.type != "cpu")
    index = index.to(hidden_states.device, non_blocking=True)
    return hidden_states.index_select(0, index)


def _runs(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Spans that touch each other, merged into (first row, rows): fewer copies."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        if runs and sum(runs[-1]) == span.row:
            runs[-1] = (runs[-1][0], runs[-1][1] + span.num_rows)
        else:
            runs.append((span.row, span.num_rows))
    return runs
