# SPDX-License-Identifier: Apache-2.0
"""When files come and go: completion in the step of the last row, aborts, slow and
full disks, locks off. One engine of the test's own process, stepped by hand."""

import itertools
import os
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch

from tests.v1.hidden_states.storage import files
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1 import hidden_states_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    HiddenStatesError,
    file_name,
    load_hidden_states,
)
from vllm.v1.hidden_states import capture

LAYER_IDS = [2, 6]
BYTES_PER_ROW = 2 * 128 * 4


@pytest.fixture(scope="module")
def disk(engines, tmp_path_factory):
    """The storage path: 4 MiB, for 4,096 rows or so."""
    yield from engines.mounted_disk(tmp_path_factory.mktemp("life") / "disk", "4m")


@pytest.fixture(scope="module")
def engine(engines, tiny_model, disk):
    with engines.running_engine(
        tiny_model,
        **engines.extraction(LAYER_IDS, disk, num_writer_threads=2),
    ) as llm:
        yield llm


request_ids = (f"request-{number}" for number in itertools.count())


@pytest.fixture
def run(engine, disk):
    """The engine with an empty disk, by hand."""
    for path in disk.iterdir():
        path.unlink()
    core = engine.llm_engine

    def add(prompt, **sampling) -> str:
        settings = {"max_tokens": 1, "temperature": 0} | sampling
        return core.add_request(next(request_ids), prompt, SamplingParams(**settings))

    def drain() -> list:
        outputs = []
        while core.has_unfinished_requests():
            outputs += [output for output in core.step() if output.finished]
        return outputs

    def free_blocks() -> int:
        scheduler = core.engine_core.engine_core.scheduler
        return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    state = SimpleNamespace(
        core=core,
        disk=disk,
        add=add,
        drain=drain,
        step=core.step,
        free_blocks=free_blocks,
    )
    free_before = free_blocks()
    yield state
    drain()
    settle(core)
    assert free_blocks() == free_before


def settle(core) -> None:
    """Let the worker hear of the last finished requests, as a busy engine's would."""
    engine_core = core.engine_core.engine_core
    for _ in range(3):
        engine_core.step_fn()


def wait_for(condition, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


def test_a_file_is_complete_with_the_step_of_its_last_row(run, disk, make_prompt):
    """Not with a later step, nor with the end of the request."""
    run.add(make_prompt(100), max_tokens=16)
    run.step()
    assert [path.suffix for path in sorted(disk.iterdir())] == [".lock", ".partial"]
    run.step()  # the rest of the prompt; 15 more steps to come
    assert wait_for(lambda: [path.suffix for path in files(disk)] == [".safetensors"])
    (path,) = files(disk)
    assert len(load_hidden_states(str(path))["token_ids"]) == 100
    (output,) = run.drain()
    assert output.kv_transfer_params == {"hidden_states_path": str(path)}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
def test_an_aborted_request_leaves_nothing(run, disk, make_prompt, num_steps):
    """Queued, in its chunks, decoding; and it costs only itself."""
    aborted = run.add(make_prompt(150), max_tokens=16)
    for _ in range(num_steps):
        run.step()
    other = make_prompt(30, seed=num_steps)
    run.add(other)
    run.core.abort_request([aborted], internal=True)
    (output,) = run.drain()
    settle(run.core)
    path = output.kv_transfer_params["hidden_states_path"]
    assert load_hidden_states(path)["token_ids"].tolist() == other["prompt_token_ids"]
    assert wait_for(lambda: [str(file) for file in files(disk)] == [path])


def test_a_prompt_that_is_preempted_in_the_middle(run, make_prompt):
    """It starts over; its rows are written again, to the same places."""
    prompt = make_prompt(200, seed=3)
    run.add(prompt)
    (output,) = run.drain()
    expected = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
    run.add(prompt)
    run.step()
    run.step()
    scheduler = run.core.engine_core.engine_core.scheduler
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    (output,) = run.drain()
    rows = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
    torch.testing.assert_close(rows, expected, atol=1e-6, rtol=1e-6)


def test_a_beam_search_leaves_no_files(run, engine, disk, make_prompt):
    """Its steps are requests of their own, whose paths nobody would get."""
    from vllm.sampling_params import BeamSearchParams

    (output,) = engine.beam_search(
        [make_prompt(20)], BeamSearchParams(beam_width=3, max_tokens=4)
    )
    assert len(output.sequences) == 3
    assert os.listdir(disk) == []


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_an_id_that_comes_again_at_once(
    run, make_prompt, monkeypatch, include, is_aborted
):
    """In the same step's metadata: the end of the one, and the other's new file."""
    monkeypatch.setattr("vllm.envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", True)
    params = SamplingParams(
        max_tokens=3,
        temperature=0,
        extra_args={"kv_transfer_params": {"include_output_tokens": include}},
    )
    run.add(make_prompt(30), max_tokens=20)  # so that the engine goes on
    run.core.add_request("same", make_prompt(10), params)
    run.step()
    if is_aborted:
        run.core.abort_request(["same"])
    else:
        while not any(output.finished for output in run.step()):
            pass
    prompt = make_prompt(40, seed=1)
    run.core.add_request("same", prompt, params)
    outputs = {output.request_id: output for output in run.drain()}
    output = outputs["same"]
    said = output.outputs[0].token_ids[:-1] if include else []
    loaded = load_hidden_states(
        output.kv_transfer_params["hidden_states_path"], timeout=10
    )
    assert loaded["token_ids"].tolist() == [*prompt["prompt_token_ids"], *said]


def test_a_directory_that_is_removed_while_it_decodes(run, disk, make_prompt):
    run.core.add_request(
        "removed",
        make_prompt(10),
        SamplingParams(
            max_tokens=6,
            temperature=0,
            extra_args={"kv_transfer_params": {"include_output_tokens": True}},
        ),
    )
    run.step()
    run.step()
    (partial,) = disk.glob("*.partial")
    partial.unlink()
    (output,) = run.drain()
    with pytest.raises(HiddenStatesError, match="cannot complete the file.*No such"):
        load_hidden_states(output.kv_transfer_params["hidden_states_path"], timeout=10)


def fill(disk) -> None:
    with open(disk / "filler", "wb", buffering=0) as filler:
        try:
            while filler.write(bytes(4096)):
                pass
        except OSError:
            pass


def test_a_disk_that_is_full_already_is_in_the_response(run, disk, make_prompt):
    fill(disk)
    run.add(make_prompt(10))
    (output,) = run.drain()
    assert "No space left" in output.kv_transfer_params["hidden_states_error"]
    assert "hidden_states_path" not in output.kv_transfer_params
    assert output.outputs[0].token_ids  # the request itself is as good as ever
    assert os.listdir(disk) == ["filler"]
    (disk / "filler").unlink()
    run.add(make_prompt(10))
    (output,) = run.drain()
    path = output.kv_transfer_params["hidden_states_path"]
    assert len(load_hidden_states(path)["token_ids"]) == 10


def test_a_disk_that_becomes_read_only(run, disk, make_prompt):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        run.add(make_prompt(10))
        (output,) = run.drain()
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    error = output.kv_transfer_params["hidden_states_error"]
    assert "Read-only file system" in error and "writable" in error
    run.add(make_prompt(10))
    (output,) = run.drain()
    path = output.kv_transfer_params["hidden_states_path"]
    assert len(load_hidden_states(path, timeout=10)["token_ids"]) == 10


def test_a_disk_that_fills_up_is_told_to_the_reader(run, disk, make_prompt):
    """Six files of 1,000 rows into room for four: each is whole, or says why not."""
    prompts = [make_prompt(1000, seed=seed) for seed in range(6)]
    for prompt in prompts:
        run.add(prompt)
    outputs = sorted(run.drain(), key=lambda output: output.request_id)
    assert len(outputs) == 6
    causes = []
    for prompt, output in zip(prompts, outputs, strict=True):
        told = output.kv_transfer_params
        try:
            if "hidden_states_error" in told:
                causes.append(told["hidden_states_error"])
                continue
            loaded = load_hidden_states(told["hidden_states_path"], timeout=10)
            assert loaded["token_ids"].tolist() == prompt["prompt_token_ids"]
            assert loaded["hidden_states"].any(dim=-1).all()
        except HiddenStatesError as error:
            assert error.request_id
            causes.append(error.cause)
    assert 0 < len(causes) < 6
    assert all("No space left" in cause for cause in causes)
    # A client that has the cause has no path by which to remove a note.
    settle(run.core)
    told = {
        os.path.basename(output.kv_transfer_params["hidden_states_path"])
        for output in outputs
        if "hidden_states_path" in output.kv_transfer_params
    }
    assert wait_for(
        lambda: {file.name.removesuffix(".error") for file in files(disk)} == told
    )
    for path in disk.iterdir():
        path.unlink()
    run.add(make_prompt(500))
    (output,) = run.drain()
    path = output.kv_transfer_params["hidden_states_path"]
    assert len(load_hidden_states(path, timeout=10)["token_ids"]) == 500


def test_a_slow_disk_slows_the_engine_and_loses_nothing(
    run, disk, make_prompt, monkeypatch
):
    """Every write takes longer than a step: slots run out, and the step waits."""
    write = hidden_states_file.HiddenStatesFile.write

    def slow_write(self, offset, data):
        time.sleep(0.1)
        write(self, offset, data)

    monkeypatch.setattr(hidden_states_file.HiddenStatesFile, "write", slow_write)
    prompts = [make_prompt(300, seed=seed) for seed in range(3)]
    for prompt in prompts:
        run.add(prompt, max_tokens=2)
    for prompt, output in zip(
        prompts, sorted(run.drain(), key=lambda o: o.request_id), strict=True
    ):
        loaded = load_hidden_states(
            output.kv_transfer_params["hidden_states_path"], timeout=10
        )
        assert loaded["token_ids"].tolist() == prompt["prompt_token_ids"]


def test_rows_that_never_come_are_told_to_the_reader(run, make_prompt, monkeypatch):
    """Whatever the reason is: a path that was handed out is never left open."""
    monkeypatch.setattr(
        capture.HiddenStateCapture,
        "capture",
        lambda self, model_output, *batch: self.strip(model_output),
    )
    run.add(make_prompt(10))
    (output,) = run.drain()
    settle(run.core)
    with pytest.raises(HiddenStatesError, match="before its prompt was computed"):
        load_hidden_states(output.kv_transfer_params["hidden_states_path"], timeout=5)


def test_request_ids_that_are_no_file_names(run, disk, make_prompt):
    ids = ["../../etc/passwd", "a/b", "nul\0nul", "x" * 300, "ü\U0001f600", ".hidden"]
    for request_id in ids:
        run.core.add_request(
            request_id, make_prompt(5), SamplingParams(max_tokens=1, temperature=0)
        )
    outputs = run.drain()
    assert len(outputs) == len(ids)
    for output in outputs:
        path = output.kv_transfer_params["hidden_states_path"]
        assert os.path.dirname(path) == str(disk)
        assert len(load_hidden_states(path, timeout=10)["token_ids"]) == 5
    assert len(files(disk)) == len(ids)


def test_file_names():
    assert file_name("cmpl-12-ab_c.d") == "cmpl-12-ab_c.d.safetensors"
    odd = ["a/b", "a_b", "a\0b", "x" * 300, "x" * 301, "..", ".", "", "ü", "\ud800"]
    names = [file_name(request_id) for request_id in odd]
    assert len(set(names)) == len(odd)
    for name in names:
        assert "/" not in name and "\0" not in name and not name.startswith(".")
        assert len(name.encode()) < 240


@pytest.mark.scenario("two engines that extract in one process")
@pytest.mark.refused
def test_a_second_engine_in_the_process_is_refused(
    run, engines, tiny_model, tmp_path, make_prompt
):
    """vLLM would give it the first one's connector."""
    with pytest.raises(RuntimeError, match="two engines of one process"):  # noqa: SIM117
        with engines.running_engine(
            tiny_model, **engines.extraction(LAYER_IDS, tmp_path)
        ):
            pass
    run.add(make_prompt(10))
    (output,) = run.drain()
    assert load_hidden_states(output.kv_transfer_params["hidden_states_path"])


def test_the_ring_is_all_the_memory_there_is(engine):
    worker = engine.llm_engine.model_executor.driver_worker.worker
    ring = worker.model_runner.hidden_state_capture.extraction._ring
    assert wait_for(lambda: ring.num_free == ring.num_slots == 2)
    shapes = {tuple(slot.host_rows.shape) for slot in ring._free}
    assert shapes == {(64, len(LAYER_IDS), 128)}
    sizes = {slot.host_rows[0].nbytes for slot in ring._free}
    assert sizes == {BYTES_PER_ROW}


def test_nothing_of_a_finished_request_is_kept(run, engine, make_prompt):
    for seed in range(5):
        run.add(make_prompt(20, seed=seed), max_tokens=1 + seed)
    run.drain()
    settle(run.core)
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()
    scheduler = run.core.engine_core.engine_core.scheduler.connector
    for side, names in (
        (worker, ["_writers", "_new_files", "wanted", "_opening"]),
        (scheduler, ["_extractions", "_unannounced", "_finished", "_unwanted"]),
    ):
        for name in names:
            assert not getattr(side, name), name


def test_rows_of_a_step_are_captured_though_buffers_are_reused(run, make_prompt):
    """Two requests whose rows would be each other's if a slot were freed early."""
    prompts = [make_prompt(60, seed=seed) for seed in (1, 2)]
    loaded = []
    for prompt in prompts:
        run.add(prompt)
        (output,) = run.drain()
        loaded.append(
            load_hidden_states(output.kv_transfer_params["hidden_states_path"])
        )
    assert not torch.equal(loaded[0]["hidden_states"], loaded[1]["hidden_states"])
