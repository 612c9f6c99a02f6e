# SPDX-License-Identifier: Apache-2.0
"""What clients, and signals, can do to a server that extracts: two API servers, one
engine, and a bound on what is stored."""

import concurrent.futures
import contextlib
import json
import os
import random
import re
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    HiddenStatesError,
    HiddenStatesTimeoutError,
    cleanup_hidden_states,
    load_hidden_states,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_storage import (
    BOUNDED_INTERVAL,
)
from vllm.v1.hidden_states.client import hidden_states

# Of the runner nothing here depends; files and clients are the same for both.
pytestmark = pytest.mark.starts_processes

LAYER_IDS = [2, 6]
BYTES_PER_ROW = 2 * 128 * 4
PARAMS = "kv_transfer_params"
MAX_STORED = 3_000_000  # some 2,900 rows
MAX_INLINE = 200 * BYTES_PER_ROW


@pytest.fixture(scope="module")
def served(engines, tiny_model, tmp_path_factory):
    server = engines.import_file(Path(__file__).with_name("server.py"))
    folder = tmp_path_factory.mktemp("served")
    storage = folder / "storage"
    limits = {"max_stored_bytes": MAX_STORED, "max_inline_bytes": MAX_INLINE}
    options = ["--api-server-count", "2", "--enforce-eager"]
    for name, value in engines.extraction(LAYER_IDS, storage, **limits).items():
        options += [f"--{name}", json.dumps(value)]
    with server.serving(tiny_model, folder, *options) as running:
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
    def complete(prompt, params=None, **fields):
        return served.client.completions.create(
            model=served.model,
            prompt=prompt,
            **({"max_tokens": 1, "temperature": 0} | fields),
            extra_body={PARAMS: params} if params is not None else {},
        )

    return complete


@pytest.fixture(autouse=True)
def empty(served):
    yield
    for path in served.storage.iterdir():
        path.unlink()


def wait_for(condition, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{length} {seed}")
    return [generator.randrange(3, 1000) for _ in range(length)]


def check(loaded, token_ids, reference_rows) -> None:
    assert loaded["token_ids"].tolist() == token_ids
    expected = reference_rows(token_ids)[:, LAYER_IDS]
    torch.testing.assert_close(loaded["hidden_states"], expected, atol=1e-4, rtol=1e-4)


def test_no_room_is_http_503(served, complete, reference_rows):
    paths = []
    with pytest.raises(openai.APIStatusError) as error:
        for seed in range(10):
            paths.append(complete(ids(1000, seed)).kv_transfer_params)
    assert error.value.status_code == 503
    assert f"max_stored_bytes {MAX_STORED} are taken" in str(error.value)
    assert len(paths) == 2
    stream = complete(ids(1000), stream=True)
    with pytest.raises(openai.APIError, match="max_stored_bytes"):
        list(stream)
    # A smaller one fits; one that opts out needs no room; the server is well.
    assert complete(ids(100)).kv_transfer_params
    assert complete(ids(1000), {"extract_hidden_states": False}).choices
    served.server.get("/health")
    for seed, params in enumerate(paths):
        path = params["hidden_states_path"]
        check(load_hidden_states(path, timeout=30), ids(1000, seed), reference_rows)
        cleanup_hidden_states(path)

    def fits() -> bool:
        try:
            return complete(ids(1000)).kv_transfer_params is not None
        except openai.APIStatusError:
            return False

    assert wait_for(fits)


def test_a_burst_never_takes_more_than_there_is(served, complete):
    """Forty at once, for which there is room for two or three."""
    most = 0
    is_over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.is_set():
            with contextlib.suppress(FileNotFoundError):
                sizes = [path.stat().st_size for path in served.storage.iterdir()]
                most = max(most, sum(sizes))

    def ask(seed: int) -> int:
        try:
            complete(ids(1000, seed))
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    # The server has to see first that the files of the test before are gone.
    time.sleep(2 * BOUNDED_INTERVAL)
    watcher = threading.Thread(target=watch)
    watcher.start()
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        statuses = list(pool.map(ask, range(40)))
    is_over.set()
    watcher.join()
    assert set(statuses) == {200, 503}
    assert statuses.count(200) == 2
    assert MAX_STORED / 2 < most <= MAX_STORED


def test_one_path_is_not_that_of_several_prompts(served, complete):
    """Whichever came first would have it, and the other's rows would be lost."""
    with pytest.raises(openai.BadRequestError, match="several prompts"):
        complete([ids(5), ids(6)], {"hidden_states_path": "a.safetensors"})


def test_rows_in_the_response(served, complete, reference_rows):
    response = complete(ids(70), {"return_inline": True})
    check(hidden_states(response), ids(70), reference_rows)
    check(hidden_states(response.model_dump()), ids(70), reference_rows)
    response = complete([ids(5), ids(90)], {"return_inline": True})
    for choice, token_ids in zip(response.choices, [ids(5), ids(90)], strict=True):
        check(hidden_states(choice), token_ids, reference_rows)
    *_, last = complete(ids(12), {"return_inline": True}, stream=True)
    check(hidden_states(last), ids(12), reference_rows)
    assert list(served.storage.iterdir()) == []  # not even a lock
    with pytest.raises(openai.BadRequestError) as error:
        complete(ids(201), {"return_inline": True})
    assert f"valid: at most {MAX_INLINE}" in str(error.value)


@pytest.mark.parametrize(
    "field",
    [
        *("extract_hidden_states", "include_output_tokens", "return_inline"),
        *("hidden_states_layers", "hidden_states_path"),
    ],
)
def test_wrong_types_and_sizes(served, complete, field):
    values: list[Any] = [7, -1, 1e300, "x", "", [], [[]], {}, {"a": []}, ["x"], [True]]
    values += ["x" * 100_000, list(range(5000)), [2, 2], "a\0b", "../x"]
    for value in values:
        with pytest.raises(openai.BadRequestError) as error:
            complete([5, 6], {field: value})
        assert f"{PARAMS}.{field}" in str(error.value)
        assert len(str(error.value)) < 1000
    assert complete([5, 6], {field: None}).kv_transfer_params


def test_paths_are_the_servers(served, complete):
    for path in ("/tmp/x.safetensors", str(served.storage / "x.safetensors")):
        with pytest.raises(openai.BadRequestError, match="allow_custom_save_path"):
            complete([5, 6], {"hidden_states_path": path})


@pytest.mark.parametrize(
    "request_id",
    ["../../x", "/etc/x", "..", "a" * 300, "a b", ".", "-rf", "x.lock", "%2e%2e"],
)
def test_request_ids_are_the_clients(served, reference_rows, request_id):
    """The same one twice at once, too."""
    header = {"X-Request-Id": request_id}

    def ask(seed: int) -> str:
        response = served.client.completions.create(
            model=served.model,
            prompt=ids(130, seed),
            max_tokens=1,
            extra_headers=header,
        )
        return response.kv_transfer_params["hidden_states_path"]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(ask, range(2)))
    assert len(set(paths)) == 2
    for seed, path in enumerate(paths):
        assert Path(path).parent == served.storage
        check(load_hidden_states(path, timeout=30), ids(130, seed), reference_rows)
        cleanup_hidden_states(path)


def test_clients_that_hang_up(served, complete, reference_rows):
    """A hundred, at random moments; nothing of them is left, nobody else is hurt."""
    generator = random.Random(1)
    port = served.server.port

    def hang_up(number: int) -> None:
        body = json.dumps(
            {
                "model": served.model,
                "prompt": ids(generator.randrange(1, 900), number),
                "max_tokens": generator.choice([1, 30]),
                "stream": generator.random() < 0.5,
                PARAMS: generator.choice(
                    [{}, {"include_output_tokens": True}, {"return_inline": True}]
                ),
            }
        )
        with socket.create_connection(("localhost", port)) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            time.sleep(generator.choice([0, 0.005, 0.02, 0.1, 0.3]))

    def complete_when_there_is_room(token_ids: list[int]) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while True:
            try:
                return complete(token_ids).kv_transfer_params
            except openai.APIStatusError as error:
                assert error.status_code == 503 and time.monotonic() < deadline
                time.sleep(0.1)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(hang_up, range(100)))
        kept = [complete_when_there_is_room(ids(77, seed)) for seed in range(5)]

    def is_quiet() -> bool:
        running = re.search(
            r"^vllm:num_requests_running\{.*\} (\S+)$",
            served.server.get("/metrics"),
            re.MULTILINE,
        )
        return running is not None and float(running[1]) == 0

    assert wait_for(is_quiet, 60)
    complete([5])  # a step, in which workers hear of what has ended
    names = [path.name.removesuffix(".lock") for path in served.storage.iterdir()]
    # What was complete before its client hung up stays; nothing half is there.
    assert all(name.endswith(".safetensors") for name in names)
    for seed, params in enumerate(kept):
        loaded = load_hidden_states(params["hidden_states_path"], timeout=30)
        check(loaded, ids(77, seed), reference_rows)


def test_metrics(served, complete):
    def counted(name: str, **labels: str) -> float:
        total = 0.0
        for line in served.server.get("/metrics").splitlines():
            found = re.match(rf"vllm:hidden_states_{name}\{{(.*)\}} (\S+)$", line)
            if found and all(f'{k}="{v}"' in found[1] for k, v in labels.items()):
                total += float(found[2])
        return total

    def all_counted() -> list[float]:
        names = ("requests_total", "files_completed_total", "rows_total", "bytes_total")
        return [counted(name) for name in names]

    complete([5])  # what is before is counted by now
    time.sleep(0.5)
    complete([5])
    assert wait_for(lambda: counted("files_completed_total") > 0)
    time.sleep(0.5)
    before = all_counted()
    for seed in range(6):
        complete(ids(100, seed))
    for _ in range(2):  # events are told with the steps after them
        complete([5], {"extract_hidden_states": False})
    rows = 600
    expected = [6, 6, rows, rows * BYTES_PER_ROW]
    assert wait_for(
        lambda: (
            [now - then for now, then in zip(all_counted(), before, strict=True)]
            == expected
        )
    ), [all_counted(), before]
    assert counted("write_seconds_count") >= 12
    assert counted("ring_slots_in_use", engine="0") in (0, 1, 2)
    failed = counted("files_failed_total", cause="ENOTDIR")
    away = served.storage.with_name("away")
    served.storage.rename(away)
    served.storage.touch()  # a file, in which no file can be made
    try:
        response = complete(ids(10))
        assert "ENOTDIR" in str(response.kv_transfer_params) or (
            "Not a directory" in response.kv_transfer_params["hidden_states_error"]
            or "File exists" in response.kv_transfer_params["hidden_states_error"]
        )
    finally:
        served.storage.unlink()
        away.rename(served.storage)
    complete([5])
    assert wait_for(lambda: counted("files_failed_total") > failed)


def test_one_line_per_failure_and_none_per_success(served):
    assert served.server.log.read_text().count("Hidden states of request") == 1


def worker_of(served) -> int:
    """The process id of the worker."""
    session = os.getsid(served.server.process.pid)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            if (
                os.getsid(pid) == session
                and "Worker"
                in (entry / "cmdline").read_text() + (entry / "comm").read_text()
            ):
                return pid
    raise AssertionError("no worker")


def ask_in_background(served, prompt, request_id) -> threading.Thread:
    """A request whose file is being written for some time: its output's rows, too."""

    def ask() -> None:
        with contextlib.suppress(OSError):
            served.server.complete(
                prompt,
                headers={"X-Request-Id": request_id},
                max_tokens=200,
                ignore_eos=True,
                kv_transfer_params={"include_output_tokens": True},
            )

    client = threading.Thread(target=ask)
    client.start()
    return client


def path_of(served, request_id) -> Path:
    assert wait_for(lambda: list(served.storage.glob(f"*{request_id}*.partial")))
    (partial,) = served.storage.glob(f"*{request_id}*.partial")
    return partial.with_suffix("")


def test_a_worker_that_is_stopped(served, reference_rows):
    """The server answers, readers wait as long as they like; then all goes on."""
    worker = worker_of(served)
    client = ask_in_background(served, ids(700), "stopped")
    path = path_of(served, "stopped")
    os.kill(worker, signal.SIGSTOP)
    try:
        with pytest.raises(HiddenStatesTimeoutError, match="after 0.3 s"):
            load_hidden_states(str(path), timeout=0.3)
        served.server.get("/health")
    finally:
        os.kill(worker, signal.SIGCONT)
    loaded = load_hidden_states(str(path), timeout=60)
    token_ids = loaded["token_ids"].tolist()
    assert token_ids[:700] == ids(700) and len(token_ids) == 899
    check(loaded, token_ids, reference_rows)
    client.join(30)


def test_a_worker_that_is_killed(served):
    """Last: readers are told within a second, and there is no file."""
    client = ask_in_background(served, ids(700), "killed")
    path = path_of(served, "killed")
    worker = worker_of(served)
    os.kill(worker, signal.SIGSTOP)  # or it would be done
    told: list[tuple[float, HiddenStatesError]] = []

    def read() -> None:
        with pytest.raises(HiddenStatesError) as error:
            load_hidden_states(str(path))
        told.append((time.monotonic(), error.value))

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.05)
    assert not told
    killed = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    reader.join(10)
    assert told[0][0] - killed < 1
    assert "its writer ended before the file was complete" in told[0][1].cause
    assert not path.exists()
    client.join(60)
