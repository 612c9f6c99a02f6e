# SPDX-License-Identifier: Apache-2.0
"""What one request asks for, in its ``kv_transfer_params``.

Read twice: by the front end, which refuses what is not valid before anything is
queued (HTTP 400), and by the engine, which another front end may reach unchecked.
"""

import difflib
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config.hidden_states import HiddenStatesConfig

PARAMS_KEY = "kv_transfer_params"
EXTRACT = "extract_hidden_states"
LAYERS = "hidden_states_layers"
OUTPUT = "include_output_tokens"
PATH = "hidden_states_path"
INLINE = "return_inline"
OPTIONS = (EXTRACT, LAYERS, OUTPUT, PATH, INLINE)

# In a request's extra_args, by the front end: requests that are left out.
MARK = "hidden_states_left_out"
FURTHER_CHOICES = "choices after the first"  # of `n` > 1: all have the same prompt
ALL = "all"

# For requests that are made on a request's way, such as a step of a beam search: no
# response has their paths. By identity, so that no client can say it.
PART_OF_ANOTHER = {MARK: ("part of another request",)}

# More than any use of options needs; what is beyond costs time, or the engine's life
# (its processes exchange requests by recursive means).
MAX_PATH = 1024  # bytes
MAX_PART = 240  # of one name in it: 255 with what we put behind
# How our files end, and what stands beside them: no name of a directory.
RESERVED = (
    ".safetensors",
    *(f".safetensors.{end}" for end in ("lock", "partial", "error", "whole")),
)
MAX_KEYS = 64
MAX_KEY_LENGTH = 100
MAX_DEPTH = 16


class RequestError(ValueError):
    """An option of a request is not valid.

    Attributes:
        option: Its name, as in ``kv_transfer_params.include_output_tokens``.
        value: What was given, shortened to be shown.
    """

    def __init__(
        self, option: str, value: Any, sentence: str, within: str = PARAMS_KEY
    ):
        self.option = ".".join(filter(None, (within, option)))
        self.value = _shortened.repr(value)
        super().__init__(f"{self.option} {self.value}: {sentence}")


_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 80
_shortened.maxlist = _shortened.maxdict = 12
_shortened.maxlevel = 1


@dataclass(frozen=True)
class HiddenStatesRequest:
    """What is extracted of one request."""

    columns: tuple[int, ...] | None
    """Which of the server's layers, by their place; None for all of them."""

    include_output_tokens: bool
    """Also rows of the output's tokens but for the last, which never is an input."""

    path: str | None = None
    """Where the client wants its file; absolute. None leaves it to the engine."""

    is_inline: bool = False
    """The response carries the rows, and no file is made."""


def parse_request(
    params: Any, config: "HiddenStatesConfig"
) -> HiddenStatesRequest | None:
    """The options in a request's ``kv_transfer_params``; None where it opts out.

    Raises:
        RequestError: naming the option, its value, and what would be valid.
    """
    if params is None:
        params = {}
    if not isinstance(params, Mapping):
        raise RequestError("", params, "not an object; valid: options by name")
    refuse_misspelled(params, OPTIONS)
    # Who says how wants it: an option alone would be passed over without a word.
    said = [params.get(option) for option in (LAYERS, OUTPUT, PATH, INLINE)]
    # Not by truth or equality, which arrays have not.
    says_how = any(value is not None and value is not False for value in said)
    extract = _flag(params, EXTRACT, config.extract_by_default or says_how)
    include_output_tokens = _flag(params, OUTPUT, False)
    columns = _columns(params.get(LAYERS), config.layer_ids)
    path = _path(params.get(PATH), config)
    is_inline = _flag(params, INLINE, False)
    if is_inline and path is not None:
        raise RequestError(INLINE, True, f"no file is made then; valid: no {PATH}")
    if not extract:
        return None
    return HiddenStatesRequest(columns, include_output_tokens, path, is_inline)


def refuse_beyond_inline(
    asked: HiddenStatesRequest, num_tokens: int, bytes_per_row: int, limit: int
) -> None:
    """Refuse rows in the response that are more than it may carry.

    Args:
        asked: By the request.
        num_tokens: The most that the request can have rows for.
        bytes_per_row: Of its layers.
        limit: The engine's, in bytes.

    Raises:
        RequestError: with the sizes.
    """
    num_bytes = num_tokens * bytes_per_row
    if asked.is_inline and num_bytes > limit:
        raise RequestError(
            INLINE,
            True,
            f"its hidden states take up to {num_bytes} bytes ({num_tokens} tokens); "
            f"valid: at most {limit} (the engine's max_inline_bytes)",
        )


def is_left_out(request: Any) -> bool:
    """Whether an engine's request has no response of its own that could have a path."""
    extra_args = getattr(request.sampling_params, "extra_args", None) or {}
    mark = extra_args.get(MARK)
    if mark == FURTHER_CHOICES:
        # Such requests are named "<index>_<id of the whole>".
        return not request.request_id.startswith("0_")
    return bool(mark == ALL)


def refuse_what_cannot_travel(params: Any) -> None:
    """Refuse parameters that the engine's processes could not hand to each other.

    Raises:
        RequestError: if they are nested too deeply, or hold text that is no Unicode.
    """
    level = [params]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                inner += [*value, *value.values()]
            elif isinstance(value, (list, tuple)):
                inner += value
            elif isinstance(value, str) and not _is_unicode(value):
                raise RequestError("", params, "it holds text that is no Unicode")
            elif isinstance(value, int) and not -(2**63) <= value < 2**64:
                raise RequestError("", value, "it holds an integer beyond 64 bits")
        if not inner:
            return
        level = inner
    raise RequestError(
        "", params, f"nested too deeply; valid: at most {MAX_DEPTH} levels"
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_misspelled(params: Mapping[str, Any], options: Sequence[str]) -> None:
    """Refuse keys that look like one of the options, and would be passed over.

    Raises:
        RequestError: naming the key and the option.
    """
    if len(params) > MAX_KEYS:
        return
    for key in params:
        if key in options or len(str(key)) > MAX_KEY_LENGTH:
            continue
        if near := _nearest(str(key), tuple(options)):
            raise RequestError(
                str(key), params[key], f"no such option; did you mean {near!r}?"
            )


@lru_cache(maxsize=1024)  # requests have the same few keys, again and again
def _nearest(key: str, options: tuple[str, ...]) -> str | None:
    near = difflib.get_close_matches(key, options, n=1, cutoff=0.85)
    return near[0] if near else None


def _flag(params: Mapping[str, Any], name: str, default: bool) -> bool:
    value = params.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(name, value, "not a boolean; valid: true, false")
    return value


def _path(path: Any, config: "HiddenStatesConfig") -> str | None:
    """Where a client's file goes; symbolic links are looked at when it is made."""
    if path is None:
        return None
    if not config.allow_custom_save_path:
        raise RequestError(
            PATH, path, "this engine chooses the paths (allow_custom_save_path)"
        )
    roots = config.save_roots
    valid = f"valid: a path that ends in .safetensors, below {', '.join(roots)}"
    if not isinstance(path, str) or not path.endswith(".safetensors"):
        raise RequestError(PATH, path, valid)
    if "\0" in path or not _is_unicode(path) or len(path.encode()) > MAX_PATH:
        raise RequestError(PATH, path, f"with NUL, no Unicode, or too long; {valid}")
    full = os.path.normpath(os.path.join(roots[0], path))
    inner = [full[len(root) :] for root in roots if _is_below(full, root)]
    if not inner:
        raise RequestError(PATH, path, f"elsewhere; {valid}")
    # No directory where a file of hidden states, or what is beside it, may come.
    for folder in min(inner, key=len).split("/")[:-1]:
        if folder.endswith(RESERVED):
            raise RequestError(
                PATH, path, f"a directory in it ends as files do that are ours; {valid}"
            )
    if any(len(part.encode()) > MAX_PART for part in full.split("/")):
        raise RequestError(
            PATH, path, f"with a name of more than {MAX_PART} bytes; {valid}"
        )
    if not os.path.basename(full).removesuffix(".safetensors"):
        raise RequestError(PATH, path, f"without a name; {valid}")
    return full


def _is_below(path: str, root: str) -> bool:
    return path.startswith(os.path.join(root, ""))


def _columns(layers: Any, layer_ids: tuple[int, ...]) -> tuple[int, ...] | None:
    if layers is None:
        return None
    valid = f"valid: a list of distinct layers out of {list(layer_ids)}"
    if not isinstance(layers, (list, tuple)) or not layers:
        raise RequestError(LAYERS, layers, f"not a non-empty list; {valid}")
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise RequestError(
                LAYERS, layers, f"{_shortened.repr(layer)} is not an integer; {valid}"
            )
        if layer not in layer_ids:
            raise RequestError(
                LAYERS, layers, f"this engine does not extract layer {layer}; {valid}"
            )
    if len(set(layers)) != len(layers):
        raise RequestError(LAYERS, layers, f"a layer is given twice; {valid}")
    columns = tuple(layer_ids.index(layer) for layer in layers)
    return None if columns == tuple(range(len(layer_ids))) else columns
