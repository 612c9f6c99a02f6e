# SPDX-License-Identifier: Apache-2.0
"""Second and third oracle (Transformers, the model's own logprobs), and what
extraction must not change: output tokens, logprobs, the size of the KV cache."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    load_hidden_states,
)

NUM_LAYERS = 6
# Out of order, with the first and the last id.
LAYER_IDS = [6, 0, 3, 1]
MODES: dict[str, dict[str, Any]] = {
    "eager float32": {"dtype": "float32"},
    "eager bfloat16": {"dtype": "bfloat16"},
    "compiled float32": {"dtype": "float32", "enforce_eager": False},
    "compiled bfloat16": {"dtype": "bfloat16", "enforce_eager": False},
}
SLOW = "compiled bfloat16"  # a minute, for nothing that the other three do not show
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 16, "temperature": 0, "logprobs": 3},
    "seeded": {"max_tokens": 16, "temperature": 1.0, "seed": 7, "logprobs": 3},
    "one token": {"max_tokens": 1, "temperature": 0, "logprobs": 3},
    # Speculative decoding, which the stock feature is, forbids these two.
    "min_p": {"max_tokens": 8, "temperature": 1.0, "seed": 7, "min_p": 0.05},
    "logit_bias": {"max_tokens": 8, "temperature": 0, "logit_bias": {5: 100.0}},
}
LENGTHS = [1, 7, 63, 64, 65, 200, 800]


def generate(llm, prompts, sampling) -> list:
    # Seeded ones in chunks, too, of which stock vLLM's V1 runner dies on a CPU ("CPU
    # Generator does not use offset").
    return llm.generate(prompts, SamplingParams(**sampling), use_tqdm=False)


def num_kv_tokens(llm) -> int:
    cache = llm.llm_engine.vllm_config.cache_config
    return cache.num_gpu_blocks * cache.block_size


def assert_same_output(outputs, plain, tolerance: float) -> None:
    for output, expected in zip(outputs, plain, strict=True):
        one, other = output.outputs[0], expected.outputs[0]
        assert one.token_ids == other.token_ids
        for step, expected_step in zip(
            one.logprobs or [], other.logprobs or [], strict=True
        ):
            assert {token: entry.logprob for token, entry in step.items()} == {
                token: pytest.approx(entry.logprob, abs=tolerance)
                for token, entry in expected_step.items()
            }


@pytest.fixture(scope="module")
def prompts(make_prompt):
    return [make_prompt(length) for length in LENGTHS]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(mode, marks=pytest.mark.soak if mode == SLOW else ())
        for mode in MODES
    ],
)
def engine(request, engines, tiny_model, tmp_path_factory, prompts):
    """An extracting engine, with what a plain one said in the same mode."""
    mode = MODES[request.param]
    with engines.running_engine(tiny_model, **mode) as llm:
        plain = {
            name: generate(llm, prompts, sampling)
            for name, sampling in SAMPLING.items()
        }
        plain_kv_tokens = num_kv_tokens(llm)
    storage = tmp_path_factory.mktemp("storage")
    with engines.running_engine(
        tiny_model, **mode, **engines.extraction(LAYER_IDS, storage)
    ) as llm:
        yield SimpleNamespace(
            llm=llm, plain=plain, plain_kv_tokens=plain_kv_tokens, dtype=mode["dtype"]
        )


@pytest.mark.parametrize("sampling", SAMPLING)
def test_output_is_that_of_a_plain_engine(engine, prompts, sampling):
    outputs = generate(engine.llm, prompts, SAMPLING[sampling])
    # Compiled, the graph with more outputs is fused otherwise: bfloat16 rounds there.
    tolerance = 1e-4 if engine.dtype == "float32" else 0.05
    assert_same_output(outputs, engine.plain[sampling], tolerance)
    for output in outputs:
        loaded = load_hidden_states(
            output.kv_transfer_params["hidden_states_path"], timeout=10
        )
        assert loaded["token_ids"].tolist() == output.prompt_token_ids


def test_kv_cache_is_as_large_as_a_plain_engines(engine):
    assert num_kv_tokens(engine.llm) == engine.plain_kv_tokens


def test_no_speculation_is_left(engine):
    config = engine.llm.llm_engine.vllm_config
    assert config.speculative_config is None
    assert config.hidden_states_config.layer_ids == tuple(LAYER_IDS)


def test_rows_are_those_of_transformers(engine, prompts, reference_rows):
    tolerance = 1e-5 if engine.dtype == "float32" else 0.05
    outputs = generate(engine.llm, prompts, SAMPLING["one token"])
    for prompt, output in zip(prompts, outputs, strict=True):
        rows = load_hidden_states(
            output.kv_transfer_params["hidden_states_path"], timeout=10
        )["hidden_states"]
        assert rows.dtype == getattr(torch, engine.dtype)
        expected = reference_rows(prompt["prompt_token_ids"])[:, LAYER_IDS]
        torch.testing.assert_close(
            rows.float(), expected, atol=tolerance, rtol=tolerance
        )


def test_last_rows_give_the_models_own_logprobs(engine, prompts, reference):
    tolerance = 1e-4 if engine.dtype == "float32" else 0.05
    sampling = SAMPLING["one token"] | {"prompt_logprobs": 0}
    outputs = generate(engine.llm, prompts, sampling)
    for output in outputs:
        rows = load_hidden_states(
            output.kv_transfer_params["hidden_states_path"], timeout=10
        )["hidden_states"]
        token_ids = output.prompt_token_ids
        with torch.no_grad():
            last = rows[:, LAYER_IDS.index(NUM_LAYERS)].float()
            logits = reference.lm_head(reference.model.norm(last))
        logprobs = torch.log_softmax(logits, dim=-1)
        for position in range(1, len(token_ids)):
            token = token_ids[position]
            own = output.prompt_logprobs[position][token].logprob
            assert logprobs[position - 1, token].item() == pytest.approx(
                own, abs=tolerance
            )
