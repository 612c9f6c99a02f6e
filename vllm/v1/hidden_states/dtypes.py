# SPDX-License-Identifier: Apache-2.0
"""What rows are stored in, and how what the model computed comes back."""

import torch

FLOAT8 = torch.float8_e4m3fn
# All of a row's values are divided by one scale, so that the largest becomes this.
FLOAT8_MAX = torch.finfo(FLOAT8).max
# Where all are zero, or nearly.
MIN_SCALE = torch.finfo(torch.float32).tiny
# The tensor of scales, ``[num_tokens, 1, 1]`` float32, beside float8 rows.
SCALES = "hidden_states_scales"


def name_of(dtype: torch.dtype) -> str:
    """Such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dequantized(
    tensors: dict[str, torch.Tensor], model_dtype: str | None
) -> dict[str, torch.Tensor]:
    """Hidden states in the model's dtype, whatever their own is; without scales.

    Args:
        tensors: ``hidden_states`` ``[num_tokens, num_layers, hidden_size]``, perhaps
            with ``hidden_states_scales``, and others.
        model_dtype: Such as ``"bfloat16"``; float32 where that is not known.
    """
    others = dict(tensors)
    rows, scales = others.pop("hidden_states"), others.pop(SCALES, None)
    if scales is not None:
        rows = rows.float() * scales
    dtype = getattr(torch, model_dtype or "", None)
    if not isinstance(dtype, torch.dtype):
        dtype = torch.float32
    return {"hidden_states": rows.to(dtype), **others}
