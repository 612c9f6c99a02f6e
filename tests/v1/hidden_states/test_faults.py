# SPDX-License-Identifier: Apache-2.0
"""What a disk, a client or a configuration can do to an engine that extracts.

One engine of the test's own process, stepped by hand; see test_life_cycle.py for the
ordinary ends of a file, and test_faults_served.py for what takes a server.
"""

import base64
import itertools
import os
import random
import resource
import shutil
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.v1.hidden_states.storage import files
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1 import hidden_states_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    HiddenStatesError,
    cleanup_hidden_states,
    load_hidden_states,
)
from vllm.v1.hidden_states.client import hidden_states

LAYER_IDS = [2, 6]
BYTES_PER_ROW = 2 * 128 * 4
MAX_INLINE = 300 * BYTES_PER_ROW

request_ids = (f"fault-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("faults") / "storage"


@pytest.fixture(scope="module")
def other_root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def engine(engines, tiny_model, storage, other_root):
    options = {
        "allow_custom_save_path": True,
        "custom_save_roots": [str(other_root)],
        "checksum": "crc32",
        "max_inline_bytes": MAX_INLINE,
    }
    with engines.running_engine(
        tiny_model, **engines.extraction(LAYER_IDS, storage, **options)
    ) as llm:
        yield llm


@pytest.fixture
def run(engine, storage):
    """The engine with an empty directory, by hand."""
    storage.mkdir(mode=0o700, exist_ok=True)
    core = engine.llm_engine
    inner = core.engine_core.engine_core
    connector = inner.scheduler.connector
    worker = connector_of_worker()

    def add(prompt, request_id=None, sampling=(), **options) -> str:
        settings: Any = {"max_tokens": 1, "temperature": 0} | dict(sampling)
        extra_args = {"kv_transfer_params": options} if options else None
        return core.add_request(
            request_id or next(request_ids),
            prompt,
            SamplingParams(**settings, extra_args=extra_args),
        )

    def drain() -> list:
        outputs = []
        deadline = time.monotonic() + 60
        while core.has_unfinished_requests():
            assert time.monotonic() < deadline
            outputs += [output for output in core.step() if output.finished]
        return outputs

    def only():
        (output,) = drain()
        return output.kv_transfer_params

    def settle() -> None:
        """Let the worker hear of the last finished requests."""
        for _ in range(3):
            inner.step_fn()

    def counted() -> dict[str, int]:
        """What must not pile up."""
        settle()
        writers = worker._ending.values()  # kept until the next step
        assert wait_for(lambda: all(writer.is_idle for writer in writers))
        ring = core.model_executor.driver_worker.model_runner
        ring = ring.hidden_state_capture.extraction._ring
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "free blocks": inner.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),  # noqa: E501
            "free slots": ring.num_free,
            "extractions": len(connector._extractions),
            "unannounced": len(connector._unannounced),
            "writers": len(worker._writers),
            "wanted": len(worker.wanted),
        }

    state = SimpleNamespace(
        core=core,
        connector=connector,
        keeper=connector._keeper,
        add=add,
        drain=drain,
        only=only,
        step=core.step,
        settle=settle,
        counted=counted,
    )
    yield state
    drain()
    settle()
    for path in storage.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def connector_of_worker():
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def wait_for(condition, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


def check(loaded, prompt, reference_rows) -> None:
    token_ids = prompt["prompt_token_ids"]
    assert loaded["token_ids"].tolist() == token_ids
    expected = reference_rows(token_ids)[:, LAYER_IDS]
    torch.testing.assert_close(loaded["hidden_states"], expected, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------
# Rows in the response.


@pytest.mark.parametrize("length", [1, 64, 200])
def test_rows_come_in_the_response(run, make_prompt, reference_rows, storage, length):
    prompt = make_prompt(length)
    run.add(prompt, return_inline=True)
    params = run.only()
    assert list(params) == ["hidden_states"]
    told = params["hidden_states"]
    assert told["shape"] == [length, 2, 128]
    assert (told["dtype"], told["layer_ids"]) == ("float32", LAYER_IDS)
    assert len(base64.b64decode(told["data"])) == length * BYTES_PER_ROW
    check(hidden_states({"kv_transfer_params": params}), prompt, reference_rows)
    assert os.listdir(storage) == []


def test_rows_in_responses_beside_files(run, make_prompt, reference_rows, storage):
    """In one batch, with a subset of layers and rows of an output."""
    prompts = [make_prompt(40 + 7 * number, seed=number) for number in range(6)]
    for number, prompt in enumerate(prompts):
        options = {"return_inline": True} if number % 2 else {"return_inline": False}
        run.add(prompt, request_id=f"both-{number}", **options)
    output_rows = make_prompt(30, seed=9)
    run.add(
        output_rows,
        "both-6",
        {"max_tokens": 5},
        return_inline=True,
        include_output_tokens=True,
        hidden_states_layers=[6],
    )
    outputs = sorted(run.drain(), key=lambda output: output.request_id)
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=False)):
        if number % 2:
            loaded = hidden_states(output)
        else:
            path = output.kv_transfer_params["hidden_states_path"]
            loaded = load_hidden_states(path, timeout=10)
        check(loaded, prompt, reference_rows)
    assert len(files(storage)) == 3
    loaded = hidden_states(outputs[6])
    token_ids = [*output_rows["prompt_token_ids"], *outputs[6].outputs[0].token_ids]
    assert loaded["token_ids"].tolist() == token_ids[:-1]
    expected = reference_rows(token_ids[:-1])[:, [6]]
    torch.testing.assert_close(loaded["hidden_states"], expected, atol=1e-4, rtol=1e-4)


def test_a_preempted_request_in_the_response(run, make_prompt, reference_rows):
    prompt = make_prompt(200, seed=5)
    run.add(prompt, return_inline=True)
    run.step()
    run.step()
    scheduler = run.core.engine_core.engine_core.scheduler
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    params = run.only()
    check(hidden_states({"kv_transfer_params": params}), prompt, reference_rows)


def test_more_than_a_response_may_carry(run, make_prompt):
    """Of an engine in its caller's process the output says so; a server, HTTP 400."""
    run.add(make_prompt(301), return_inline=True)
    error = run.only()["hidden_states_error"]
    assert f"up to {301 * BYTES_PER_ROW} bytes (301 tokens)" in error
    assert f"valid: at most {MAX_INLINE}" in error
    run.add(make_prompt(300), return_inline=True)
    assert "hidden_states" in run.only()


def test_an_aborted_request_leaves_no_rows(run, make_prompt):
    before = run.counted()
    request_id = run.add(make_prompt(200), return_inline=True)
    run.step()
    run.core.abort_request([request_id], internal=True)
    run.add(make_prompt(3), return_inline=True)
    assert "hidden_states" in run.only()
    assert run.counted() == before
    assert connector_of_worker()._outbox.take() == []


def test_a_failure_of_a_row_for_the_response(run, make_prompt, monkeypatch):
    from vllm.distributed.kv_transfer.kv_connector.v1 import hidden_states_sink

    def write(self, span):
        raise MemoryError("no room")

    monkeypatch.setattr(hidden_states_sink.InlineSink, "write", write)
    run.add(make_prompt(10), return_inline=True)
    assert "no room" in run.only()["hidden_states_error"]


# ---------------------------------------------------------------------------
# Paths that clients choose.


def test_a_path_of_the_clients(run, make_prompt, reference_rows, storage, other_root):
    prompt = make_prompt(70)
    for path, expected in [
        ("a/b.safetensors", storage / "a" / "b.safetensors"),
        (str(storage / "c.safetensors"), storage / "c.safetensors"),
        (str(other_root / "x" / "d.safetensors"), other_root / "x" / "d.safetensors"),
        ("a/../e.safetensors", storage / "e.safetensors"),
    ]:
        run.add(prompt, hidden_states_path=path)
        params = run.only()
        assert params == {"hidden_states_path": str(expected)}
        loaded = load_hidden_states(str(expected), timeout=10, verify=True)
        check(loaded, prompt, reference_rows)
        assert oct(expected.stat().st_mode)[-3:] == "600"
        cleanup_hidden_states(str(expected))


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/x.safetensors", "../x.safetensors", "a/../../x.safetensors"),
        *("", "x", "x.safetensors/", ".safetensors", "a\0b.safetensors"),
        *("x.safetensors.lock", 7, ["a.safetensors"], {}, True),
        *("/x.safetensors", "x" * 2000 + ".safetensors"),
    ],
    ids=repr,
)
def test_paths_that_are_refused(run, make_prompt, path):
    with pytest.raises(ValueError, match="kv_transfer_params.hidden_states_path.*"):
        run.add(make_prompt(5), hidden_states_path=path)
    assert not run.core.has_unfinished_requests()


def test_a_path_through_a_symbolic_link(run, make_prompt, storage, tmp_path):
    (storage / "out").symlink_to(tmp_path)
    run.add(make_prompt(5), hidden_states_path="out/a.safetensors")
    assert "is outside of" in run.only()["hidden_states_error"]
    assert list(tmp_path.iterdir()) == []
    target = tmp_path / "target.safetensors"
    target.write_bytes(b"precious")
    (storage / "link.safetensors").symlink_to(target)
    run.add(make_prompt(5), hidden_states_path="link.safetensors")
    assert "no file of hidden states" in run.only()["hidden_states_error"]
    assert target.read_bytes() == b"precious"


def test_a_path_where_something_is(run, make_prompt, storage, reference_rows):
    """A file of ours is replaced, whole; another stays."""
    (storage / "weights.safetensors").write_bytes(b"precious")
    run.add(make_prompt(5), hidden_states_path="weights.safetensors")
    assert "no file of hidden states" in run.only()["hidden_states_error"]
    assert (storage / "weights.safetensors").read_bytes() == b"precious"
    for seed in range(2):
        prompt = make_prompt(20, seed=seed)
        run.add(prompt, hidden_states_path="again.safetensors")
        path = run.only()["hidden_states_path"]
        check(load_hidden_states(path, timeout=10), prompt, reference_rows)


def test_a_path_that_others_were_given(run, make_prompt, storage, reference_rows):
    """By the engine: it is theirs, whether its file is complete or to come."""
    prompt = make_prompt(20)
    run.add(prompt)
    path = run.only()["hidden_states_path"]
    run.add(make_prompt(30), hidden_states_path=path)
    assert "that a client has named" in run.only()["hidden_states_error"]
    check(load_hidden_states(path, timeout=10), prompt, reference_rows)
    for folder in (path, f"{path}.partial", f"{path}.error"):
        with pytest.raises(ValueError, match="a directory in it ends as files do"):
            run.add(make_prompt(5), hidden_states_path=f"{folder}/a.safetensors")
    check(load_hidden_states(path, timeout=10), prompt, reference_rows)


def test_one_path_for_two_requests_at_once(run, make_prompt, reference_rows):
    """One has it, whole; the other is told."""
    prompts = [make_prompt(150, seed=seed) for seed in range(2)]
    for prompt in prompts:
        run.add(prompt, hidden_states_path="twice.safetensors")
    third = SimpleNamespace(
        request_id="third",
        kv_transfer_params={"hidden_states_path": "twice.safetensors"},
        sampling_params=None,
    )
    cause, status = run.connector.refusal(third)
    assert status == 409 and "twice.safetensors" in cause
    outputs = sorted(run.drain(), key=lambda output: output.request_id)
    told = [list(output.kv_transfer_params) for output in outputs]
    assert sorted(told) == [["hidden_states_error"], ["hidden_states_path"]]
    (winner,) = [number for number in range(2) if told[number][0].endswith("path")]
    path = outputs[winner].kv_transfer_params["hidden_states_path"]
    check(load_hidden_states(path, timeout=10), prompts[winner], reference_rows)


# ---------------------------------------------------------------------------
# What may be stored.


@pytest.fixture
def bound(run, monkeypatch):
    """Sets how many bytes may be stored."""

    def bound(max_stored_bytes: int, when_full: str = "refuse") -> None:
        monkeypatch.setattr(run.keeper, "max_stored_bytes", max_stored_bytes)
        monkeypatch.setattr(run.connector.config, "max_stored_bytes", max_stored_bytes)
        monkeypatch.setattr(run.connector.config, "when_full", when_full)
        run.keeper.sweep()

    return bound


def size_of(num_rows: int) -> int:
    return 4096 + num_rows * (BYTES_PER_ROW + 8)


def test_no_more_is_stored_than_may_be(run, bound, make_prompt, storage):
    bound(3 * size_of(100))
    for _ in range(5):
        run.add(make_prompt(100))
    outputs = run.drain()
    told = [next(iter(output.kv_transfer_params)) for output in outputs]
    assert sorted(told) == ["hidden_states_error"] * 2 + ["hidden_states_path"] * 3
    (error, _) = [
        output.kv_transfer_params["hidden_states_error"]
        for output in outputs
        if "hidden_states_error" in output.kv_transfer_params
    ]
    assert f"of max_stored_bytes {3 * size_of(100)} are taken" in error
    assert all(output.outputs[0].token_ids for output in outputs)
    run.settle()
    sizes = [path.stat().st_size for path in files(storage)]
    assert sizes == [size_of(100)] * 3
    # Opting out costs nothing, and room comes back with what readers remove.
    run.add(make_prompt(100), extract_hidden_states=False)
    assert run.only() is None
    files(storage)[0].unlink()
    run.keeper.sweep()
    run.add(make_prompt(100))
    assert "hidden_states_path" in run.only()


def test_requests_that_wait_for_room(run, bound, make_prompt, storage, reference_rows):
    bound(2 * size_of(100), "wait")
    prompts = [make_prompt(100, seed=seed) for seed in range(5)]
    for prompt in prompts:
        run.add(prompt)
    run.add(make_prompt(7), extract_hidden_states=False)
    outputs = []
    deadline = time.monotonic() + 30
    while run.core.has_unfinished_requests() and time.monotonic() < deadline:
        for output in run.core.step():
            if output.finished:
                outputs.append(output)
        assert sum(path.stat().st_size for path in storage.iterdir()) <= 2 * size_of(
            100
        )
        if len(outputs) >= 3:  # two files, and the one that opted out
            for path in storage.glob("*.safetensors"):
                found = load_hidden_states(str(path), timeout=10)["token_ids"].tolist()
                (prompt,) = [p for p in prompts if p["prompt_token_ids"] == found]
                check(load_hidden_states(str(path)), prompt, reference_rows)
                cleanup_hidden_states(str(path))
            run.keeper.sweep()
    assert len(outputs) == 6


def test_a_request_that_waits_reads_no_prefix_cache(
    run, bound, make_prompt, storage, reference_rows
):
    """Its rows would not be computed; nor does what skips the cache get past us."""
    prompt = make_prompt(300)
    for first in (True, False):
        bound(size_of(300), "wait")
        run.add(prompt)
        run.add(prompt, sampling={} if first else {"prompt_logprobs": 1})
        finished = []
        for _ in range(30):
            finished += [output for output in run.core.step() if output.finished]
        assert len(finished) == 1  # there is room for one
        cleanup_hidden_states(finished[0].kv_transfer_params["hidden_states_path"])
        run.settle()
        run.keeper.sweep()
        path = run.only()["hidden_states_path"]
        check(load_hidden_states(path, timeout=10), prompt, reference_rows)
        cleanup_hidden_states(path)


def test_what_needs_no_room_does_not_wait_behind_others(
    run, bound, make_prompt, reference_rows
):
    bound(size_of(300), "wait")
    prompt = make_prompt(300)
    run.add(prompt)
    run.add(prompt)
    run.add(make_prompt(20), return_inline=True)
    finished = []
    for _ in range(30):
        finished += [output for output in run.core.step() if output.finished]
    assert len(finished) == 2
    (rows,) = [o for o in finished if "hidden_states" in o.kv_transfer_params]
    check(hidden_states(rows), make_prompt(20), reference_rows)
    (path,) = [
        o.kv_transfer_params["hidden_states_path"]
        for o in finished
        if "hidden_states_path" in o.kv_transfer_params
    ]
    cleanup_hidden_states(path)
    run.settle()
    run.keeper.sweep()
    cleanup_hidden_states(run.only()["hidden_states_path"])


def test_what_never_fits_is_not_waited_for(run, bound, make_prompt):
    bound(size_of(50), "wait")
    run.add(make_prompt(100))
    assert "it never fits" in run.only()["hidden_states_error"]
    # Clients repeat what is answered with 503.
    request = SimpleNamespace(
        request_id="never",
        kv_transfer_params={},
        sampling_params=SimpleNamespace(extra_args=None),
        num_prompt_tokens=100,
        max_tokens=1,
    )
    cause, status = run.connector.refusal(request)
    assert "it never fits" in cause and status == 400


# ---------------------------------------------------------------------------
# Disks.


def test_limits_of_the_process(run, make_prompt, storage, reference_rows):
    """File sizes and descriptors; after each the engine is as it was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * BYTES_PER_ROW, hard))
    try:
        run.add(make_prompt(100))
        error = run.only()["hidden_states_error"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in error and "ulimit -f" in error
    assert os.listdir(storage) == []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        run.add(make_prompt(100))
        error = run.only()["hidden_states_error"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in error and "ulimit -n" in error
    prompt = make_prompt(100)
    run.add(prompt)
    path = run.only()["hidden_states_path"]
    check(load_hidden_states(path, timeout=10), prompt, reference_rows)


def test_a_directory_that_is_removed(run, make_prompt, storage, reference_rows):
    """In the middle of a file: its reader is told. Later ones make it again."""
    run.add(make_prompt(150))
    run.step()
    shutil.rmtree(storage)
    params = run.only()
    # The locks went with the directory: who comes before the note is told only that
    # nothing is there.
    assert wait_for(lambda: list(storage.glob("*.error")))
    with pytest.raises(HiddenStatesError, match="No such file") as error:
        load_hidden_states(params["hidden_states_path"], timeout=10)
    assert error.value.advice and "leave shared_storage_path" in error.value.advice
    prompt = make_prompt(20)
    run.add(prompt)
    path = run.only()["hidden_states_path"]
    check(load_hidden_states(path, timeout=10), prompt, reference_rows)
    assert oct(storage.stat().st_mode)[-3:] == "700"


def test_errors_that_pass(run, make_prompt, reference_rows, monkeypatch):
    """A bounded number of attempts; the file is right all the same."""
    write = hidden_states_file.HiddenStatesFile.write
    failures = iter([OSError(4, "x"), OSError(11, "x"), None, OSError(16, "x")])

    def write_at_times(self, offset, data):
        if error := next(failures, None):
            raise error
        write(self, offset, data)

    monkeypatch.setattr(hidden_states_file.HiddenStatesFile, "write", write_at_times)
    prompt = make_prompt(150)
    run.add(prompt)
    path = run.only()["hidden_states_path"]
    check(load_hidden_states(path, timeout=10), prompt, reference_rows)
    assert next(failures, "all") == "all"


def test_an_error_of_the_device(run, make_prompt, monkeypatch):
    def write(self, offset, data):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hidden_states_file.HiddenStatesFile, "write", write)
    request_id = run.add(make_prompt(20))
    params = run.only()
    monkeypatch.undo()
    with pytest.raises(HiddenStatesError, match="health of the disk") as error:
        load_hidden_states(params["hidden_states_path"], timeout=10)
    assert error.value.request_id == request_id
    assert "Input/output error" in error.value.cause


# ---------------------------------------------------------------------------
# Clients that give up.


def test_an_answer_that_nobody_reads(run, make_prompt, storage):
    """The engine is done, and its answer on the way, when the client gives up."""
    request_id = run.add(make_prompt(20))
    inner = run.core.engine_core.engine_core
    while inner.scheduler.has_unfinished_requests():
        inner.step_fn()  # past the front end
    assert wait_for(lambda: list(storage.glob("*.safetensors")))
    run.settle()
    assert not inner.scheduler.has_requests()
    run.core.output_processor.abort_requests([request_id], internal=True)
    inner.abort_requests([request_id])
    assert inner.scheduler.has_requests()  # a step, to tell the worker
    inner.step_fn()
    assert wait_for(lambda: os.listdir(storage) == [])
    assert not inner.scheduler.has_requests()


def test_a_path_that_is_anothers_by_now(run, make_prompt, reference_rows):
    """Its first request's client turns out to be gone when the second has it."""
    first = run.add(make_prompt(20), hidden_states_path="mine.safetensors")
    inner = run.core.engine_core.engine_core
    while inner.scheduler.has_unfinished_requests():
        inner.step_fn()
    run.settle()
    run.core.output_processor.abort_requests([first], internal=True)
    prompt = make_prompt(30)
    run.add(prompt, hidden_states_path="mine.safetensors")
    (output,) = run.step()
    inner.abort_requests([first])
    path = output.kv_transfer_params["hidden_states_path"]
    run.settle()
    check(load_hidden_states(path, timeout=10), prompt, reference_rows)


def test_paths_that_are_chosen_again_after_an_abort(run, make_prompt, reference_rows):
    """More at once than there are writers' threads; the files were open still."""
    paths = [f"after-{number}.safetensors" for number in range(12)]
    aborted = [
        run.add(
            make_prompt(5),
            sampling={"max_tokens": 50},
            include_output_tokens=True,
            hidden_states_path=path,
        )
        for path in paths
    ]
    # Something goes on, so that one step tells the worker of both.
    company = make_prompt(6)
    run.add(company, sampling={"max_tokens": 20}, extract_hidden_states=False)
    for _ in range(3):
        run.core.step()
    run.core.abort_request(aborted, internal=True)
    prompts = [make_prompt(20, seed=seed) for seed in range(len(paths))]
    for prompt, path in zip(prompts, paths, strict=True):
        run.add(prompt, hidden_states_path=path)
    outputs = {output.prompt_token_ids[0]: output for output in run.drain()}
    assert len(outputs) == len(paths) + 1
    for prompt in prompts:
        output = outputs[prompt["prompt_token_ids"][0]]
        path = output.kv_transfer_params["hidden_states_path"]
        check(load_hidden_states(path, timeout=10), prompt, reference_rows)


def test_an_id_that_is_used_again(run, make_prompt, reference_rows):
    """By a request that opts out, and is aborted: the older one's file is its own."""
    prompt = make_prompt(20)
    request_id = run.add(prompt)
    path = run.only()["hidden_states_path"]
    run.connector.on_new_request(
        SimpleNamespace(
            request_id=request_id,
            kv_transfer_params={"extract_hidden_states": False},
            sampling_params=None,
        )
    )
    inner = run.core.engine_core.engine_core
    run.settle()
    inner.abort_requests([request_id])
    assert not inner.scheduler.has_requests()  # nothing to tell the worker
    check(load_hidden_states(path, timeout=10), prompt, reference_rows)


def test_a_thousand_aborts(run, make_prompt, reference_rows, storage):
    """At random moments; what is left is what was asked for, and right."""
    generator = random.Random(3)
    before = run.counted()
    alive: dict[str, dict] = {}
    told: dict[str, dict] = {}
    prompts: dict[str, dict] = {}
    num_aborted = 0
    while num_aborted < 1000:
        while len(alive) < 12:
            length = generator.choice([1, 5, 63, 64, 65, 130, 200])
            prompt = make_prompt(length, seed=generator.randrange(40))
            options = generator.choice(
                [
                    {},
                    {},
                    {"include_output_tokens": True},
                    {"return_inline": True},
                    {"hidden_states_layers": [6]},
                    {"extract_hidden_states": False},
                ]
            )
            sampling = {"max_tokens": generator.choice([1, 1, 3, 8])}
            request_id = run.add(prompt, sampling=sampling, **options)
            alive[request_id] = prompts[request_id] = prompt
        for output in run.core.step():
            if output.finished:
                for request_id in list(alive):
                    if request_id.startswith(output.request_id):
                        del alive[request_id]
                        told[request_id] = output.kv_transfer_params or {}
        for request_id in generator.sample(list(alive), k=min(5, len(alive))):
            run.core.abort_request([request_id], internal=True)
            del alive[request_id]
            num_aborted += 1
    run.core.abort_request(list(alive), internal=True)
    assert run.counted() == before
    paths = {
        params["hidden_states_path"]: request_id
        for request_id, params in told.items()
        if "hidden_states_path" in params
    }
    assert len(paths) > 20
    assert wait_for(lambda: {str(path) for path in files(storage)} == set(paths))
    for path, request_id in paths.items():
        loaded = load_hidden_states(path, verify=True)
        token_ids = loaded["token_ids"].tolist()
        prompt = prompts[request_id]["prompt_token_ids"]
        assert token_ids[: len(prompt)] == prompt
        layers = [6] if loaded["hidden_states"].shape[1] == 1 else LAYER_IDS
        expected = reference_rows(token_ids)[:, layers]
        torch.testing.assert_close(
            loaded["hidden_states"], expected, atol=1e-4, rtol=1e-4
        )
