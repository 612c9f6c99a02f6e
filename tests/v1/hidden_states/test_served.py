# SPDX-License-Identifier: Apache-2.0
"""Every kind of request to a server, by OpenAI's client over a real socket."""

import base64
import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.v1.hidden_states.storage import files
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    cleanup_hidden_states,
    load_hidden_states,
)

# What serves is the same for all engines: the one that starts soonest in every run.
pytestmark = [
    pytest.mark.starts_processes,
    pytest.mark.soak_in("V1 compiled", "V2 eager"),
]

LAYER_IDS = [6, 0, 3]
TEXT = "A river starts as rain on a hill."
TEXTS = [TEXT, "By four the ovens are hot.", "The third one is the longest of all."]
CHAT: Any = [{"role": "user", "content": TEXT}]
PARAMS = "kv_transfer_params"
NESTED: dict[str, Any] = {}
for _ in range(400):
    NESTED = {"a": NESTED}


@pytest.fixture(scope="module")
def served(column, engines, tiny_model, tmp_path_factory):
    server = engines.import_file(Path(__file__).with_name("server.py"))
    folder = tmp_path_factory.mktemp("served")
    storage = folder / "storage"
    options = []
    for name, value in engines.extraction(LAYER_IDS, storage).items():
        options += [f"--{name}", json.dumps(value)]
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    if column.startswith("V2"):
        variables = engines.columns.v2_environment(folder / "stub")
    if column.endswith("eager"):
        options.append("--enforce-eager")
    with server.serving(
        tiny_model, folder, *options, "--enable-prompt-embeds", **variables
    ) as running:
        yield SimpleNamespace(
            client=openai.OpenAI(
                base_url=f"http://localhost:{running.port}/v1",
                api_key="EMPTY",
                max_retries=0,
            ),
            server=running,
            storage=storage,
            model=tiny_model,
        )


@pytest.fixture
def complete(served):
    """``client.completions.create`` with the server's model."""

    def complete(prompt, params=None, ignore_eos=False, **fields):
        return served.client.completions.create(
            model=served.model,
            prompt=prompt,
            **({"max_tokens": 4, "temperature": 0} | fields),
            extra_body={"return_token_ids": True, "ignore_eos": ignore_eos}
            | ({PARAMS: params} if params is not None else {}),
        )

    return complete


@pytest.fixture
def chat(served):
    """``client.chat.completions.create`` with the server's model."""

    def chat(params=None, messages=CHAT, **fields):
        return served.client.chat.completions.create(
            model=served.model,
            messages=messages,
            **({"max_tokens": 4, "temperature": 0} | fields),
            extra_body={"return_token_ids": True}
            | ({PARAMS: params} if params is not None else {}),
        )

    return chat


def params_of(part: Any) -> dict[str, Any] | None:
    """The parameters of a response, a choice or a chunk."""
    return (part.model_extra or {}).get(PARAMS)


@pytest.fixture
def check(served, reference_rows):
    def check(params, token_ids, layer_ids=LAYER_IDS) -> str:
        assert list(params) == ["hidden_states_path"]
        path = params["hidden_states_path"]
        assert Path(path).parent == served.storage
        loaded = load_hidden_states(path, timeout=30)
        assert loaded["token_ids"].tolist() == list(token_ids)
        expected = reference_rows(list(token_ids))[:, layer_ids]
        torch.testing.assert_close(
            loaded["hidden_states"], expected, atol=1e-4, rtol=1e-4
        )
        return path

    return check


@pytest.mark.scenario("a chat completion and a completion, their options")
def test_one_response(complete, chat, check):
    response = chat()
    check(params_of(response), response.prompt_token_ids)
    response = complete(TEXT)
    prompt = response.choices[0].prompt_token_ids
    check(params_of(response), prompt)
    assert params_of(response.choices[0]) is None  # once is enough
    response = complete(
        TEXT, {"include_output_tokens": True, "hidden_states_layers": [0, 6]}
    )
    said = response.choices[0].token_ids
    check(params_of(response), [*prompt, *said[:-1]], [0, 6])
    assert not params_of(complete(TEXT, {"extract_hidden_states": False}))


@pytest.mark.scenario("streaming: the path comes with the last chunk")
@pytest.mark.parametrize("include_usage", [False, True])
def test_streams(complete, chat, check, include_usage):
    options = {"stream": True, "stream_options": {"include_usage": include_usage}}
    for kind in (chat, lambda **fields: complete(TEXT, **fields)):
        chunks = [chunk for chunk in kind(**options) if chunk.choices]
        prompt = getattr(chunks[0], "prompt_token_ids", None) or (
            chunks[0].choices[0].prompt_token_ids
        )
        assert [params_of(chunk) for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].choices[0].finish_reason
        check(params_of(chunks[-1]), prompt)
    said: list[int] = []
    params = None
    for chunk in complete(TEXT, {"include_output_tokens": True}, stream=True):
        said += chunk.choices[0].token_ids
        prompt = chunk.choices[0].prompt_token_ids or prompt
        params = params_of(chunk)
    check(params, [*prompt, *said[:-1]])


@pytest.mark.scenario("`n` > 1 in a response and in a stream: one path")
def test_several_choices(served, complete, chat, check):
    before = set(files(served.storage))
    options: dict[str, Any] = {"n": 3, "temperature": 1.0}
    response = chat(**options)
    assert len(response.choices) == 3
    check(params_of(response), response.prompt_token_ids)
    response = complete(TEXT, **options)
    prompt = response.choices[0].prompt_token_ids
    check(params_of(response), prompt)
    assert [params_of(choice) for choice in response.choices] == [None] * 3
    for stream in (
        chat(stream=True, **options),
        complete(TEXT, stream=True, **options),
    ):
        chunks = list(stream)
        told = [params for chunk in chunks if (params := params_of(chunk))]
        assert len(told) == 1
        assert params_of(chunks[-1]) == told[0]
        load_hidden_states(told[0]["hidden_states_path"], timeout=30)
    assert len(set(files(served.storage)) - before) == 4


@pytest.mark.scenario("`/v1/completions` with a list of prompts: a path in each choice")
def test_a_list_of_prompts(complete, check):
    response = complete(TEXTS)
    paths = {
        check(params_of(choice), choice.prompt_token_ids) for choice in response.choices
    }
    assert len(paths) == len(TEXTS)
    # The response's own is the first prompt's, as it always was.
    assert params_of(response) == params_of(response.choices[0])
    response = complete(TEXTS[:2], n=2, temperature=1.0)
    told = [params_of(choice) for choice in response.choices]
    assert [params is None for params in told] == [False, True, False, True]
    check(told[0], response.choices[0].prompt_token_ids)
    check(told[2], response.choices[2].prompt_token_ids)
    told_by_index = {}
    prompts = {}
    for chunk in complete(TEXTS, stream=True):
        (choice,) = chunk.choices
        prompts.setdefault(choice.index, choice.prompt_token_ids)
        if params_of(chunk):
            assert choice.finish_reason
            told_by_index[choice.index] = params_of(chunk)
    assert len(told_by_index) == len(TEXTS)
    for index, params in told_by_index.items():
        check(params, prompts[index])


@pytest.mark.scenario("`/v1/chat/completions/batch`: a path in each choice")
def test_a_batch_of_chats(served, check):
    response = served.client.post(
        "/chat/completions/batch",
        body={
            "model": served.model,
            "messages": [[{"role": "user", "content": text}] for text in TEXTS],
            "max_tokens": 2,
        },
        cast_to=object,
    )
    paths = []
    for choice in response["choices"]:
        paths.append(choice[PARAMS]["hidden_states_path"])
        token_ids = load_hidden_states(paths[-1], timeout=30)["token_ids"].tolist()
        check(choice[PARAMS], token_ids)
    assert len(set(paths)) == len(TEXTS)


@pytest.mark.scenario("a stop string, in a response and in a stream")
def test_stop_strings(complete, check):
    """The engine runs ahead of the front end, which finds the string in the text."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 24}
    for _ in range(5):
        text = complete(TEXT, {"extract_hidden_states": False}, **options).choices[0]
        stop = text.text[len(text.text) // 3 :][:4]
        expected = complete(
            TEXT, {"extract_hidden_states": False}, stop=stop, **options
        ).choices[0]
        response = complete(TEXT, {"include_output_tokens": True}, stop=stop, **options)
        choice = response.choices[0]
        assert (choice.text, choice.finish_reason) == (expected.text, "stop")
        assert choice.token_ids == expected.token_ids
        assert choice.stop_reason == stop
        tokens = [*choice.prompt_token_ids, *choice.token_ids[:-1]]
        check(params_of(response), tokens)
        *_, last = complete(TEXT, stop=stop, stream=True, **options)
        check(params_of(last), choice.prompt_token_ids)
        options["seed"] += 1


@pytest.mark.scenario("a prompt of embeddings, over HTTP")
def test_a_prompt_of_embeddings(served, reference, reference_rows):
    token_ids = list(range(10, 40))
    buffer = io.BytesIO()
    torch.save(reference.model.embed_tokens(torch.tensor(token_ids)).detach(), buffer)
    response = served.client.completions.create(
        model=served.model,
        prompt=None,  # as vLLM documents it
        max_tokens=1,
        extra_body={"prompt_embeds": base64.b64encode(buffer.getvalue()).decode()},
    )
    path = params_of(response)["hidden_states_path"]
    loaded = load_hidden_states(path, timeout=30)
    assert loaded["token_ids"].tolist() == [-1] * 30
    expected = reference_rows(token_ids)[:, LAYER_IDS]
    torch.testing.assert_close(loaded["hidden_states"], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.scenario("structured output and `logprobs` over HTTP")
@pytest.mark.without(
    "V2 eager",
    "Triton's interpreter does not run vLLM's kernel for grammars: "
    "InterpreterError: ValueError('mask has unsupported dtype')",
)
def test_structured_output(served, complete, check):
    response = served.client.chat.completions.create(
        model=served.model,
        messages=CHAT,
        max_tokens=20,
        logprobs=True,
        extra_body={
            "return_token_ids": True,
            "structured_outputs": {"choice": ["river", "hill"]},
            PARAMS: {"include_output_tokens": True},
        },
    )
    (choice,) = response.choices
    assert choice.message.content in ("river", "hill")
    said = choice.model_extra["token_ids"]
    check(params_of(response), [*response.prompt_token_ids, *said[:-1]])
    response = complete(TEXT, echo=True, logprobs=1)
    assert len(response.choices[0].logprobs.tokens) > 4
    check(params_of(response), response.choices[0].prompt_token_ids)


@pytest.mark.scenario("the Responses API, and its stream")
def test_responses(served, check):
    options: dict[str, Any] = {
        "model": served.model,
        "input": TEXT,
        "max_output_tokens": 4,
    }
    told = params_of(served.client.responses.create(**options))
    assert told is not None
    path = told["hidden_states_path"]
    token_ids = load_hidden_states(path, timeout=30)["token_ids"]
    check(told, token_ids.tolist())
    *_, last = served.client.responses.create(stream=True, **options)
    assert last.type in ("response.completed", "response.incomplete")
    told = params_of(last.response)
    check(told, token_ids.tolist())


@pytest.mark.scenario("a beam search over HTTP: no files, no options")
def test_a_beam_search(served, complete, chat):
    before = set(files(served.storage))
    options: dict[str, Any] = {"use_beam_search": True, "n": 2}
    for body in ({}, {PARAMS: {"extract_hidden_states": False}}):
        response = served.client.completions.create(
            model=served.model, prompt=TEXT, max_tokens=3, extra_body=options | body
        )
        assert len(response.choices) == 2
        assert not params_of(response)
    assert set(files(served.storage)) == before
    for body in ({"extract_hidden_states": True}, {"hidden_states_layers": [99]}):
        with pytest.raises(openai.BadRequestError, match="beam search hands out no"):
            served.client.completions.create(
                model=served.model,
                prompt=TEXT,
                max_tokens=3,
                extra_body=options | {PARAMS: body},
            )


@pytest.mark.scenario("health, models, tokenize: no files")
def test_requests_that_generate_nothing(served):
    before = set(files(served.storage))
    served.server.get("/health")
    served.server.get("/v1/models")
    served.server.get("/metrics")
    assert set(files(served.storage)) == before


@pytest.mark.scenario("options that are not valid: HTTP 400, also for a stream")
@pytest.mark.refused
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("params", "fields", "error"),
    [
        ({"include_output_tokens": "yes"}, {}, "include_output_tokens 'yes'"),
        ({"hidden_states_layers": [2]}, {}, "does not extract layer 2"),
        ({"hidden_state_layers": [3]}, {}, "did you mean 'hidden_states_layers'"),
        ({"include_output_tokens": True}, {"n": 2, "temperature": 1.0}, "with n=2"),
        (NESTED, {}, "nested too deeply"),
    ],
)
def test_bad_options(complete, chat, served, params, fields, error, stream):
    before = set(files(served.storage))
    with pytest.raises(openai.BadRequestError, match=error):
        complete(TEXT, params, stream=stream, **fields)
    with pytest.raises(openai.BadRequestError, match=error):
        chat(params, stream=stream, **fields)
    with pytest.raises(openai.BadRequestError):
        complete(TEXTS, params, stream=stream, **fields)
    if "n" not in fields:
        with pytest.raises(openai.BadRequestError, match=error):
            served.client.responses.create(
                model=served.model,
                input=TEXT,
                max_output_tokens=2,
                stream=stream,
                extra_body={PARAMS: params},
            )
    served.server.get("/health")
    assert set(files(served.storage)) == before


def num_ended_by_length(served) -> float:
    """Requests that have had all of their tokens."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(served.server.get("/metrics"))
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
        and sample.labels["finished_reason"] == "length"
    )


def gives_up(served, complete, params, stop) -> bool:
    """Whether the request still ran; one that had ended keeps its file.

    vLLM's server may be so busy with the tokens of a small model that a stream comes
    all at once, when its request has ended (stock vLLM 0.32.0, too).
    """
    num_ended = num_ended_by_length(served)
    stream = complete(
        TEXT,
        params,
        ignore_eos=True,
        stream=True,
        max_tokens=900,
        stop=stop,
        temperature=1.0,
    )
    request_id = next(iter(stream)).id
    stream.close()
    deadline = time.monotonic() + 60
    while left := [
        path for path in files(served.storage) if path.name.startswith(request_id)
    ]:
        assert time.monotonic() < deadline, left
        if num_ended_by_length(served) > num_ended:
            whole = str(left[0]).removesuffix(".partial")
            load_hidden_states(whole, timeout=30)
            cleanup_hidden_states(whole)
            return False
        time.sleep(0.1)
    return True


@pytest.mark.scenario("a client that gives up: its file goes, and nothing else")
def test_clients_that_give_up(served, complete, check):
    """In the stream's middle, with a stop string and without."""
    before = set(files(served.storage))
    for stop in (None, "never said"):
        for params in ({}, {"include_output_tokens": True}):
            assert any(gives_up(served, complete, params, stop) for _ in range(40))
    response = complete(TEXT)
    path = check(params_of(response), response.choices[0].prompt_token_ids)
    expected = {*before, Path(path)}
    deadline = time.monotonic() + 30
    while set(files(served.storage)) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    assert set(files(served.storage)) == expected
