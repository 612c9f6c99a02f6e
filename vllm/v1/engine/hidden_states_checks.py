# SPDX-License-Identifier: Apache-2.0
"""Requests whose options are not valid, refused before anything is queued."""

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.hidden_states.request import (
    EXTRACT,
    FIRST_CHOICE_ONLY,
    LAYERS,
    OUTPUT,
    PARAMS_KEY,
    RequestError,
    parse_request,
)


class InvalidRequestError(VLLMValidationError, ValueError):
    """Servers answer it with HTTP 400; offline it is a ``ValueError``."""


def check_request(vllm_config: VllmConfig, params: SamplingParams) -> None:
    """Refuse a request whose options are not valid; for front ends.

    Marks the parameters of a request with several choices: all have the same prompt,
    whose rows only the first one's request is to compute and write.

    Raises:
        InvalidRequestError: naming the option, its value, and what would be valid.
    """
    config = vllm_config.hidden_states_config
    options = (params.extra_args or {}).get(PARAMS_KEY)
    try:
        if config is None:
            _refuse_without_extraction(options)
            return
        asked = parse_request(options, config)
        if asked is None or params.n == 1:
            return
        if asked.include_output_tokens:
            raise RequestError(
                OUTPUT, True, f"with n={params.n} there is no one output; valid: n=1"
            )
        params.extra_args = (params.extra_args or {}) | {FIRST_CHOICE_ONLY: True}
    except RequestError as error:
        raise InvalidRequestError(
            str(error), parameter=error.option, value=error.value
        ) from None


def check_served_request(serving: Any, params: Any) -> None:
    """``check_request`` for a server's handler, before it answers with a stream.

    Raises:
        InvalidRequestError: see ``check_request``.
    """
    client = getattr(serving, "engine_client", None)
    if client is not None and hasattr(params, "extra_args"):
        check_request(client.vllm_config, params.clone())


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
