# SPDX-License-Identifier: Apache-2.0
"""Requests whose options are not valid, refused before anything is queued."""

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.hidden_states.last_request import (
    FLAG,
    field_error,
    parse_last_request,
    refuse_several_tokens,
)
from vllm.v1.hidden_states.request import (
    ALL,
    FURTHER_CHOICES,
    MARK,
    OPTIONS,
    OUTPUT,
    PARAMS_KEY,
    PART_OF_ANOTHER,
    PATH,
    RequestError,
    parse_request,
    refuse_misspelled,
    refuse_what_cannot_travel,
)
from vllm.v1.hidden_states.response import has_several_prompts


class InvalidRequestError(VLLMValidationError, ValueError):
    """Servers answer it with HTTP 400; offline it is a ``ValueError``."""


def check_request(vllm_config: VllmConfig, params: SamplingParams) -> None:
    """Refuse a request whose options are not valid; for front ends.

    Marks the parameters of a request that is left out, or whose further choices are.

    Raises:
        InvalidRequestError: naming the option, its value, and what would be valid.
    """
    params.extra_args = _checked_extra_args(vllm_config, params)


def check_served_request(serving: Any, params: Any) -> None:
    """As ``check_request``, for a server's handler: before it answers with a stream.

    Raises:
        InvalidRequestError: see ``check_request``.
    """
    client = getattr(serving, "engine_client", None)
    if client is not None and isinstance(params, SamplingParams):
        _checked_extra_args(client.vllm_config, params)


def _checked_extra_args(
    vllm_config: VllmConfig, params: SamplingParams
) -> dict[str, Any] | None:
    if params.extra_args is None and params.n == 1:
        return None
    extra_args = dict(params.extra_args or {})
    mark = extra_args.pop(MARK, None)
    options = extra_args.get(PARAMS_KEY)
    config = vllm_config.hidden_states_config
    try:
        refuse_what_cannot_travel(options)
        if parse_last_request(options) is not None:
            _check_last(vllm_config, params)
        if config is None:
            _refuse_without_extraction(options)
            return extra_args or None
        asked = parse_request(options, config)
        if mark is PART_OF_ANOTHER[MARK]:
            extra_args[MARK] = ALL
        elif asked is not None and params.n > 1:
            if asked.include_output_tokens:
                sentence = f"with n={params.n} there is no one output; valid: n=1"
                raise RequestError(OUTPUT, True, sentence)
            extra_args[MARK] = FURTHER_CHOICES
    except RequestError as error:
        raise _as_invalid(error) from None
    return extra_args or None


def _as_invalid(error: RequestError) -> InvalidRequestError:
    return InvalidRequestError(str(error), parameter=error.option, value=error.value)


def _check_last(vllm_config: VllmConfig, params: SamplingParams) -> None:
    """Refuse a request that could not have its last hidden state.

    Raises:
        RequestError: naming the field.
    """
    refuse_several_tokens(params)
    if params.output_kind is RequestOutputKind.DELTA:
        raise field_error("stream", True, "false")
    num_ranks = vllm_config.parallel_config.prefill_context_parallel_size
    if num_ranks > 1:
        raise RequestError(
            FLAG,
            True,
            f"not with prefill_context_parallel_size {num_ranks}, whose ranks have "
            "some tokens of a prompt only; valid: 1",
        )


def as_part(params: SamplingParams) -> SamplingParams:
    """The parameters of a request that is made on another's way."""
    params = params.clone()
    params.extra_args = (params.extra_args or {}) | PART_OF_ANOTHER
    return params


def check_fields(request: Any) -> None:
    """Refuse fields of an OpenAI request that its hidden states do not go with.

    What only the request's own fields say; see ``check_served_request`` for others.

    Args:
        request: Of any kind; of completions, chats and responses there is more to say.

    Raises:
        InvalidRequestError: naming the field.
    """
    options = getattr(request, PARAMS_KEY, None)
    if not isinstance(options, Mapping):
        return
    try:
        refuse_what_cannot_travel(options)
        if getattr(request, "use_beam_search", False):
            _refuse_beam_search(options)
        if options.get(PATH) is not None and has_several_prompts(request):
            sentence = "one file cannot be that of several prompts; valid: one prompt"
            raise RequestError(PATH, options[PATH], sentence)
        if parse_last_request(options) is not None:
            _refuse_fields(request)
    except RequestError as error:
        raise _as_invalid(error) from None


def _refuse_beam_search(options: Mapping[str, Any]) -> None:
    """No path could be handed out for its steps; and no vector is of all beams."""
    for option in (*OPTIONS, FLAG):
        if options.get(option):
            raise RequestError(
                option,
                options[option],
                "a beam search hands out no hidden states; "
                "valid: without use_beam_search",
            )


def _refuse_fields(request: Any) -> None:
    """Fields of a request that wants its last hidden state."""
    for field in ("stream", "echo"):
        if getattr(request, field, False):
            raise field_error(field, getattr(request, field), "false")
    if getattr(request, "n", None) not in (None, 1):
        raise field_error("n", request.n, "1, or none")
    limits = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    # Not what only a client knows: vLLM takes further fields, and ignores them.
    present = [field for field in limits if field in type(request).model_fields]
    given = [field for field in present if getattr(request, field) is not None]
    if not present:
        return
    limit = (given or present)[0]
    if getattr(request, limit) != 1:
        how = "" if limit in request.model_fields_set else " (not given)"
        raise field_error(limit, getattr(request, limit), f"1{how}")


def _refuse_without_extraction(options: Any) -> None:
    """Options that mean nothing here, and would be passed over without a word."""
    if not isinstance(options, Mapping):
        return  # not ours to say
    refuse_misspelled(options, OPTIONS)
    for key in OPTIONS:
        if not options.get(key):
            continue
        raise RequestError(
            key,
            options[key],
            "this engine does not extract hidden states; valid: start it with a "
            "connector that takes them",
        )
