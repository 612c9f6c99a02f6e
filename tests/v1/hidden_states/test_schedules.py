# SPDX-License-Identifier: Apache-2.0
"""First oracle, a model whose hidden states are known by layer, position and token,
under every way in which vLLM schedules."""

import contextlib
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.v1.hidden_states.storage import files
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    load_hidden_states,
)
from vllm.v1.hidden_states.client import hidden_states, last_hidden_state

LAYER_IDS = [5, 0, 3]


def schedule(row: str, *marks: Any, **settings: Any) -> Any:
    """An engine whose scheduler has its own way, and its row of the table."""
    return pytest.param(settings, id=row, marks=[pytest.mark.scenario(row), *marks])


# Every one of them in every column takes longer than `make test` should.
BOTH = pytest.mark.soak_in("V1 compiled", "V2 eager")

SCHEDULES = [
    schedule("chunked prefill"),
    schedule(
        "chunked prefill off",
        BOTH,
        pytest.mark.soak,
        enable_chunked_prefill=False,
        max_num_batched_tokens=1024,
    ),
    # 1,056 tokens of KV cache for requests of up to 1,023.
    schedule(
        "preemption and recompute",
        BOTH,
        num_gpu_blocks_override=34,
        block_size=32,
    ),
    schedule(
        "priority scheduling",
        BOTH,
        pytest.mark.soak,
        scheduling_policy="priority",
    ),
    schedule("asynchronous scheduling", BOTH, async_scheduling=True),
    schedule(
        "`ngram` speculation beside",
        # It imports numba, and with that in the process stock vLLM cannot start
        # another engine on a CPU (its scan for Triton kernels trips over it).
        pytest.mark.own_process("ngram"),
        # In every run it is beside a real model: test_speculation.py.
        pytest.mark.soak_in("V1 eager", "V1 compiled"),
        pytest.mark.without(
            "V2 eager",
            "Triton's interpreter does not run vLLM's ngram kernel: "
            "InterpreterError: ValueError('mask has unsupported dtype')",
        ),
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
        },
    ),
]


@pytest.fixture(scope="module", params=SCHEDULES)
def engine(request, column, engines, constant_layers, tmp_path_factory):
    path = constant_layers.make_constant_layers_model(tmp_path_factory.mktemp("model"))
    storage = tmp_path_factory.mktemp("storage")
    settings = engines.extraction(LAYER_IDS, storage)
    if "speculative_config" in request.param:
        options = settings["kv_transfer_config"]["kv_connector_extra_config"]
        options["layer_ids"] = LAYER_IDS
    settings |= engines.column_settings(column) | request.param
    is_asynchronous = settings.pop("async_scheduling", False)
    with contextlib.ExitStack() as stack:
        if is_asynchronous:
            stack.enter_context(engines.asynchronous_scheduling())
        llm = stack.enter_context(
            engines.running_engine(
                path, load_format="dummy", skip_tokenizer_init=True, **settings
            )
        )
        config = llm.llm_engine.vllm_config
        assert config.use_v2_model_runner == ("V2" in column)
        assert config.scheduler_config.async_scheduling == is_asynchronous or (
            config.device_config.device_type != "cpu"
        )
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempted = []
        preempt = scheduler._preempt_request
        scheduler._preempt_request = lambda request, *rest, **options: (
            preempted.append(request.num_computed_tokens),
            preempt(request, *rest, **options),
        )[1]
        yield SimpleNamespace(
            llm=llm, storage=storage, settings=settings, preempted=preempted
        )


def check(constant_layers, prompt, output, with_output: bool = False) -> None:
    token_ids = list(prompt["prompt_token_ids"])
    if with_output:
        token_ids += output.outputs[0].token_ids[:-1]
    if "hidden_states" in output.kv_transfer_params:
        loaded = hidden_states(output)
    else:
        loaded = load_hidden_states(
            output.kv_transfer_params["hidden_states_path"], timeout=10
        )
    assert loaded["token_ids"].tolist() == token_ids
    positions = torch.arange(len(token_ids))
    for column, layer in enumerate(LAYER_IDS):
        known = constant_layers.known_rows(layer, positions, loaded["token_ids"])
        assert torch.equal(loaded["hidden_states"][:, column], known)


def check_output(constant_layers, prompt, output) -> None:
    """The model itself was not disturbed."""
    length = len(prompt["prompt_token_ids"])
    tokens = [prompt["prompt_token_ids"][-1], *output.outputs[0].token_ids]
    for offset, (token, following) in enumerate(pairwise(tokens)):
        assert following == constant_layers.next_token(length - 1 + offset, token)


def is_slow(engine) -> bool:
    """Triton's interpreter, by which the V2 runner runs on a CPU: fewer tokens."""
    return engine.llm.llm_engine.vllm_config.use_v2_model_runner


LENGTHS = [1, 2, 63, 64, 65, 128, 129, 1022, 1023]


@pytest.mark.scenario("prompts of `max_model_len` - 1 and - 2 tokens")
@pytest.mark.scenario("a step's token budget filled exactly")
@pytest.mark.scenario("padding of compiled and captured graphs")
def test_every_row_is_its_own(engine, constant_layers, make_prompt):
    """Prompts of a token, of a chunk, of many chunks, at once; twice the same."""
    lengths = LENGTHS if is_slow(engine) else [*LENGTHS, 800, 800]
    prompts = [make_prompt(length) for length in [*lengths, 63]]
    outputs = engine.llm.generate(
        prompts, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        check(constant_layers, prompt, output)


@pytest.mark.scenario("`include_output_tokens`, beside requests without")
@pytest.mark.scenario("`return_inline`: rows in the response, beside files")
def test_a_batch_of_32_beside_decoding(engine, constant_layers, make_prompt):
    """Chunks, whole prompts and decode tokens of many requests in every step."""
    count = 8 if is_slow(engine) else 32
    prompts = [make_prompt(1 + (37 * i) % 190, seed=i) for i in range(count)]
    sampling = [
        SamplingParams(
            max_tokens=1 + i % 16,
            detokenize=False,
            extra_args={
                "kv_transfer_params": {
                    "include_output_tokens": i % 2 == 1,
                    "return_inline": i % 3 == 0,
                }
            },
        )
        for i in range(count)
    ]
    priorities = [i * 7 % 3 for i in range(count)]
    outputs = engine.llm.generate(
        prompts,
        sampling,
        use_tqdm=False,
        priority=priorities if "scheduling_policy" in engine.settings else None,
    )
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert ("hidden_states" in output.kv_transfer_params) == (i % 3 == 0)
        check(constant_layers, prompt, output, with_output=i % 2 == 1)
        check_output(constant_layers, prompt, output)


def test_requests_that_outgrow_the_cache(engine, constant_layers, make_prompt):
    """With few blocks they preempt each other, and are computed again."""
    is_scarce = "num_gpu_blocks_override" in engine.settings
    if is_slow(engine):
        count, max_tokens = (14, 24) if is_scarce else (4, 8)
    else:
        count, max_tokens = 16, 40
    prompts = [make_prompt(60, seed=seed) for seed in range(count)]
    sampling = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": {"include_output_tokens": True}},
    )
    outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        check(constant_layers, prompt, output, with_output=True)
        check_output(constant_layers, prompt, output)
    if is_scarce:
        assert engine.preempted


@pytest.mark.scenario("prefix caching: a repeated prompt is computed in full")
def test_a_repeated_prompt_is_computed_in_full(engine, constant_layers, make_prompt):
    """The prefix cache would spare its rows; it is filled, but not read."""
    prompt = make_prompt(300, seed=99)
    for _ in range(3):
        (output,) = engine.llm.generate(
            [prompt], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False
        )
        assert output.num_cached_tokens == 0
        check(constant_layers, prompt, output)


@pytest.mark.scenario("prefix caching: requests that are not extracted keep their hits")
def test_others_keep_their_hits(engine, constant_layers, make_prompt):
    """They find what the extracted one has filled in, and leave no file."""
    prompt = make_prompt(300, seed=98)
    before = set(files(engine.storage))
    for extract, num_cached in ((True, 0), (False, 256), (True, 0), (False, 256)):
        (output,) = engine.llm.generate(
            [prompt],
            SamplingParams(
                max_tokens=3,
                detokenize=False,
                extra_args={"kv_transfer_params": {"extract_hidden_states": extract}},
            ),
            use_tqdm=False,
        )
        check_output(constant_layers, prompt, output)
        assert num_cached <= output.num_cached_tokens <= num_cached + 32
        if extract:
            check(constant_layers, prompt, output)
        else:
            assert output.kv_transfer_params is None
    assert len(set(files(engine.storage)) - before) == 2


@pytest.mark.last_hidden_state
@pytest.mark.scenario("prefix caching, with hits")
def test_last_hidden_states(engine, constant_layers, make_prompt):
    """Of some prompts in a mixed batch; again, when the prefix cache has them."""
    count, max_tokens = (8, 6) if is_slow(engine) else (24, 24)
    prompts = [make_prompt(1 + (71 * i) % 260, seed=i + 7) for i in range(count)]
    block_size = engine.llm.llm_engine.vllm_config.cache_config.block_size
    vector = {"return_last_hidden_state": True, "encoding_format": "base64"}
    asked = [
        (vector | {"extract_hidden_states": i % 3 == 0}) if i % 2 else {}
        for i in range(count)
    ]
    sampling = [
        SamplingParams(
            max_tokens=1 if params else max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params},
        )
        for params in asked
    ]
    for is_again in (False, True):
        outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
        for prompt, params, output in zip(prompts, asked, outputs, strict=True):
            check_output(constant_layers, prompt, output)
            if not params or params["extract_hidden_states"]:
                check(constant_layers, prompt, output)
            elif is_again and "num_gpu_blocks_override" not in engine.settings:
                is_hit = output.num_cached_tokens > 0
                assert is_hit == (len(output.prompt_token_ids) > block_size)
            if params:
                token_ids = torch.tensor(prompt["prompt_token_ids"][-1:])
                position = torch.tensor([len(prompt["prompt_token_ids"]) - 1])
                known = constant_layers.known_rows(
                    constant_layers.NUM_LAYERS, position, token_ids
                )
                found = torch.from_numpy(last_hidden_state(output))
                assert torch.equal(found, known[0])
                told = output.kv_transfer_params["last_hidden_state_metadata"]
                assert told["position"] == position.item()
                assert told["layer"] == constant_layers.NUM_LAYERS
            else:
                assert "last_hidden_state" not in output.kv_transfer_params


def test_nothing_else_is_left_in_the_storage_path(engine):
    assert {path.suffix for path in files(engine.storage)} == {".safetensors"}
