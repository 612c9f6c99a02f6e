# SPDX-License-Identifier: Apache-2.0
"""Which requests the engine takes, before its scheduler sees them.

A front end has refused what is not valid as far as it can tell. What remains is known
to the engine alone, or has passed a front end that does not know of it (the Rust one):
such a request ends at once, and its output says why.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from vllm.v1.hidden_states.last_output import ERROR
from vllm.v1.hidden_states.last_request import (
    ENCODING,
    FLAG,
    NORMALIZE,
    parse_last_request,
    refuse_several_tokens,
)
from vllm.v1.hidden_states.request import RequestError

EXTRACTION_ERROR = "hidden_states_error"
STATUS = "hidden_states_status"


def refuses(engine_core: Any, request: Any) -> bool:
    """Whether a request has been ended instead of being taken.

    What it says of its last hidden state is kept apart: a connector sees its own
    parameters only, and none where there are no others.
    """
    is_ours = isinstance(request.kv_transfer_params, Mapping)
    options = request.kv_transfer_params
    if is_ours and FLAG in options:
        ours = (FLAG, ENCODING, NORMALIZE)
        others = {key: value for key, value in options.items() if key not in ours}
        request.kv_transfer_params = others or None
    if request.abort_immediately:
        # A front end has refused it, and a connector has to hear of that.
        return False
    # Without a queue it is an engine in its caller's process.
    can_end = hasattr(engine_core, "output_queue")
    if is_ours:
        try:
            request.last_hidden_state = parse_last_request(options)
            if request.last_hidden_state is not None:
                refuse_several_tokens(request.sampling_params)
        except RequestError as error:
            if not can_end:
                raise  # who has passed it by hand
            _end(engine_core, request, {ERROR: str(error)})
            return True
    if not can_end:
        return False  # its scheduler says so, with the request's output
    from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_metadata import (
        refusal,
    )

    if request.request_id in engine_core.scheduler.requests:
        return False  # a session goes on: it is taken already
    refused = refusal(engine_core.scheduler.get_kv_connector(), request)
    if refused is not None:
        cause, status = refused
        _end(engine_core, request, {EXTRACTION_ERROR: cause, STATUS: int(status)})
    return refused is not None


def _end(engine_core: Any, request: Any, params: dict[str, Any]) -> None:
    """End a request that no scheduler has seen.

    As aborted: of what ended with an error the Rust front end hands on nothing.
    """
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    output = EngineCoreOutput(
        request.request_id,
        [],
        finish_reason=FinishReason.ABORT,
        kv_transfer_params=params,
    )
    outputs = EngineCoreOutputs(
        finished_requests={request.request_id}, outputs=[output]
    )
    engine_core.output_queue.put_nowait((request.client_index, outputs))


def http_error(params: Mapping[str, Any]) -> Exception | None:
    """What a server answers where an output's parameters are a refusal.

    Without its vector, too, there is no answer.
    """
    from vllm.exceptions import GracefulHTTPError

    if ERROR in params:
        return GracefulHTTPError(params[ERROR], HTTPStatus.INTERNAL_SERVER_ERROR)
    if STATUS in params:
        status = HTTPStatus(params[STATUS])
        return GracefulHTTPError(params[EXTRACTION_ERROR], status)
    return None
