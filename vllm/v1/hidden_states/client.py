# SPDX-License-Identifier: Apache-2.0
"""Reads the last hidden state out of a response. Needs NumPy alone."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

FIELD = "kv_transfer_params"
VECTOR = "last_hidden_state"


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
    if isinstance(response, Mapping):
        params = response.get(FIELD)
    else:
        params = getattr(response, FIELD, None)
    params = params or {}
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
