# SPDX-License-Identifier: Apache-2.0
"""Reads hidden states out of a response. The last one needs NumPy alone."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

FIELD = "kv_transfer_params"
VECTOR = "last_hidden_state"
ROWS = "hidden_states"


def last_hidden_state(response: Any) -> np.ndarray:
    """The vector of a request that asked for it, in either encoding.

    Args:
        response: What has ``kv_transfer_params``: a completion or chat completion of
            OpenAI's client, one of its choices, the same as a ``dict``, or an output
            of ``LLM.generate``. Of a list of prompts, or of chats, each choice has its
            own.

    Returns:
        ``[hidden_size]``, float32.

    Raises:
        LookupError: if there is no vector, with the server's reason if it gave one.

    Example:
        >>> response = {"kv_transfer_params": {"last_hidden_state": [0.5, -1.0]}}
        >>> last_hidden_state(response)
        array([ 0.5, -1. ], dtype=float32)
    """
    params = _params(response)
    vector = params.get(VECTOR)
    if vector is None:
        reason = params.get(
            f"{VECTOR}_error",
            f"no {VECTOR!r} in its {FIELD}; a request asks for one by "
            f'"{FIELD}": {{"return_{VECTOR}": true}}',
        )
        raise LookupError(f"this response has no last hidden state: {reason}")
    if isinstance(vector, str):
        return np.frombuffer(base64.b64decode(vector), dtype="<f4").astype(np.float32)
    return np.array(vector, dtype=np.float32)


def hidden_states(response: Any, dequantize: bool = False) -> dict[str, Any]:
    """The rows of a request that asked for ``return_inline``.

    Args:
        response: As of ``last_hidden_state``.
        dequantize: Give hidden states in the model's dtype, whatever the server's
            ``storage_dtype`` is.

    Returns:
        As ``load_hidden_states`` does: ``hidden_states`` ``[num_tokens, num_layers,
        hidden_size]``, and ``token_ids`` ``[num_tokens]`` int64; beside float8_e4m3
        also ``hidden_states_scales`` ``[num_tokens, 1, 1]``. Tensors of PyTorch.

    Raises:
        LookupError: if there are none, with the server's reason if it gave one.
    """
    import torch

    from vllm.v1.hidden_states.dtypes import SCALES, dequantized

    params = _params(response)
    told = params.get(ROWS)
    if told is None:
        reason = params.get(
            f"{ROWS}_error",
            f"no {ROWS!r} in its {FIELD}; a request asks for them by "
            f'"{FIELD}": {{"return_inline": true}}',
        )
        raise LookupError(f"this response has no hidden states: {reason}")

    def decode(data: str, dtype: torch.dtype) -> torch.Tensor:
        decoded = bytearray(base64.b64decode(data))
        return torch.frombuffer(decoded, dtype=torch.uint8).view(dtype)

    rows = decode(told["data"], getattr(torch, told["dtype"])).view(told["shape"])
    tensors = {
        "hidden_states": rows,
        "token_ids": torch.tensor(told["token_ids"], dtype=torch.int64),
    }
    if "scales" in told:
        tensors[SCALES] = decode(told["scales"], torch.float32).view(-1, 1, 1)
    return dequantized(tensors, told["model_dtype"]) if dequantize else tensors


def _params(response: Any) -> Mapping[str, Any]:
    if isinstance(response, Mapping):
        return response.get(FIELD) or {}
    return getattr(response, FIELD, None) or {}
