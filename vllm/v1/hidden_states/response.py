# SPDX-License-Identifier: Apache-2.0
"""How what an engine says of a request's hidden states reaches every response.

It comes once, with the engine's last output of the request, in the output's
``kv_transfer_params``. Responses of several choices, of several prompts, and streams
need it elsewhere.
"""

from typing import Any

from vllm.v1.hidden_states.admission import http_error


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
    if params is not None and request_state.queue is not None:
        error = http_error(params)
        if error is not None:
            request_state.queue.put(error)
    parent = request_state.parent_req
    if parent is None:
        return params
    if params is not None:
        parent.kv_transfer_params = params
    return getattr(parent, "kv_transfer_params", None)


def add_to_choice(choice: Any, result: Any, output: Any, request: Any) -> None:
    """Give the first choice of each prompt of a list its prompt's parameters.

    Args:
        choice: Of a response, just made.
        result: What the engine said of its prompt.
        output: The output that the choice is for.
        request: A completion, or a batch of chats. One prompt's parameters are the
            response's own.
    """
    if (
        result.kv_transfer_params is not None
        and output is result.outputs[0]
        and _has_list(request)
    ):
        choice.kv_transfer_params = result.kv_transfer_params


def _has_list(request: Any) -> bool:
    """Whether a request has a list of prompts, of one too."""
    if hasattr(request, "messages") or isinstance(request.prompt_embeds, list):
        return True
    return _is_list_of_prompts(request.prompt)


def _is_list_of_prompts(prompt: Any) -> bool:
    """As opposed to one prompt's text, or its token ids."""
    return isinstance(prompt, list) and not isinstance(next(iter(prompt), None), int)


def has_several_prompts(request: Any) -> bool:
    """Whether a request, of any kind, has more prompts than one."""
    messages = getattr(request, "messages", None)
    if messages is not None:  # a batch of chats has lists of them
        return len(messages) > 1 and isinstance(messages[0], list)
    embeds = getattr(request, "prompt_embeds", None)
    prompt: Any = getattr(request, "prompt", None)
    number = len(embeds) if isinstance(embeds, list) else embeds is not None
    if _is_list_of_prompts(prompt):
        return number + len(prompt) > 1
    return number + (prompt is not None) > 1


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
