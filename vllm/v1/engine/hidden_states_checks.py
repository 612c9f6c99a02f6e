# SPDX-License-Identifier: Apache-2.0
"""Requests whose options are not valid, refused before anything is queued."""

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.hidden_states.request import (
    ALL,
    EXTRACT,
    FURTHER_CHOICES,
    LAYERS,
    MARK,
    OPTIONS,
    OUTPUT,
    PARAMS_KEY,
    PART_OF_ANOTHER,
    RequestError,
    parse_request,
    refuse_what_cannot_travel,
)


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
        raise InvalidRequestError(
            str(error), parameter=error.option, value=error.value
        ) from None
    return extra_args or None


def as_part(params: SamplingParams) -> SamplingParams:
    """The parameters of a request that is made on another's way."""
    params = params.clone()
    params.extra_args = (params.extra_args or {}) | PART_OF_ANOTHER
    return params


def check_beam_search(request: Any) -> None:
    """Refuse options of a beam search, whose steps no path could be handed out for.

    Args:
        request: Of a completion or chat completion.

    Raises:
        InvalidRequestError: naming the option.
    """
    params = request.kv_transfer_params or {}
    for option in OPTIONS:
        if params.get(option):
            raise InvalidRequestError(
                f"{PARAMS_KEY}.{option}: a beam search hands out no hidden states; "
                "valid: without use_beam_search",
                parameter=f"{PARAMS_KEY}.{option}",
            )


def _refuse_without_extraction(options: Any) -> None:
    """Options that mean nothing here, and would be passed over without a word."""
    if not isinstance(options, Mapping):
        return  # not ours to say
    if options.get(EXTRACT) or options.get(LAYERS) is not None:
        key = EXTRACT if options.get(EXTRACT) else LAYERS
        raise RequestError(
            key,
            options[key],
            "this engine does not extract hidden states; valid: start it with a "
            "connector that takes them",
        )
