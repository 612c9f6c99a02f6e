# SPDX-License-Identifier: Apache-2.0
"""Sleep, new weights, resets, another connector, several API servers, a restart."""

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.v1.hidden_states.storage import files
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    HiddenStatesError,
    load_hidden_states,
)
from vllm.v1.engine import input_processor

LAYER_IDS = [6, 0, 3]

# Names of files that two engines have in turn.
KEPT = "kept-00000000"
REPLACED = "replaced-00000000"

# They take long, and what they show is the same for all.
pytestmark = pytest.mark.soak_in("V1 compiled", "V2 eager")


@pytest.fixture(scope="module")
def checkpoint(tiny_model, tmp_path_factory):
    """A copy of the tiny model, whose weights may be changed."""
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    shutil.copytree(tiny_model, path)
    return path


@pytest.fixture(scope="module")
def new_weights(engines, tmp_path_factory):
    """The same model with other weights: path and model."""
    from transformers import AutoModelForCausalLM

    make = engines.import_file(engines.EXAMPLES / "tiny_model.py").make_tiny_model
    path = make(tmp_path_factory.mktemp("new-weights"), seed=1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    return SimpleNamespace(path=path, model=model)


def extraction(engines, storage, beside=None):
    """Settings that extract; with a folder, and the stock connector beside ours."""
    settings = engines.extraction(LAYER_IDS, storage)
    if beside is not None:
        ours = settings["kv_transfer_config"]
        other = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(beside)},
        }
        settings["kv_transfer_config"] = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [other, ours]},
        }
    return settings


# Which engine a test wants: one at a time lives in a process.
alone = pytest.mark.parametrize("engine", ["alone"], indirect=True)
restarted = pytest.mark.parametrize("engine", ["restarted"], indirect=True)
beside = pytest.mark.parametrize("engine", ["beside"], indirect=True)
of_its_own = pytest.mark.parametrize("engine", ["none"], indirect=True)


@pytest.fixture(scope="module")
def folders(column, tmp_path_factory):
    """Storage of the engines alone, which share it, and beside another connector."""
    return SimpleNamespace(
        alone=tmp_path_factory.mktemp("alone"),
        restarted=tmp_path_factory.mktemp("restarted"),
        ours=tmp_path_factory.mktemp("ours"),
        theirs=tmp_path_factory.mktemp("theirs"),
    )


@pytest.fixture(scope="module")
def engine(request, column, engines, checkpoint, folders, make_prompt):
    if request.param == "none":
        yield None
        return
    is_beside = request.param == "beside"
    storage = {"beside": folders.ours, "restarted": folders.restarted}.get(
        request.param, folders.alone
    )
    if request.param == "restarted":
        with (
            pytest.MonkeyPatch.context() as patch,
            engines.running_engine(
                str(checkpoint),
                **extraction(engines, storage),
                **engines.column_settings(column),
            ) as first,
        ):
            same_ids(patch)
            for name in (KEPT, REPLACED):
                first.llm_engine.add_request(
                    name.rpartition("-")[0],
                    make_prompt(100),
                    SamplingParams(max_tokens=1, detokenize=False),
                )
            while first.llm_engine.has_unfinished_requests():
                first.llm_engine.step()
    before = sorted(path.name for path in files(storage))
    settings = extraction(engines, storage, folders.theirs if is_beside else None)
    if torch.cuda.is_available():
        settings["enable_sleep_mode"] = True
    with engines.running_engine(
        str(checkpoint), **settings, **engines.column_settings(column)
    ) as llm:
        assert llm.llm_engine.vllm_config.use_v2_model_runner == ("V2" in column)
        # Loading, profiling and warm-up made no file, and removed none.
        assert sorted(path.name for path in files(storage)) == before
        yield SimpleNamespace(llm=llm, storage=storage)


@pytest.fixture
def run(engine, monkeypatch):
    """The engine by hand; it has to end idle, with all blocks free."""
    core = engine.llm.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free_before = pool.get_num_free_blocks()
    numbers = iter(range(1000))

    def add(prompt, request_id=None, **sampling) -> str:
        settings = {"max_tokens": 1, "temperature": 0, "ignore_eos": True} | sampling
        if request_id is None:
            request_id = f"request-{next(numbers)}"
        else:
            same_ids(monkeypatch)
        return core.add_request(request_id, prompt, SamplingParams(**settings))

    def drain() -> list:
        outputs = []
        while core.has_unfinished_requests():
            outputs += [output for output in core.step() if output.finished]
        return sorted(outputs, key=lambda output: output.request_id)

    yield SimpleNamespace(
        core=core, add=add, drain=drain, step=core.step, scheduler=scheduler
    )
    drain()
    settle(core)
    assert not scheduler.has_requests()
    assert pool.get_num_free_blocks() == free_before


def same_ids(monkeypatch, suffix: str = "00000000") -> None:
    """Have the next requests' ids end so, not at random: two engines' may be equal."""
    monkeypatch.setattr(input_processor, "random_uuid", lambda: suffix)


def settle(core) -> None:
    """Let the worker hear of the last finished requests, as a busy engine's would."""
    for _ in range(3):
        core.engine_core.engine_core.step_fn()


def wait_for(condition, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.002)
    return bool(condition())


def check(output, prompt, rows_of) -> str:
    assert list(output.kv_transfer_params) == ["hidden_states_path"]
    path = output.kv_transfer_params["hidden_states_path"]
    loaded = load_hidden_states(path, timeout=10)
    assert loaded["token_ids"].tolist() == prompt["prompt_token_ids"]
    expected = rows_of(prompt["prompt_token_ids"])[:, LAYER_IDS]
    torch.testing.assert_close(loaded["hidden_states"], expected, atol=1e-5, rtol=1e-5)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in files(folder))


# ---------------------------------------------------------------------------
# The life of one engine, in the order in which it happens.


@alone
@pytest.mark.scenario("profiling and warm-up runs")
def test_runs_that_are_no_requests_make_no_files(engine):
    """Start-up's, which the engine's fixture checks, and those of an idle rank."""
    before = names(engine.storage)
    for _ in range(3):
        engine.llm.collective_rpc("execute_dummy_batch")
    assert names(engine.storage) == before == []


@alone
@pytest.mark.scenario("`reset_prefix_cache`, also with requests running")
def test_reset_of_the_prefix_cache(run, engine, make_prompt, reference_rows):
    prompt = make_prompt(200)
    run.add(prompt)
    (output,) = run.drain()
    check(output, prompt, reference_rows)
    assert engine.llm.reset_prefix_cache()
    run.add(prompt)
    other = make_prompt(70)
    run.add(other, max_tokens=4)
    run.step()
    run.step()
    assert engine.llm.reset_prefix_cache(reset_running_requests=True)
    for output, wanted in zip(run.drain(), (prompt, other), strict=True):
        check(output, wanted, reference_rows)


@alone
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.scenario("`sleep` and `wake_up`")
def test_sleep(run, engine, checkpoint, make_prompt, reference_rows, level):
    """What runs is aborted, and its file removed; awake, rows are right again.

    On a CPU vLLM frees no memory when it sleeps; the rest is the same.
    """
    before = names(engine.storage)
    asleep = run.add(make_prompt(200), max_tokens=8)
    run.step()
    run.step()
    assert names(engine.storage) != before
    engine.llm.sleep(level=level)
    run.core.abort_request([asleep], internal=True)  # it hears of no other's abort
    if level == 2:  # its weights are gone where memory was freed
        engine.llm.wake_up(tags=["weights"])
        engine.llm.collective_rpc("reload_weights")
    engine.llm.wake_up()
    settle(run.core)
    assert wait_for(lambda: names(engine.storage) == before)
    prompt = make_prompt(100, seed=level)
    run.add(prompt)
    (output,) = run.drain()
    os.unlink(check(output, prompt, reference_rows))


@alone
@pytest.mark.scenario("weights are reloaded")
def test_rows_are_the_new_weights(
    run, engine, checkpoint, tiny_model, new_weights, make_prompt, reference_rows
):
    """Those that are on the disk by now."""

    def new_rows_of(token_ids):
        with torch.no_grad():
            model = new_weights.model.model
            states = model(
                torch.tensor([token_ids]), output_hidden_states=True
            ).hidden_states
            last = []
            hook = model.norm.register_forward_pre_hook(
                lambda module, args: last.append(args[0][0])
            )
            model(torch.tensor([token_ids]))
            hook.remove()
        return torch.stack([*(state[0] for state in states[:-1]), *last], dim=1)

    prompt = make_prompt(100)
    try:
        for source, rows_of in (
            (new_weights.path, new_rows_of),
            (Path(tiny_model), reference_rows),
        ):
            shutil.copy(source / "model.safetensors", checkpoint)
            engine.llm.collective_rpc("reload_weights")
            engine.llm.reset_prefix_cache()
            run.add(prompt)
            (output,) = run.drain()
            check(output, prompt, rows_of)
    finally:
        shutil.copy(Path(tiny_model) / "model.safetensors", checkpoint)


@restarted
@pytest.mark.scenario("an engine restarted on the same storage path")
def test_after_a_restart(run, engine, make_prompt, reference_rows):
    """Old files stay, but for one whose id comes again: that is replaced whole."""
    kept = (engine.storage / f"{KEPT}.safetensors").read_bytes()
    prompt = make_prompt(150, seed=2)
    run.add(prompt, "replaced")
    run.step()
    # The old file is not this request's, and nobody may take it for that.
    partial = f"{REPLACED}.safetensors.partial"
    assert names(engine.storage) == [f"{KEPT}.safetensors", partial]
    (output,) = run.drain()
    assert Path(check(output, prompt, reference_rows)).name == f"{REPLACED}.safetensors"
    assert (engine.storage / f"{KEPT}.safetensors").read_bytes() == kept
    assert names(engine.storage) == [f"{KEPT}.safetensors", f"{REPLACED}.safetensors"]


# ---------------------------------------------------------------------------
# Beside a connector that keeps KV cache.

multi_connector = pytest.mark.scenario("a second connector by `MultiConnector`")


def kv_files(folder: Path) -> int:
    """Files of the other connector: one per prompt and attention layer."""
    return len(list(folder.rglob("*.safetensors")))


@beside
@multi_connector
def test_both_connectors_do_their_work(
    run, engine, folders, make_prompt, reference_rows
):
    prompts = [make_prompt(length) for length in (33, 64, 150)]
    for prompt in prompts:
        run.add(prompt, max_tokens=2)
    for output, prompt in zip(run.drain(), prompts, strict=True):
        check(output, prompt, reference_rows)
    assert len(names(engine.storage)) == 3
    assert kv_files(folders.theirs) >= 6


@beside
@multi_connector
def test_what_the_other_connector_has_is_computed_all_the_same(
    run, engine, folders, make_prompt, reference_rows
):
    """Loaded KV cache would spare rows, as the engine's own prefix cache would."""
    prompt = make_prompt(60, seed=5)
    for _ in range(2):
        run.add(prompt)
        (output,) = run.drain()
        assert kv_files(folders.theirs) > 0
        assert output.num_cached_tokens == 0
        check(output, prompt, reference_rows)
        engine.llm.reset_prefix_cache()


@beside
@multi_connector
def test_an_abort_beside_another_connector(run, engine, make_prompt, reference_rows):
    for path in engine.storage.iterdir():
        path.unlink()
    aborted = run.add(make_prompt(150, seed=6), "aborted", max_tokens=8)
    run.step()
    assert names(engine.storage)
    other = make_prompt(30)
    run.add(other)
    run.core.abort_request([aborted], internal=True)
    (output,) = run.drain()
    settle(run.core)
    path = Path(check(output, other, reference_rows))
    assert wait_for(lambda: names(engine.storage) == [path.name])


@beside
@multi_connector
def test_a_failure_beside_another_connector(run, engine, make_prompt, reference_rows):
    """It comes through what MultiConnector makes of all connectors' reports."""
    away = engine.storage.with_name("away")
    engine.storage.rename(away)
    engine.storage.touch()  # a file, in which no file can be made
    try:
        run.add(make_prompt(10))
        (output,) = run.drain()
    finally:
        engine.storage.unlink()
        away.rename(engine.storage)
    assert list(output.kv_transfer_params) == ["hidden_states_error"]
    assert str(engine.storage) in output.kv_transfer_params["hidden_states_error"]
    prompt = make_prompt(20)
    run.add(prompt)
    (output,) = run.drain()
    check(output, prompt, reference_rows)


# ---------------------------------------------------------------------------
# A whole server, and its end.


@pytest.fixture(scope="module")
def served(column, engines, tiny_model, tmp_path_factory):
    servers = engines.import_file(Path(__file__).with_name("server.py"))
    storage = tmp_path_factory.mktemp("served")
    settings = engines.extraction(LAYER_IDS, storage)
    options = ["--api-server-count", "2"]
    for name in ("speculative_config", "kv_transfer_config"):
        options += [f"--{name}", json.dumps(settings[name])]
    if column.endswith("eager"):
        options.append("--enforce-eager")
    with servers.serving(
        tiny_model,
        tmp_path_factory.mktemp("log"),
        *options,
    ) as server:
        yield SimpleNamespace(server=server, storage=storage)


def check_response(response, prompt, rows_of) -> str:
    return check(SimpleNamespace(**response), prompt, rows_of)


def check_api_servers(served, make_prompt, reference_rows) -> None:
    """Their requests are one engine's, and each has a file of its own."""
    prompts = [make_prompt(1 + 17 * number) for number in range(12)]
    with ThreadPoolExecutor(6) as pool:
        responses = list(
            pool.map(
                lambda prompt: served.server.complete(prompt["prompt_token_ids"]),
                prompts,
            )
        )
    paths = {
        check_response(response, prompt, reference_rows)
        for response, prompt in zip(responses, prompts, strict=True)
    }
    assert len(paths) == len(prompts)
    assert {str(path) for path in files(served.storage)} == paths
    assert "ApiServer_1" in served.server.log.read_text()


@of_its_own
@pytest.mark.scenario("several API servers")
@pytest.mark.scenario("an engine restarted on the same storage path")
def test_servers_that_are_killed_and_the_engine_after_them(
    engine,
    served,
    column,
    engines,
    checkpoint,
    make_prompt,
    reference_rows,
    monkeypatch,
):
    """In the middle of a file: its reader is told at once, and what is left there is
    in nobody's way."""
    check_api_servers(served, make_prompt, reference_rows)
    told: list[HiddenStatesError] = []

    def request() -> None:
        with pytest.raises(OSError):
            served.server.complete(
                make_prompt(700)["prompt_token_ids"],
                headers={"X-Request-Id": "killed"},
                max_tokens=200,  # the file is being written for as long as that
                ignore_eos=True,
                kv_transfer_params={"include_output_tokens": True},
            )

    def read(path: Path) -> None:
        with pytest.raises(HiddenStatesError) as error:
            load_hidden_states(str(path))
        told.append(error.value)

    client = threading.Thread(target=request)
    client.start()
    assert wait_for(lambda: list(served.storage.glob("*killed*.partial")))
    (partial,) = served.storage.glob("*killed*.partial")
    path = partial.with_suffix("")
    reader = threading.Thread(target=read, args=[path])
    reader.start()
    time.sleep(0.05)
    assert not told
    served.server.kill()
    reader.join(5)
    client.join(5)
    assert "its writer ended before the file was complete" in told[0].cause
    assert partial.exists() and not path.exists()

    request_id, _, suffix = path.stem.rpartition("-")
    same_ids(monkeypatch, suffix)
    with engines.running_engine(
        str(checkpoint),
        **extraction(engines, served.storage),
        **engines.column_settings(column),
    ) as llm:
        before = set(names(served.storage))
        prompt = make_prompt(90)
        core = llm.llm_engine
        core.add_request(
            request_id,
            prompt,
            SamplingParams(max_tokens=1, detokenize=False),
        )
        outputs = []
        while core.has_unfinished_requests():
            outputs += core.step()
        assert check(outputs[-1], prompt, reference_rows) == str(path)
        # A note by then, unless the server has not looked around yet.
        left = {partial.name, partial.with_suffix(".error").name}
        assert set(names(served.storage)) == before - left | {path.name}
