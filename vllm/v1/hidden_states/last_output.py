# SPDX-License-Identifier: Apache-2.0
"""The last hidden state in a request's output, as the engine hands it to front ends.

Front ends pass on what stands in an output's ``kv_transfer_params``. Only what JSON
has may stand there: the Rust front end takes nothing else.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm.v1.hidden_states.client import VECTOR
from vllm.v1.hidden_states.last import StepVectors
from vllm.v1.hidden_states.last_request import (
    BASE64,
    ENCODING,
    FLAG,
    NORMALIZE,
    LastHiddenStateRequest,
    parse_last_request,
    refuse_several_tokens,
)
from vllm.v1.hidden_states.request import RequestError

METADATA = f"{VECTOR}_metadata"
ERROR = f"{VECTOR}_error"


def refuses(engine_core: Any, request: Any) -> bool:
    """Keep what an engine's request says of its last hidden state apart.

    A connector sees its own parameters only, and none where there are no others. What
    is not valid has passed a front end that does not know of it (the Rust one): it
    ends at once, and says so where the vector would be.
    """
    options = request.kv_transfer_params
    if not isinstance(options, Mapping):
        return False
    ours = (FLAG, ENCODING, NORMALIZE)
    if FLAG in options:
        others = {key: value for key, value in options.items() if key not in ours}
        request.kv_transfer_params = others or None
    if request.abort_immediately:
        # A front end has refused it, and a connector has to hear of that.
        return False
    try:
        request.last_hidden_state = parse_last_request(options)
        if request.last_hidden_state is not None:
            refuse_several_tokens(request.sampling_params)
    except RequestError as error:
        if not hasattr(engine_core, "output_queue"):
            raise  # an engine in its caller's process, who has passed it by hand
        _end(engine_core, request, str(error))
        return True
    return False


def _end(engine_core: Any, request: Any, cause: str) -> None:
    """End a request that no scheduler has seen.

    As aborted: of what ended with an error the Rust front end hands on nothing.
    """
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    output = EngineCoreOutput(
        request.request_id,
        [],
        finish_reason=FinishReason.ABORT,
        kv_transfer_params={ERROR: cause},
    )
    outputs = EngineCoreOutputs(
        finished_requests={request.request_id}, outputs=[output]
    )
    engine_core.output_queue.put_nowait((request.client_index, outputs))


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
