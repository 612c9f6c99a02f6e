# SPDX-License-Identifier: Apache-2.0
"""Tensor, pipeline and data parallelism: real processes, one writer per file."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.v1.hidden_states.storage import files
from vllm import SamplingParams, envs
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    cleanup_hidden_states,
    load_hidden_states,
)
from vllm.platforms import current_platform
from vllm.v1.hidden_states.client import hidden_states, last_hidden_state

# Of every stage of two: the embeddings, the boundary, the last.
LAYER_IDS = [6, 0, 3, 5]

# They take long to start, and the wiring of many workers is the same for all.
pytestmark = pytest.mark.soak_in("V1 compiled", "V2 eager")


@pytest.fixture(scope="module")
def servers(engines):
    """The module that starts servers."""
    path = Path(engines.__file__).parent / "v1" / "hidden_states" / "server.py"
    return engines.import_file(path)


def layout(row: str, ranks: int, *marks: Any, **settings: Any) -> Any:
    """Parallel workers of one engine, and their row of the table."""
    settings = {"ranks": ranks, "distributed_executor_backend": "mp"} | settings
    return pytest.param(settings, id=row, marks=[pytest.mark.scenario(row), *marks])


LAYOUTS = [
    layout("tensor parallel, 2 ranks", 2, tensor_parallel_size=2),
    layout("pipeline parallel, 2 stages", 2, pipeline_parallel_size=2),
    # The stage in the middle passes on what it got from the first.
    layout(
        "pipeline parallel, 3 stages", 3, pytest.mark.soak, pipeline_parallel_size=3
    ),
    layout(
        "tensor parallel, 2 ranks, Ray",
        2,
        pytest.mark.ray,
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
    ),
]


def skip_without_devices(num_ranks: int) -> None:
    if 0 < torch.cuda.device_count() < num_ranks:
        pytest.skip(f"{num_ranks} ranks need as many CUDA devices")


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(request, column, engines, servers, tiny_model, tmp_path_factory):
    settings = dict(request.param)
    num_ranks = settings.pop("ranks")
    skip_without_devices(num_ranks)
    if settings["distributed_executor_backend"] == "ray":
        pytest.importorskip("ray")
        if not current_platform.ray_device_key:
            pytest.skip(
                "vLLM's Ray executor: current platform cpu does not support ray"
            )
    storage = tmp_path_factory.mktemp("storage")
    with pytest.MonkeyPatch.context() as patch:
        envs.disable_envs_cache()  # of the engine before this one
        for name, value in servers.bind_threads(num_ranks).items():
            patch.setenv(name, value)
        with engines.running_engine(
            tiny_model,
            **engines.extraction(LAYER_IDS, storage),
            **engines.column_settings(column),
            **settings,
        ) as llm:
            assert llm.llm_engine.vllm_config.use_v2_model_runner == ("V2" in column)
            # On a CPU, with a KV cache of a given size, vLLM skips the eager warm-up
            # in which V1 makes the buffers of later stages: its first step fails.
            llm.collective_rpc("execute_dummy_batch")
            assert not list(storage.iterdir())
            yield SimpleNamespace(
                llm=llm,
                storage=storage,
                num_ranks=num_ranks,
                writer=num_ranks - 1 if "pipeline_parallel_size" in settings else 0,
            )


def worker_states(llm) -> list[dict[str, Any]]:
    """What each rank has of extraction, told by itself."""

    # Sent to the workers by value: they cannot import this module.
    def state(worker):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector: Any = get_kv_transfer_group()
        ring = worker.model_runner.hidden_state_capture.extraction._ring
        kept = (connector._writers, connector.wanted, connector._new_files)
        return {
            "is_writer": connector.is_writer,
            "slots": None if ring is None else (ring.num_slots, ring.num_free),
            "kept": sum(map(len, kept)),
        }

    return llm.collective_rpc(state)


def settle(llm) -> None:
    """Let the workers hear of the last finished requests, as a busy engine's would."""
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(4):
        core.step_fn()


def check(output, prompt, reference_rows) -> None:
    loaded = load_hidden_states(
        output.kv_transfer_params["hidden_states_path"], timeout=10
    )
    assert loaded["token_ids"].tolist() == prompt["prompt_token_ids"]
    expected = reference_rows(prompt["prompt_token_ids"])[:, LAYER_IDS]
    torch.testing.assert_close(loaded["hidden_states"], expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def run(engine):
    """The engine by hand; it has to end idle, with all blocks free."""
    core = engine.llm.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free_before = pool.get_num_free_blocks()
    for path in engine.storage.iterdir():
        path.unlink()
    numbers = iter(range(1000))

    def add(prompt, **sampling) -> str:
        settings = {"max_tokens": 1, "temperature": 0, "ignore_eos": True} | sampling
        return core.add_request(
            f"request-{next(numbers)}", prompt, SamplingParams(**settings)
        )

    def drain() -> list:
        outputs = []
        while core.has_unfinished_requests():
            outputs += [output for output in core.step() if output.finished]
        return sorted(outputs, key=lambda output: output.request_id)

    yield SimpleNamespace(core=core, add=add, drain=drain, step=core.step)
    drain()
    settle(engine.llm)
    assert not scheduler.has_requests()
    assert pool.get_num_free_blocks() == free_before
    states = worker_states(engine.llm)
    assert [state["kept"] for state in states] == [0] * engine.num_ranks


def wait_for(condition, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


def test_rows_are_those_of_one_process(run, engine, make_prompt, reference_rows):
    """A token, a chunk, many chunks, beside decoding; layers of every stage."""
    prompts = [make_prompt(length) for length in (1, 2, 64, 65, 150)]
    inline = make_prompt(90)
    options = {"return_inline": True}
    run.add(inline, extra_args={"kv_transfer_params": options})
    for number, prompt in enumerate(prompts):
        run.add(prompt, max_tokens=1 + 3 * (number % 2))
    first, *outputs = sorted(run.drain(), key=lambda o: int(o.request_id[8:10]))
    loaded = hidden_states(first)
    token_ids = inline["prompt_token_ids"]
    assert loaded["token_ids"].tolist() == token_ids
    expected = reference_rows(token_ids)[:, LAYER_IDS]
    torch.testing.assert_close(loaded["hidden_states"], expected, atol=1e-5, rtol=1e-5)
    assert len(outputs) == len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        check(output, prompt, reference_rows)
    assert {path.suffix for path in files(engine.storage)} == {".safetensors"}
    assert len(files(engine.storage)) == len(prompts)


def test_one_rank_writes_and_has_the_memory_for_it(engine):
    """The last stage's first rank; the others take no ring."""
    assert wait_for(
        lambda: all(
            state["slots"] in (None, (2, 2)) for state in worker_states(engine.llm)
        )
    )
    states = worker_states(engine.llm)
    is_writer = [rank == engine.writer for rank in range(engine.num_ranks)]
    assert [state["is_writer"] for state in states] == is_writer
    assert [state["slots"] is not None for state in states] == is_writer


def test_what_is_there_from_the_start_is_not_looked_at_for_garbage(engine):
    """A full collection of a worker's heap takes half a second."""

    def count(worker):
        import gc

        return gc.get_freeze_count()

    counts = engine.llm.collective_rpc(count)
    assert len(counts) == engine.num_ranks
    assert min(counts) > 100_000


@pytest.mark.last_hidden_state
def test_last_hidden_states(run, make_prompt, reference_rows, reference_last):
    """From the last stage's first rank, with files and without, beside others."""
    prompts = [make_prompt(length) for length in (1, 64, 65, 150)]
    for prompt in prompts:
        for extract in (True, False):
            options = {
                "return_last_hidden_state": True,
                "extract_hidden_states": extract,
            }
            run.add(prompt, extra_args={"kv_transfer_params": options})
        run.add(prompt, max_tokens=3)
    outputs = sorted(run.drain(), key=lambda output: int(output.request_id[8:10]))
    assert len(outputs) == 3 * len(prompts)
    for number, output in enumerate(outputs):
        prompt = prompts[number // 3]
        if number % 3 != 1:
            check(output, prompt, reference_rows)
        if number % 3 != 2:
            vector = torch.from_numpy(last_hidden_state(output))
            expected = reference_last(prompt["prompt_token_ids"])
            torch.testing.assert_close(vector, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_aborts(run, engine, make_prompt, reference_rows, num_steps):
    """Queued, in its chunks, decoding: nothing stays, and others are not disturbed."""
    aborted = run.add(make_prompt(150), max_tokens=16)
    for _ in range(num_steps):
        run.step()
    other = make_prompt(30, seed=num_steps)
    run.add(other)
    run.core.abort_request([aborted], internal=True)
    (output,) = run.drain()
    settle(engine.llm)
    check(output, other, reference_rows)
    path = Path(output.kv_transfer_params["hidden_states_path"])
    assert wait_for(
        lambda: [file.name for file in files(engine.storage)] == [path.name]
    )


def test_a_failure_reaches_the_response(run, engine, make_prompt, reference_rows):
    """One rank's, through what the executor makes of all ranks' reports."""
    away = engine.storage.with_name("away")
    engine.storage.rename(away)
    engine.storage.touch()  # a file, in which no file can be made
    try:
        for length in (10, 100):
            run.add(make_prompt(length))
        outputs = run.drain()
    finally:
        engine.storage.unlink()
        away.rename(engine.storage)
    assert len(outputs) == 2
    for output in outputs:
        assert list(output.kv_transfer_params) == ["hidden_states_error"]
        assert str(engine.storage) in output.kv_transfer_params["hidden_states_error"]
    prompt = make_prompt(10)
    run.add(prompt)
    (output,) = run.drain()
    check(output, prompt, reference_rows)


# ---------------------------------------------------------------------------
# Data parallel: a server with two engines.


def extraction_option(layer_ids, storage) -> list[str]:
    """The server's option that extracts these layers."""
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "layer_ids": layer_ids,
            "shared_storage_path": str(storage),
        },
    }
    return ["--kv-transfer-config", json.dumps(connector)]


@pytest.fixture(scope="module")
def data_parallel(column, servers, tiny_model, tmp_path_factory):
    skip_without_devices(2)
    storage = tmp_path_factory.mktemp("storage")
    options = ["--data-parallel-size", "2", "--api-server-count", "1"]
    # vLLM keeps ranks in step for models with experts; theirs do not run in ranks on
    # a CPU (its communicator has no all_gatherv), and the tiny model has none.
    options += ["--hf-overrides", '{"num_experts": 2}']
    options += extraction_option(LAYER_IDS, storage)
    if column.endswith("eager"):
        options.append("--enforce-eager")
    with servers.serving(
        tiny_model,
        tmp_path_factory.mktemp("log"),
        *options,
        VLLM_LOGGING_LEVEL="DEBUG",
        **servers.bind_threads(2),
    ) as server:
        yield SimpleNamespace(server=server, storage=storage)


@pytest.mark.scenario("data parallel, 2 ranks")
def test_data_parallel_ranks_with_and_without_work(
    data_parallel, make_prompt, reference_rows
):
    """Requests to one rank, to the other, to both; nobody waits for an idle rank."""
    prompts = [make_prompt(length) for length in (5, 100, 31, 64)]

    def request(number: int, rank: int | None = None) -> tuple[int, Any]:
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        return number, data_parallel.server.complete(
            prompts[number]["prompt_token_ids"], max_tokens=1 + number, headers=headers
        )

    answered = []
    for rank in (0, 1, 0):  # the other one idles
        answered += [request(number, rank) for number in (0, 1)]
    with ThreadPoolExecutor(4) as pool:
        answered += pool.map(request, [0, 1, 2, 3] * 2)
    paths = []
    for number, response in answered:
        check(SimpleNamespace(**response), prompts[number], reference_rows)
        paths.append(response["kv_transfer_params"]["hidden_states_path"])
    assert len(set(paths)) == 14
    assert {str(path) for path in files(data_parallel.storage)} == set(paths)
    log = data_parallel.server.log.read_text()
    metrics = data_parallel.server.get("/metrics")
    for rank in (0, 1):
        assert f"EngineCore_DP{rank}" in log
        (counted,) = re.findall(
            rf'^vllm:hidden_states_requests_total{{.*engine="{rank}".*}} (\S+)$',
            metrics,
            re.MULTILINE,
        )
        assert float(counted) >= 1
    for path in paths:
        cleanup_hidden_states(path)
    assert not list(data_parallel.storage.iterdir())


@pytest.mark.last_hidden_state
@pytest.mark.scenario("data parallel, 2 ranks")
def test_last_hidden_states_of_data_parallel_ranks(
    data_parallel, make_prompt, reference_last
):
    options = {"return_last_hidden_state": True, "extract_hidden_states": False}
    for rank in (0, 1):
        prompt = make_prompt(70 + rank)["prompt_token_ids"]
        response = data_parallel.server.complete(
            prompt,
            kv_transfer_params=options,
            headers={"X-data-parallel-rank": str(rank)},
        )
        vector = torch.from_numpy(last_hidden_state(response))
        torch.testing.assert_close(vector, reference_last(prompt), atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------
# Refusals.


@pytest.mark.soak
@pytest.mark.refused
@pytest.mark.scenario("pipeline parallel, a family without relay")
@pytest.mark.without(("V1 compiled", "V2 compiled"), "refused before any compilation")
def test_layers_that_would_not_arrive_are_refused(column, servers, tmp_path_factory):
    """By name, at start-up, before anything is served."""
    from transformers import Qwen3MoeConfig

    skip_without_devices(2)
    folder = tmp_path_factory.mktemp("refused")
    model = tmp_path_factory.mktemp("tiny-qwen3-moe")
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
    ).save_pretrained(model)
    options = ["--pipeline-parallel-size", "2", "--enforce-eager"]
    options += ["--load-format", "dummy", "--skip-tokenizer-init"]
    options += extraction_option([4, 1], folder)
    with (
        pytest.raises(AssertionError, match="no server came up"),
        servers.serving(str(model), folder, *options, **servers.bind_threads(2)),
    ):
        pass
    log = (folder / "server.log").read_text()
    assert "Qwen3MoeForCausalLM cannot hand over layers [1] with" in log
    assert "Valid: layers 3 to 4" in log
    assert [path.name for path in folder.iterdir()] == ["server.log"]
