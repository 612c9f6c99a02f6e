# SPDX-License-Identifier: Apache-2.0
"""The last hidden state in a request's output, as the engine hands it to front ends.

Front ends pass on what stands in an output's ``kv_transfer_params``. Only what JSON
has may stand there: the Rust front end takes nothing else.
"""

import base64
from typing import Any

import numpy as np

from vllm.v1.hidden_states.client import VECTOR
from vllm.v1.hidden_states.last import StepVectors
from vllm.v1.hidden_states.last_request import (
    BASE64,
    NORMALIZE,
    LastHiddenStateRequest,
)

METADATA = f"{VECTOR}_metadata"
ERROR = f"{VECTOR}_error"


def add_last_hidden_state(
    request: Any, vectors: StepVectors | None, params: dict[str, Any] | None
) -> dict[str, Any] | None:
    """An output's ``kv_transfer_params``, with the vector where it was asked for.

    Args:
        request: The engine's.
        vectors: Of the step that the output is of.
        params: As a connector has them.
    """
    asked: LastHiddenStateRequest | None = getattr(request, "last_hidden_state", None)
    if asked is None:
        return params
    position = request.num_prompt_tokens - 1
    try:
        vector, layer = _vector(request.request_id, vectors, position)
        if asked.normalize:
            vector = _normalized(vector)
    except ValueError as error:
        return {**(params or {}), ERROR: str(error)}
    metadata = {
        "position": position,
        "layer": layer,
        "representation": "post_norm",
        "normalized": asked.normalize,
        "dtype": "float32",
        "encoding_format": asked.encoding_format,
        "hidden_size": len(vector),
    }
    encoded = _in_base64(vector) if asked.encoding_format == BASE64 else vector.tolist()
    return {**(params or {}), VECTOR: encoded, METADATA: metadata}


def _vector(
    request_id: str, vectors: StepVectors | None, position: int
) -> tuple[np.ndarray, int]:
    if vectors is None or request_id not in vectors:
        raise ValueError(
            f"no vector came with the first token, from position {position}"
        )
    vector = vectors.get(request_id)
    if vector is None:
        raise ValueError(vectors.cause)
    if num_not_finite := vectors.num_not_finite(request_id):
        raise ValueError(
            f"the last hidden state, of position {position}, has {num_not_finite} "
            f"non-finite values of {len(vector)}: the model computes none for this "
            "prompt"
        )
    return vector, vectors.layer


def _normalized(vector: np.ndarray) -> np.ndarray:
    # In float64: squares of large float32 values overflow.
    norm = np.linalg.norm(vector.astype(np.float64))
    if norm == 0:
        raise ValueError(f"{NORMALIZE}: the last hidden state is zero, without length")
    unit: np.ndarray = (vector / norm).astype(np.float32)
    return unit


def _in_base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
