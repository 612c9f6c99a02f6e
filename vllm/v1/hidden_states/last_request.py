# SPDX-License-Identifier: Apache-2.0
"""Requests that ask for their last hidden state, in their ``kv_transfer_params``.

Read by the front end, which refuses what is not valid before anything is queued
(HTTP 400), by the engine, which another front end may reach unchecked, and by workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.hidden_states.client import VECTOR
from vllm.v1.hidden_states.request import PARAMS_KEY, RequestError, refuse_misspelled

FLAG = "return_last_hidden_state"
ENCODING = "encoding_format"
NORMALIZE = "normalize"

FLOAT = "float"
BASE64 = "base64"
ENCODINGS = (FLOAT, BASE64)


@dataclass(frozen=True)
class LastHiddenStateRequest:
    """How a request wants its last hidden state."""

    encoding_format: str = FLOAT
    """``float``, a JSON list; or ``base64``, of little-endian float32."""

    normalize: bool = False
    """Whether the vector is divided by its L2 norm."""


def parse_last_request(options: Any) -> LastHiddenStateRequest | None:
    """What a request's ``kv_transfer_params`` say; None if it wants no vector.

    Raises:
        RequestError: naming the option, its value, and what would be valid.
    """
    if not isinstance(options, Mapping):
        return None
    flag = options.get(FLAG)
    refuse_misspelled(options, (FLAG, ENCODING, NORMALIZE) if flag else (FLAG,))
    if not flag:
        # Not a vector: a router may hand one engine's answer to another's request.
        if options.get(VECTOR) is True:
            sentence = f"this is the response's; did you mean {FLAG!r}?"
            raise RequestError(VECTOR, options[VECTOR], sentence)
        return None
    if flag is not True:
        raise RequestError(FLAG, flag, "not a boolean; valid: true, false")
    encoding_format = options.get(ENCODING, FLOAT)
    if encoding_format not in ENCODINGS:
        raise RequestError(
            ENCODING, encoding_format, f"valid: {', '.join(map(repr, ENCODINGS))}"
        )
    normalize = options.get(NORMALIZE, False)
    if not isinstance(normalize, bool):
        raise RequestError(NORMALIZE, normalize, "not a boolean; valid: true, false")
    return LastHiddenStateRequest(encoding_format, normalize)


def refuse_several_tokens(params: Any) -> None:
    """Refuse a request with more outputs than the one token behind the vector.

    Args:
        params: The engine's sampling parameters.

    Raises:
        RequestError: naming the field.
    """
    if params.max_tokens != 1:
        raise field_error("max_tokens", params.max_tokens, "1")
    if params.n != 1:
        raise field_error("n", params.n, "1, or none")


def field_error(field: str, value: Any, valid: str) -> RequestError:
    """That a request's own field does not go with the flag."""
    return RequestError(
        field,
        value,
        f"with {PARAMS_KEY}.{FLAG} a request has one token and one choice, and is "
        f"not streamed or echoed; valid: {valid}",
        within="",
    )


def wants_last(params: Any) -> bool:
    """Whether checked sampling parameters ask for the vector."""
    extra_args = getattr(params, "extra_args", None)
    options = extra_args.get(PARAMS_KEY) if extra_args else None
    return isinstance(options, Mapping) and options.get(FLAG) is True
