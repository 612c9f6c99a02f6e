# SPDX-License-Identifier: Apache-2.0
"""What a request asks for by itself: whether, which layers, with its output or not."""

from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from tests.v1.hidden_states.storage import files
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    load_hidden_states,
)
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.hidden_states.client import last_hidden_state

# The wiring is the same for all, and these columns take minutes.
pytestmark = pytest.mark.soak_in("V1 compiled", "V2 eager")

LAYER_IDS = [6, 0, 3]
TEXT = "A river starts as rain on a hill."


@pytest.fixture(scope="module")
def engine(column, engines, tiny_model, tmp_path_factory):
    storage = tmp_path_factory.mktemp("storage")
    with engines.running_engine(
        tiny_model,
        enable_prompt_embeds=True,
        **engines.column_settings(column),
        **engines.extraction(LAYER_IDS, storage, extract_by_default=False),
    ) as llm:
        yield SimpleNamespace(llm=llm, storage=storage, column=column)


@pytest.fixture
def generate(engine):
    def generate(prompt, kv_transfer_params=None, **sampling):
        params = SamplingParams(
            **({"temperature": 0, "max_tokens": 6} | sampling),
            extra_args={"kv_transfer_params": kv_transfer_params},
        )
        (output,) = engine.llm.generate([prompt], params, use_tqdm=False)
        return output

    return generate


def check(output, layer_ids, reference_rows, with_output=False):
    token_ids = list(output.prompt_token_ids)
    if with_output:
        token_ids += output.outputs[0].token_ids[:-1]
    path = output.kv_transfer_params["hidden_states_path"]
    loaded = load_hidden_states(path, timeout=10)
    assert loaded["token_ids"].tolist() == token_ids
    torch.testing.assert_close(
        loaded["hidden_states"],
        reference_rows(token_ids)[:, layer_ids],
        atol=1e-5,
        rtol=1e-5,
    )
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["layer_ids"] == str(layer_ids)
    assert metadata["num_prompt_tokens"] == str(len(output.prompt_token_ids))


@pytest.mark.scenario("`extract_by_default: false`, and requests that opt in")
def test_requests_opt_in(engine, generate, make_prompt, reference_rows):
    prompt = make_prompt(300)
    for params in (None, {}, {"extract_hidden_states": False}):
        assert generate(prompt, params).kv_transfer_params is None
    assert generate(prompt).num_cached_tokens > 0
    output = generate(prompt, {"extract_hidden_states": True})
    assert output.num_cached_tokens == 0
    check(output, LAYER_IDS, reference_rows)
    assert len(files(engine.storage)) == 1


@pytest.mark.scenario("`hidden_states_layers`: a subset, in the request's order")
@pytest.mark.parametrize("layers", [[3], [0, 6], [3, 6, 0], [6, 0, 3]])
def test_a_subset_of_layers(generate, make_prompt, reference_rows, layers):
    params = {"extract_hidden_states": True, "hidden_states_layers": layers}
    for include in (False, True):
        output = generate(make_prompt(70), params | {"include_output_tokens": include})
        check(output, layers, reference_rows, with_output=include)


ENDINGS = {
    "greedy": {},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "sampled": {"temperature": 1.0, "seed": 5},
    "logprobs": {"logprobs": 2},
    "min_tokens": {"min_tokens": 3, "temperature": 1.0, "seed": 5},
}


@pytest.mark.scenario("`include_output_tokens`: greedy, sampled, ended by length")
@pytest.mark.parametrize("sampling", ENDINGS.values(), ids=ENDINGS)
def test_rows_of_output_tokens(generate, make_prompt, reference_rows, sampling):
    params = {"extract_hidden_states": True, "include_output_tokens": True}
    output = generate(make_prompt(20), params, **sampling)
    check(output, LAYER_IDS, reference_rows, with_output=True)


@pytest.mark.scenario("`include_output_tokens`: ended by EOS, a stop token, a string")
@pytest.mark.parametrize("how", ["eos", "token", "string"])
def test_rows_of_an_output_that_is_stopped(
    engine, generate, make_prompt, reference_rows, how
):
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    plain = generate(make_prompt(20), **sampling)
    token_ids = plain.outputs[0].token_ids
    tokenizer = engine.llm.get_tokenizer()
    if how == "eos":
        eos = tokenizer.eos_token_id
        sampling |= {"allowed_token_ids": [eos, 50, 51, 52], "seed": 3}
    elif how == "token":
        sampling |= {"stop_token_ids": [token_ids[5]]}
    else:
        text = plain.outputs[0].text
        sampling |= {"stop": [text[len(text) // 2 :][:3]]}
    expected = generate(make_prompt(20), **sampling)
    assert expected.outputs[0].finish_reason == "stop"
    output = generate(
        make_prompt(20),
        {"extract_hidden_states": True, "include_output_tokens": True},
        **sampling,
    )
    assert output.outputs[0] == expected.outputs[0]
    check(output, LAYER_IDS, reference_rows, with_output=True)


@pytest.mark.scenario("a stop string ends the request: its file is kept")
@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string(generate, make_prompt, reference_rows, include_stop):
    """The front end finds it in the text, and would abort the request in the engine."""
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    text = generate(make_prompt(20), **sampling).outputs[0].text
    sampling |= {
        "stop": ["never said", text[len(text) // 2 :][:3]],
        "include_stop_str_in_output": include_stop,
    }
    expected = generate(make_prompt(20), **sampling)
    output = generate(make_prompt(20), {"extract_hidden_states": True}, **sampling)
    assert output.outputs[0] == expected.outputs[0]
    assert output.outputs[0].stop_reason == sampling["stop"][1]
    check(output, LAYER_IDS, reference_rows)


@pytest.mark.scenario("`n` > 1: one file, for the prompt")
def test_several_choices(engine, generate, make_prompt, reference_rows):
    """One path, whichever choice ends last; the others find the prompt in the cache."""
    before = set(files(engine.storage))
    for stop_token_ids in ([], list(range(0, 1000, 3))):
        output = generate(
            make_prompt(70),
            {"extract_hidden_states": True},
            n=4,
            temperature=1.0,
            max_tokens=9,
            stop_token_ids=stop_token_ids,
        )
        assert len(output.outputs) == 4
        check(output, LAYER_IDS, reference_rows)
    assert len(set(files(engine.storage)) - before) == 2


def nested(depth):
    return {"a": nested(depth - 1)} if depth else 1


BAD_OPTIONS = [
    (nested(100), "nested too deeply; valid: at most 16 levels"),
    ({"a": "\ud800"}, "text that is no Unicode"),
    ({"\ud800": 1}, "text that is no Unicode"),
    ({"hidden_states_layers": [7] * 10**6}, r"\[7, 7, 7.*\.\.\.\]: this engine does"),
    ("x", "kv_transfer_params 'x': not an object"),
    ({"extract_hidden_states": "yes"}, r"extract_hidden_states 'yes': .*true, false"),
    ({"include_output_tokens": 1}, r"include_output_tokens 1: .*true, false"),
    ({"hidden_states_layers": [2]}, r"does not extract layer 2; valid: .*\[6, 0, 3\]"),
    ({"hidden_states_layers": []}, r"hidden_states_layers \[\]: not a non-empty list"),
    ({"hidden_states_layers": 3}, "hidden_states_layers 3: not a non-empty list"),
    ({"hidden_states_layers": [3, 3]}, r"\[3, 3\]: a layer is given twice"),
    ({"hidden_states_layers": [True]}, "True is not an integer"),
    ({"hidden_states_layers": ["3"]}, "'3' is not an integer"),
    ({"hidden_states_layers": ["3" * 10**6]}, r"'3+\.\.\.3+' is not an integer"),
    ({"hidden_state_layers": [3]}, "did you mean 'hidden_states_layers'"),
    ({"extract_hidden_state": True}, "did you mean 'extract_hidden_states'"),
]


@pytest.mark.scenario("options of a request that are not valid")
@pytest.mark.refused
@pytest.mark.parametrize(("params", "error"), BAD_OPTIONS)
def test_options_that_are_not_valid(engine, generate, make_prompt, params, error):
    with pytest.raises(ValueError, match=error) as refusal:
        generate(make_prompt(5), params)
    assert len(str(refusal.value)) < 1000
    assert not engine.llm.llm_engine.has_unfinished_requests()


@pytest.mark.scenario("`n` > 1 with `include_output_tokens`")
@pytest.mark.refused
def test_several_choices_with_their_output(generate, make_prompt):
    with pytest.raises(ValueError, match="include_output_tokens True: with n=2"):
        generate(
            make_prompt(5),
            {"extract_hidden_states": True, "include_output_tokens": True},
            n=2,
            temperature=1.0,
        )


def test_other_parameters_are_left_alone(engine, generate, make_prompt):
    """Those of other connectors, however many, and what only looks like our own."""
    many = {f"hidden_states_layer{number}": number for number in range(60_000)}
    for params in (
        {"do_remote_decode": False, "remote": {"host": "x", "ports": [1, 2]}},
        {"x" * 10**6: 1},
        many,
    ):
        output = generate(make_prompt(5), params | {"extract_hidden_states": True})
        assert list(output.kv_transfer_params) == ["hidden_states_path"]


def test_marks_of_the_front_end_are_not_a_clients(engine, make_prompt):
    for mark in ("all", "choices after the first", ["part of another request"]):
        params = SamplingParams(
            max_tokens=1,
            extra_args={
                "hidden_states_left_out": mark,
                "kv_transfer_params": {"extract_hidden_states": True},
            },
        )
        (output,) = engine.llm.generate([make_prompt(5)], params, use_tqdm=False)
        assert list(output.kv_transfer_params) == ["hidden_states_path"]


def test_the_engine_refuses_what_no_front_end_has_checked(
    engine, generate, make_prompt, monkeypatch
):
    """With an error in the response, as another front end would see it."""
    monkeypatch.setattr(
        "vllm.v1.engine.input_processor.check_request", lambda config, params: None
    )
    output = generate(make_prompt(5), {"hidden_states_layers": [2]})
    assert output.outputs[0].token_ids
    assert list(output.kv_transfer_params) == ["hidden_states_error"]
    assert (
        "does not extract layer 2" in output.kv_transfer_params["hidden_states_error"]
    )


@pytest.mark.scenario("a prompt of embeddings: all rows, token ids -1")
@pytest.mark.parametrize("include", [False, True])
def test_a_prompt_of_embeddings(
    generate, make_prompt, reference, reference_rows, include
):
    token_ids = make_prompt(70)["prompt_token_ids"]
    embeds = reference.model.embed_tokens(torch.tensor(token_ids)).detach()
    output = generate(
        {"prompt_embeds": embeds},
        {"extract_hidden_states": True, "include_output_tokens": include},
    )
    said = list(output.outputs[0].token_ids[:-1]) if include else []
    loaded = load_hidden_states(
        output.kv_transfer_params["hidden_states_path"], timeout=10
    )
    assert loaded["token_ids"].tolist() == [-1] * 70 + said
    expected = reference_rows(token_ids + said)[:, LAYER_IDS]
    torch.testing.assert_close(loaded["hidden_states"], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.scenario("`prompt_logprobs` beside")
def test_prompt_logprobs(generate, make_prompt, reference_rows):
    prompt = make_prompt(70)
    plain = generate(prompt, prompt_logprobs=1)
    output = generate(prompt, {"extract_hidden_states": True}, prompt_logprobs=1)
    assert len(output.prompt_logprobs) == 70
    for own, other in zip(
        output.prompt_logprobs[1:], plain.prompt_logprobs[1:], strict=True
    ):
        assert {
            token: pytest.approx(entry.logprob) for token, entry in own.items()
        } == {token: entry.logprob for token, entry in other.items()}
    check(output, LAYER_IDS, reference_rows)


@pytest.mark.scenario("structured output beside")
@pytest.mark.without(
    "V2 eager",
    "Triton's interpreter does not run vLLM's kernel for grammars: "
    "InterpreterError: ValueError('mask has unsupported dtype')",
)
def test_structured_output(generate, reference_rows):
    params = {"extract_hidden_states": True, "include_output_tokens": True}
    output = generate(
        TEXT,
        params,
        max_tokens=20,
        structured_outputs=StructuredOutputsParams(choice=["river", "hill"]),
    )
    assert output.outputs[0].text in ("river", "hill")
    check(output, LAYER_IDS, reference_rows, with_output=True)


# ---------------------------------------------------------------------------
# The last hidden state.

LAST = {"return_last_hidden_state": True}


def check_last(output, expected, **metadata) -> None:
    told = output.kv_transfer_params["last_hidden_state_metadata"]
    assert told == {
        "position": len(output.prompt_token_ids) - 1,
        "layer": 6,
        "representation": "post_norm",
        "normalized": False,
        "dtype": "float32",
        "encoding_format": "float",
        "hidden_size": 128,
        **metadata,
    }
    vector = torch.from_numpy(last_hidden_state(output))
    torch.testing.assert_close(vector, expected, atol=1e-5, rtol=1e-5)
    assert torch.cosine_similarity(vector, expected, dim=0) > 0.99999


@pytest.mark.last_hidden_state
@pytest.mark.scenario("`encoding_format` and `normalize`")
@pytest.mark.parametrize("encoding_format", ["float", "base64"])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_last_hidden_state(
    generate, make_prompt, reference_last, encoding_format, normalize
):
    options = {"encoding_format": encoding_format, "normalize": normalize}
    for length in (1, 64, 65, 300):
        prompt = make_prompt(length)
        expected = reference_last(prompt["prompt_token_ids"])
        if normalize:
            expected = expected / expected.norm()
        output = generate(prompt, LAST | options, max_tokens=1)
        metadata = {"encoding_format": encoding_format, "normalized": normalize}
        check_last(output, expected, **metadata)
        assert list(output.kv_transfer_params) == [
            "last_hidden_state",
            "last_hidden_state_metadata",
        ]


@pytest.mark.last_hidden_state
@pytest.mark.scenario("`extract_by_default: false`, and both in one request")
def test_the_last_hidden_state_beside_a_file(generate, make_prompt, reference_last):
    prompt = make_prompt(70)
    output = generate(prompt, LAST | {"extract_hidden_states": True}, max_tokens=1)
    check_last(output, reference_last(prompt["prompt_token_ids"]))
    path = output.kv_transfer_params["hidden_states_path"]
    rows = load_hidden_states(path, timeout=10)["hidden_states"]
    assert rows.shape == (70, 3, 128)


@pytest.mark.last_hidden_state
@pytest.mark.scenario("a prompt of embeddings")
def test_the_last_hidden_state_of_embeddings(
    generate, make_prompt, reference, reference_last
):
    token_ids = make_prompt(70)["prompt_token_ids"]
    embeds = reference.model.embed_tokens(torch.tensor(token_ids)).detach()
    output = generate({"prompt_embeds": embeds}, LAST, max_tokens=1)
    vector = torch.from_numpy(last_hidden_state(output))
    expected = reference_last(token_ids)
    torch.testing.assert_close(vector, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.last_hidden_state
@pytest.mark.scenario("`logprobs` and `prompt_logprobs`")
def test_the_last_hidden_state_gives_the_logprobs(
    generate, make_prompt, reference, reference_last
):
    """Without a second implementation: by the model's own head."""
    prompt = make_prompt(70)
    output = generate(prompt, LAST, max_tokens=1, logprobs=5, prompt_logprobs=1)
    assert len(output.prompt_logprobs) == 70
    check_last(output, reference_last(prompt["prompt_token_ids"]))
    vector = torch.from_numpy(last_hidden_state(output))
    logprobs = torch.log_softmax(reference.lm_head(vector).detach(), dim=-1)
    for token, entry in output.outputs[0].logprobs[0].items():
        assert logprobs[token].item() == pytest.approx(entry.logprob, abs=1e-4)


@pytest.mark.last_hidden_state
@pytest.mark.scenario("structured output")
@pytest.mark.without(
    "V2 eager",
    "Triton's interpreter does not run vLLM's kernel for grammars: "
    "InterpreterError: ValueError('mask has unsupported dtype')",
)
def test_the_last_hidden_state_with_structured_output(generate, reference_last):
    choice = StructuredOutputsParams(choice=["river", "hill"])
    output = generate(TEXT, LAST, max_tokens=1, structured_outputs=choice)
    check_last(output, reference_last(list(output.prompt_token_ids)))


@pytest.mark.last_hidden_state
@pytest.mark.scenario("a flag that is falsy: an ordinary request")
@pytest.mark.parametrize("flag", [False, None, 0, "", []])
def test_a_falsy_flag(generate, make_prompt, flag):
    params = {"return_last_hidden_state": flag, "encoding_format": "of another's"}
    output = generate(make_prompt(5), params, max_tokens=3)
    assert output.kv_transfer_params is None
    assert len(output.outputs[0].token_ids) == 3


BAD_LAST = [
    ({"return_last_hidden_state": 1}, {}, "return_last_hidden_state 1: not a boolean"),
    ({"return_last_hidden_state": "true"}, {}, "'true': not a boolean"),
    ({"return_last_hidden_states": True}, {}, "mean 'return_last_hidden_state'"),
    (LAST | {"encoding_format": "hex"}, {}, "encoding_format 'hex': valid: 'float'"),
    (LAST | {"encoding_formats": "float"}, {}, "mean 'encoding_format'"),
    (LAST | {"normalize": 1}, {}, "normalize 1: not a boolean; valid: true, false"),
    (LAST | {"normalise": True}, {}, "mean 'normalize'"),
    (LAST, {"max_tokens": 2}, "max_tokens 2: .* valid: 1"),
    (LAST, {"n": 2, "temperature": 1.0}, "n 2: .* valid: 1"),
]


@pytest.mark.last_hidden_state
@pytest.mark.scenario("options and fields that are not valid")
@pytest.mark.refused
@pytest.mark.parametrize(("params", "sampling", "error"), BAD_LAST)
def test_a_last_hidden_state_that_is_refused(
    engine, generate, make_prompt, params, sampling, error
):
    with pytest.raises(ValueError, match=error):
        generate(make_prompt(5), params, **({"max_tokens": 1} | sampling))
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_no_connector_sees_the_options(engine, generate, make_prompt, monkeypatch):
    """A connector that knows other parameters may refuse what it does not know."""
    seen = []
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    add = scheduler.add_request
    monkeypatch.setattr(
        scheduler,
        "add_request",
        lambda request: (seen.append(request.kv_transfer_params), add(request)),
    )
    generate(make_prompt(5), LAST | {"normalize": True}, max_tokens=1)
    generate(make_prompt(5), LAST | {"remote": {"host": "x"}}, max_tokens=1)
    assert seen == [None, {"remote": {"host": "x"}}]
