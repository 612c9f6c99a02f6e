# SPDX-License-Identifier: Apache-2.0
"""How what an engine says of a request's hidden states reaches every response.

It comes once, with the engine's last output of the request, in the output's
``kv_transfer_params``. Responses of several choices, of several prompts, and streams
need it elsewhere.
"""

from typing import Any


def keep_transfer_params(
    request_state: Any, params: dict[str, Any] | None
) -> dict[str, Any] | None:
    """What has been said of this request, or of any choice beside it, so far.

    Of ``n`` choices the first one's request has the file, and may end before others:
    the output that is handed out is that of the last.

    Args:
        request_state: The front end's, of one choice.
        params: The engine's word on it in this output.
    """
    parent = request_state.parent_req
    if parent is None:
        return params
    if params is not None:
        parent.kv_transfer_params = params
    return getattr(parent, "kv_transfer_params", None)


def add_to_choice(choice: Any, result: Any, results: list[Any]) -> None:
    """Give the first choice of each of several prompts its prompt's parameters.

    Args:
        choice: Of a completion response, just made.
        result: The output of its prompt.
        results: Those of all prompts. Where it is one, the response has its parameters.
    """
    is_first = choice.index % len(result.outputs) == 0
    if len(results) > 1 and is_first and result.kv_transfer_params is not None:
        choice.kv_transfer_params = result.kv_transfer_params


def add_to_chunk(chunk: Any, result: Any, output: Any) -> None:
    """Give the chunk that ends a prompt's stream the prompt's parameters.

    Args:
        chunk: Of a streamed response, just made.
        result: What the engine said of the prompt in this step.
        output: The choice of it that the chunk is for.
    """
    if (
        result.finished
        and result.kv_transfer_params is not None
        and output is result.outputs[-1]
    ):
        chunk.kv_transfer_params = result.kv_transfer_params
