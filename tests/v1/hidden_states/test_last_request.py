# SPDX-License-Identifier: Apache-2.0
"""Which requests for a last hidden state are valid: random ones against the contract
in plain words, through the same checks as a server's and an offline engine's."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.hidden_states_checks import (
    InvalidRequestError,
    check_fields,
    check_request,
)
from vllm.v1.hidden_states.last_request import (
    LastHiddenStateRequest,
    parse_last_request,
    wants_last,
)
from vllm.v1.hidden_states.request import RequestError

FLAG = "return_last_hidden_state"

# A busy machine is no failure.
unhurried = settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow]
)

ABSENT = object()
flags = st.sampled_from(
    [ABSENT, True, False, None, 0, 1, "", "true", "false", [], [True], {}, 2.5]
)
encodings = st.sampled_from(
    [ABSENT, "float", "base64", "FLOAT", "", None, 4, ["float"], {"a": 1}]
)
normalizes = st.sampled_from([ABSENT, True, False, None, 0, 1, "yes", []])
counts = st.sampled_from([ABSENT, None, 1, 2, 16])


def given_ones(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not ABSENT}


def engine_of(**parallel: int) -> Any:
    """As much of an engine's configuration as the checks look at."""
    parallel = {"prefill_context_parallel_size": 1} | parallel
    return SimpleNamespace(
        hidden_states_config=None, parallel_config=SimpleNamespace(**parallel)
    )


def are_valid(flag: Any, encoding: Any, normalize: Any) -> bool:
    """Of a request whose flag is truthy."""
    return (
        flag is True
        and (encoding is ABSENT or encoding in ("float", "base64"))
        and (normalize is ABSENT or isinstance(normalize, bool))
    )


@unhurried
@given(flags, encodings, normalizes, st.sampled_from([1, 2, 16]), st.integers(1, 3))
def test_offline(flag, encoding, normalize, max_tokens, n):
    options = given_ones(
        **{FLAG: flag, "encoding_format": encoding, "normalize": normalize}
    )
    params = SamplingParams(
        max_tokens=max_tokens, n=n, extra_args={"kv_transfer_params": options}
    )
    if flag is ABSENT or not flag:
        check_request(engine_of(), params)
        assert not wants_last(params)
    elif are_valid(flag, encoding, normalize) and max_tokens == n == 1:
        check_request(engine_of(), params)
        assert wants_last(params)
        asked = parse_last_request(options)
        assert asked.encoding_format == ("float" if encoding is ABSENT else encoding)
        assert asked.normalize is (normalize is True)
    else:
        with pytest.raises(ValueError, match=r"valid: ") as refusal:
            check_request(engine_of(), params)
        named = ("kv_transfer_params", "max_tokens", "n ")
        assert str(refusal.value).startswith(named)


@unhurried
@given(
    is_chat=st.booleans(),
    flag=flags,
    encoding=encodings,
    normalize=normalizes,
    max_tokens=counts,
    max_completion_tokens=counts,
    n=counts,
    stream=st.sampled_from([ABSENT, False, True]),
    echo=st.sampled_from([ABSENT, False, True]),
    beam=st.sampled_from([ABSENT, False, True]),
)
def test_served(
    is_chat,
    flag,
    encoding,
    normalize,
    max_tokens,
    max_completion_tokens,
    n,
    stream,
    echo,
    beam,
):
    """``max_completion_tokens`` wins over ``max_tokens``, and one of them must be 1."""
    options = given_ones(
        **{FLAG: flag, "encoding_format": encoding, "normalize": normalize}
    )
    fields: dict[str, Any] = given_ones(
        kv_transfer_params=options,
        max_tokens=max_tokens,
        n=n,
        stream=stream,
        echo=echo,
        use_beam_search=beam,
    )
    request: Any
    if is_chat:
        fields |= given_ones(max_completion_tokens=max_completion_tokens)
        request = ChatCompletionRequest(
            messages=[{"role": "user", "content": "x"}], **fields
        )
        limits = (max_completion_tokens, max_tokens)
    else:
        if n is None:
            del fields["n"]  # vLLM's own check lets no null pass
        request = CompletionRequest(prompt="x", **fields)
        limits = (max_tokens,)
    given_limits = [limit for limit in limits if limit not in (ABSENT, None)]
    is_one = (
        given_limits[:1] == [1]
        and n in (ABSENT, None, 1)
        and stream in (ABSENT, False)
        and echo in (ABSENT, False)
        and beam in (ABSENT, False)
    )
    if flag is ABSENT or not flag or are_valid(flag, encoding, normalize) and is_one:
        check_fields(request)
    else:
        with pytest.raises(InvalidRequestError, match="valid: ") as refusal:
            check_fields(request)
        assert refusal.value.parameter
        assert str(refusal.value).startswith(refusal.value.parameter)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_tokens": 16}, "max_tokens 16: .*valid: 1"),
        ({}, r"max_completion_tokens None: .*valid: 1 \(not given\)"),
        (
            {"max_tokens": 1, "max_completion_tokens": 2},
            "max_completion_tokens 2: .*valid: 1",
        ),
        ({"max_tokens": 1, "n": 3}, "n 3: .*valid: 1, or none"),
        ({"max_tokens": 1, "stream": True}, "stream True: .*valid: false"),
        ({"max_tokens": 1, "echo": True}, "echo True: .*valid: false"),
        (
            {"max_tokens": 1, "use_beam_search": True},
            "return_last_hidden_state True: a beam search .*without use_beam_search",
        ),
    ],
)
def test_the_sentences(fields, error):
    request: Any = ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}],
        kv_transfer_params={FLAG: True},
        **fields,
    )
    with pytest.raises(InvalidRequestError, match=error):
        check_fields(request)


def test_what_only_an_engine_knows():
    params = SamplingParams(
        max_tokens=1, extra_args={"kv_transfer_params": {FLAG: True}}
    )
    with pytest.raises(ValueError, match="prefill_context_parallel_size 2.*valid: 1"):
        check_request(engine_of(prefill_context_parallel_size=2), params)
    params.output_kind = RequestOutputKind.DELTA
    with pytest.raises(ValueError, match="stream True: .*valid: false"):
        check_request(engine_of(), params)


def test_fields_that_an_endpoint_does_not_have():
    """vLLM takes them, and ignores them."""
    fields: Any = {"prompt": "x", "max_tokens": 1, "max_completion_tokens": 5}
    check_fields(CompletionRequest(**fields, kv_transfer_params={FLAG: True}))


def test_errors_are_short_and_can_be_sent():
    nested: Any = 1
    for _ in range(6):
        nested = [nested] * 12
    for options in ({FLAG: nested}, {"return_last_hidden_stat\ud800": 1}):
        request = CompletionRequest(
            prompt="x", max_tokens=1, kv_transfer_params=options
        )
        with pytest.raises(InvalidRequestError, match="kv_transfer_params") as refusal:
            check_fields(request)
        assert len(str(refusal.value).encode()) < 2000


def test_other_requests():
    """Those without parameters, and those that only look as if they had any."""
    assert parse_last_request(None) is None
    assert parse_last_request({}) is None
    assert parse_last_request("x") is None
    assert parse_last_request({"return_all": 1, "do_remote_prefill": True}) is None
    assert not wants_last(None)
    assert not wants_last(SamplingParams())
    check_fields(SimpleNamespace())
    many = {f"return_last_hidden_state{i}": 1 for i in range(60_000)}
    assert parse_last_request(many) is None
    assert parse_last_request({"x" * 10**6: 1}) is None
    assert parse_last_request({FLAG: True, 5: 1}) == LastHiddenStateRequest()
    with pytest.raises(RequestError, match="response's; did you mean 'return_last"):
        parse_last_request({"last_hidden_state": True})
    assert parse_last_request({"last_hidden_state": [0.5], "remote": 1}) is None
    with pytest.raises(RequestError) as refusal:
        parse_last_request({FLAG: "x" * 10**6})
    assert len(str(refusal.value)) < 400
