# SPDX-License-Identifier: Apache-2.0
"""The last hidden state from a plain server, by OpenAI's client over a real socket."""

import asyncio
import contextlib
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm.v1.hidden_states.client import last_hidden_state

# What serves is the same for all engines: the one that starts soonest in every run.
pytestmark = [
    pytest.mark.last_hidden_state,
    pytest.mark.starts_processes,
    pytest.mark.soak_in("V1 compiled", "V2 eager"),
]

TEXT = "A river starts as rain on a hill."
TEXTS = [TEXT, "By four the ovens are hot.", "The third one is the longest of all."]
CHAT: Any = [{"role": "user", "content": TEXT}]
PARAMS = "kv_transfer_params"
FLAG = "return_last_hidden_state"
MAX_MODEL_LEN = 2048
# A token behind which the final norm overflows.
POISON = 1023


@pytest.fixture(scope="module")
def weights(tiny_model):
    """The tiny model's, with one token whose last hidden state is not finite.

    One dimension of the residual stream is that token's alone: no layer reads or
    writes it, so that its KV cache is as finite as any. (What is not finite there
    spreads: stock vLLM's attention on a CPU has later requests read it.)
    """
    weights = load_file(Path(tiny_model) / "model.safetensors")
    writers = ("o_proj.weight", "down_proj.weight")
    readers = ("input_layernorm.weight", "attention_layernorm.weight")
    for name, weight in weights.items():
        if name.endswith(writers + readers):
            weight[0] = 0
    weights["model.embed_tokens.weight"][:, 0] = 0
    weights["model.embed_tokens.weight"][POISON, 0] = 100
    weights["model.norm.weight"][0] = 3e38
    weights["lm_head.weight"][:, 0] = 1  # with 0 there, no logit were a number
    return weights


@pytest.fixture(scope="module")
def model(tiny_model, weights, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_model, path)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


@pytest.fixture(scope="module")
def reference_last(reference_last_of, model):
    """``[H]``: of this model, in Transformers."""
    return reference_last_of(model)


@pytest.fixture(scope="module")
def served(column, engines, model, tmp_path_factory):
    server = engines.import_file(Path(__file__).with_name("server.py"))
    folder = tmp_path_factory.mktemp("served")
    options = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "32"]
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    if column.startswith("V2"):
        variables = engines.columns.v2_environment(folder / "stub")
    if column.endswith("eager"):
        options.append("--enforce-eager")
    with server.serving(model, folder, *options, **variables) as running:
        url = f"http://localhost:{running.port}/v1"
        settings: Any = {"base_url": url, "api_key": "EMPTY", "max_retries": 0}
        yield SimpleNamespace(
            client=openai.OpenAI(**settings),
            settings=settings,
            server=running,
            model=model,
            is_slow=column.startswith("V2"),
        )


@pytest.fixture
def complete(served):
    """``client.completions.create`` with the server's model."""

    def complete(prompt, options=None, **fields):
        return served.client.completions.create(
            model=served.model,
            prompt=prompt,
            **({"max_tokens": 1, "temperature": 0} | fields),
            extra_body={
                "return_token_ids": True,
                PARAMS: {FLAG: True} if options is None else options,
            },
        )

    return complete


@pytest.fixture
def chat(served):
    """``client.chat.completions.create`` with the server's model."""

    def chat(options=None, messages=CHAT, body=(), **fields):
        return served.client.chat.completions.create(
            model=served.model,
            messages=messages,
            **({"max_tokens": 1, "temperature": 0} | fields),
            extra_body={
                "return_token_ids": True,
                PARAMS: {FLAG: True} if options is None else options,
                **dict(body),
            },
        )

    return chat


@pytest.fixture
def check(reference_last):
    def check(response, token_ids) -> None:
        found = torch.from_numpy(last_hidden_state(response))
        expected = reference_last(list(token_ids))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert torch.cosine_similarity(found, expected, dim=0) > 0.99999
        told = response.model_extra[PARAMS]["last_hidden_state_metadata"]
        assert told["position"] == len(token_ids) - 1
        assert told["layer"] == 6
        assert told["representation"] == "post_norm"
        assert told["hidden_size"] == len(found) == 128

    return check


@pytest.mark.scenario("a chat completion and a completion, by text and by tokens")
@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_one_response(complete, chat, check, encoding_format):
    options = {FLAG: True, "encoding_format": encoding_format}
    response = chat(options)
    check(response, response.prompt_token_ids)
    dumped = response.model_dump()[PARAMS]["last_hidden_state"]
    assert isinstance(dumped, list if encoding_format == "float" else str)
    response = chat(options, max_tokens=16, max_completion_tokens=1)
    check(response, response.prompt_token_ids)
    response = complete(TEXT, options)
    check(response, response.choices[0].prompt_token_ids)
    for length in (1, 64, 65, 500):
        check(complete(list(range(7, 7 + length)), options), range(7, 7 + length))


@pytest.mark.scenario("the model's own logprobs, over HTTP")
def test_the_vector_gives_the_responses_logprobs(weights, complete, chat):
    head = weights["lm_head.weight"]
    response = complete(TEXT, logprobs=3)
    vector = torch.from_numpy(last_hidden_state(response))
    logprobs = torch.log_softmax(head @ vector, dim=-1)
    (told,) = response.choices[0].logprobs.token_logprobs
    assert logprobs.max().item() == pytest.approx(told, abs=1e-4)
    response = chat(logprobs=True)
    vector = torch.from_numpy(last_hidden_state(response))
    logprobs = torch.log_softmax(head @ vector, dim=-1)
    (entry,) = response.choices[0].logprobs.content
    assert logprobs.max().item() == pytest.approx(entry.logprob, abs=1e-4)


@pytest.mark.scenario("a conversation, a prefill of the answer")
def test_the_prompt_is_the_whole_rendered_one(chat, check):
    messages: Any = [
        *CHAT,
        {"role": "assistant", "content": "In the sea."},
        {"role": "user", "content": "Where does it end?"},
        {"role": "assistant", "content": "It ends in"},
    ]
    plain = chat(messages=messages[:-1])
    check(plain, plain.prompt_token_ids)
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    response = chat(messages=messages, body=goes_on)
    check(response, response.prompt_token_ids)
    assert len(response.prompt_token_ids) > len(plain.prompt_token_ids)


@pytest.mark.scenario("a list of prompts, a batch of chats: a vector in each choice")
def test_a_list_of_prompts(served, complete, check):
    for prompts in (TEXTS, [[5, 6, 7], [8] * 70, [9]], TEXTS[:1], [[5, 6]]):
        response = complete(prompts)
        for choice in response.choices:
            check(choice, choice.prompt_token_ids)
        assert response.model_extra[PARAMS] == response.choices[0].model_extra[PARAMS]
    response = served.client.post(
        "/chat/completions/batch",
        body={
            "model": served.model,
            "messages": [[{"role": "user", "content": text}] for text in TEXTS],
            "max_tokens": 1,
            PARAMS: {FLAG: True},
        },
        cast_to=object,
    )
    vectors = [last_hidden_state(choice) for choice in response["choices"]]
    assert len({vector.tobytes() for vector in vectors}) == len(TEXTS)


@pytest.mark.scenario("the Responses API")
def test_responses(served, chat):
    options: dict[str, Any] = {"model": served.model, "input": TEXT}
    body = {PARAMS: {FLAG: True}}
    response = served.client.responses.create(
        max_output_tokens=1, extra_body=body, **options
    )
    expected = last_hidden_state(chat())
    torch.testing.assert_close(
        torch.from_numpy(last_hidden_state(response)),
        torch.from_numpy(expected),
        atol=1e-4,
        rtol=1e-4,
    )
    for fields in ({"max_output_tokens": 2}, {}, {"max_output_tokens": 1}):
        stream = "max_output_tokens" in fields and fields["max_output_tokens"] == 1
        with pytest.raises(openai.BadRequestError, match="max_output_tokens|stream"):
            served.client.responses.create(
                stream=stream, extra_body=body, **options, **fields
            )


REFUSED = [
    ({FLAG: 1}, {}, f"{PARAMS}.{FLAG}", "1: not a boolean; valid: true, false"),
    ({FLAG: "yes"}, {}, f"{PARAMS}.{FLAG}", "'yes': not a boolean"),
    (
        {FLAG: True, "encoding_format": "hex"},
        {},
        f"{PARAMS}.encoding_format",
        "'hex': valid: 'float', 'base64'",
    ),
    ({FLAG: True, "normalize": "l2"}, {}, f"{PARAMS}.normalize", "not a boolean"),
    ({FLAG: True}, {"max_tokens": 2}, "max_tokens", "2: .*valid: 1"),
    ({FLAG: True}, {"max_tokens": None}, "max_(completion_)?tokens", ".*valid: 1"),
    ({FLAG: True}, {"n": 2, "temperature": 1.0}, "n", "2: .*valid: 1, or none"),
    ({FLAG: True}, {"stream": True}, "stream", "True: .*valid: false"),
    ({"return_last_hidden": True}, {}, f"{PARAMS}.return_last_hidden", "did you mean"),
]


@pytest.mark.scenario("options and fields that are not valid: HTTP 400")
@pytest.mark.refused
@pytest.mark.parametrize(("options", "fields", "name", "words"), REFUSED)
def test_refusals(complete, chat, served, options, fields, name, words):
    for ask in (chat, lambda *rest, **more: complete(TEXTS, *rest, **more)):
        with pytest.raises(openai.BadRequestError, match=f"{name} ?.*{words}") as error:
            ask(options, **fields)
        assert error.value.type == "BadRequestError"
        assert error.value.param in (name, "max_tokens", "max_completion_tokens")
    served.server.get("/health")


@pytest.mark.scenario("options and fields that are not valid: HTTP 400")
@pytest.mark.refused
def test_refusals_of_one_endpoint(complete, chat):
    with pytest.raises(openai.BadRequestError, match=r"echo True: .*valid: false"):
        complete(TEXT, echo=True)
    words = "max_completion_tokens 2: .*valid: 1"
    with pytest.raises(openai.BadRequestError, match=words):
        chat(max_tokens=1, max_completion_tokens=2)
    with pytest.raises(openai.BadRequestError, match="without use_beam_search"):
        chat(body={"use_beam_search": True})


@pytest.mark.scenario("a vector that is not finite: HTTP 500")
def test_a_vector_that_is_not_finite(complete, check):
    for prompt in ([5, POISON], [[5, 6], [7, 8, POISON], [9]]):
        with pytest.raises(openai.InternalServerError, match="1 non-finite") as error:
            complete(prompt)
        assert f"of position {1 if len(prompt) == 2 else 2}" in str(error.value)
    assert complete([5, POISON], {}).usage.completion_tokens == 1
    check(complete([5, POISON, 6]), [5, POISON, 6])
    check(complete([5, 6]), [5, 6])


@pytest.mark.scenario("a falsy flag, and a request without: untouched")
def test_ordinary_requests(complete):
    expected = complete(TEXT, {}, max_tokens=8, logprobs=1).choices[0]
    for flag in (False, None, 0, ""):
        response = complete(TEXT, {FLAG: flag}, max_tokens=8, logprobs=1)
        assert response.choices[0].text == expected.text
        assert response.choices[0].logprobs == expected.logprobs
        assert response.model_extra.get(PARAMS) is None


def test_no_warning_about_a_connector(served):
    """Of all requests above, none of which was for a connector."""
    assert "no KVConnector found" not in served.server.log.read_text()


@pytest.mark.scenario("64 clients at once: vectors, streams, ordinary, cancelled")
def test_mixed_traffic(served, reference_last):
    generator = random.Random(5)
    shared = [generator.randrange(3, POISON) for _ in range(600)]
    num_clients = 16 if served.is_slow else 64
    lengths = [1, 2, 63, 64, 65, 700] if served.is_slow else [1, 64, 65, 700, 2000]
    prompts = []
    for number in range(num_clients):
        limit = 200 if served.is_slow else 400
        length = (
            lengths[number] if number < len(lengths) else generator.randrange(limit)
        )
        own = [generator.randrange(3, POISON) for _ in range(length + 1)][1:] or [3]
        # Prefixes that others have computed, or are just computing.
        prompt = shared[: generator.choice([0, 0, 128, 300])] + own
        prompts.append(prompt[: MAX_MODEL_LEN - 40])
    expected = [reference_last(prompt) for prompt in prompts]
    sampling: Any = {"model": served.model, "temperature": 0, "logprobs": 1}

    def ordinary(number: int) -> dict[str, Any]:
        return sampling | {"prompt": prompts[number], "max_tokens": 12}

    plain = {
        number: served.client.completions.create(**ordinary(number)).choices[0]
        for number in range(1, num_clients, 2)
    }

    async def vector(client: Any, number: int) -> None:
        encoding_format = "base64" if number % 4 else "float"
        response = await client.completions.create(
            **sampling,
            prompt=prompts[number],
            max_tokens=1,
            extra_body={PARAMS: {FLAG: True, "encoding_format": encoding_format}},
        )
        found = torch.from_numpy(last_hidden_state(response))
        torch.testing.assert_close(found, expected[number], atol=1e-4, rtol=1e-4)

    async def stream(client: Any, number: int) -> None:
        text, logprobs = "", []
        async for chunk in await client.completions.create(
            **ordinary(number), stream=True
        ):
            text += chunk.choices[0].text
            logprobs += chunk.choices[0].logprobs.token_logprobs
        assert text == plain[number].text
        assert logprobs == pytest.approx(plain[number].logprobs.token_logprobs, 1e-3)

    async def whole(client: Any, number: int) -> None:
        response = await client.completions.create(**ordinary(number))
        assert response.choices[0].text == plain[number].text
        assert PARAMS not in json.loads(response.model_dump_json(exclude_none=True))

    async def cancelled(client: Any, number: int) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(
                vector(client, number), random.Random(number).random() / 5
            )

    async def one(client: Any, number: int) -> None:
        if number % 2:
            await (stream if number % 4 == 1 else whole)(client, number)
        else:
            await (cancelled if number % 8 == 6 else vector)(client, number)

    async def all_at_once() -> None:
        async with openai.AsyncOpenAI(**served.settings) as client:
            await asyncio.gather(*(one(client, i) for i in range(num_clients)))

    asyncio.run(all_at_once())
    served.server.get("/health")
