# SPDX-License-Identifier: Apache-2.0
"""The file: what readers see before, while, and after it is written."""

import errno
import fcntl
import json
import multiprocessing
import os
import pickle
import resource
import signal
import stat
import struct
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_file import (
    HEADER_ROOM,
    HiddenStatesError,
    HiddenStatesFile,
    HiddenStatesTimeoutError,
    cleanup_hidden_states,
    load_hidden_states,
)

L, H = 3, 8


def rows_and_bytes(num_tokens: int, dtype=torch.float32):
    rows = torch.randn(num_tokens, L, H).to(dtype)
    return rows, rows.view(-1).view(torch.uint8).numpy().data


def finish(file: HiddenStatesFile, num_tokens: int, dtype=torch.float32) -> None:
    file.finish(np.arange(num_tokens), L, H, dtype, {"layer_ids": "[1, 2, 3]"})


def write_file(path, num_tokens: int = 5, dtype=torch.float32, **options):
    rows, data = rows_and_bytes(num_tokens, dtype)
    file = HiddenStatesFile(str(path), "request", **options)
    file.open()
    file.write(0, data)
    finish(file, num_tokens, dtype)
    return rows


@pytest.mark.parametrize("use_lock", [True, False], ids=["lock", "no lock"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 5, 1000])
def test_round_trip(tmp_path, num_tokens, dtype, use_lock):
    path = tmp_path / "folder" / "a.safetensors"
    rows = write_file(path, num_tokens, dtype, use_lock=use_lock)
    for loaded in (load_hidden_states(str(path)), load_hidden_states(path, timeout=0)):
        assert torch.equal(loaded["hidden_states"], rows)
        assert loaded["hidden_states"].dtype == dtype
        assert loaded["token_ids"].dtype == torch.int64
        assert loaded["token_ids"].tolist() == list(range(num_tokens))
    # The safetensors library's own reader agrees, and nothing else is left.
    assert torch.equal(load_file(path)["hidden_states"], rows)
    assert os.listdir(path.parent) == ["a.safetensors"]


def test_metadata_and_modes(tmp_path):
    path = tmp_path / "folder" / "a.safetensors"
    write_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata == {
        "format": "pt",
        "hidden_states_format_version": "1",
        "request_id": "request",
        "layer_ids": "[1, 2, 3]",
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@settings(max_examples=30, deadline=None)
@given(data=st.data(), num_tokens=st.integers(1, 40))
def test_rows_may_come_in_any_order_and_more_than_once(
    tmp_path_factory, data, num_tokens
):
    path = tmp_path_factory.mktemp("order") / "a.safetensors"
    rows, content = rows_and_bytes(num_tokens)
    row_size = L * H * 4
    pieces = data.draw(st.permutations(range(num_tokens)))
    again = data.draw(st.lists(st.sampled_from(range(num_tokens)), max_size=10))
    file = HiddenStatesFile(str(path), "request")
    file.open()
    for position in [*again, *pieces]:
        start = position * row_size
        file.write(start, content[start : start + row_size])
    finish(file, num_tokens)
    assert torch.equal(load_hidden_states(str(path))["hidden_states"], rows)


@pytest.mark.parametrize("use_lock", [True, False], ids=["lock", "no lock"])
def test_a_reader_waits_for_the_last_row(tmp_path, use_lock):
    path = str(tmp_path / "a.safetensors")
    rows, data = rows_and_bytes(5)
    file = HiddenStatesFile(path, "request", use_lock)
    file.open()
    assert os.path.exists(path + ".lock") == use_lock
    assert not os.path.exists(path)
    with pytest.raises(HiddenStatesTimeoutError, match="still being written"):
        load_hidden_states(path, timeout=0.05)
    with pytest.raises(TimeoutError):
        load_hidden_states(path, timeout=0)
    results: list = []
    reader = threading.Thread(
        target=lambda: results.append(load_hidden_states(path)), daemon=True
    )
    reader.start()
    timed = threading.Thread(
        target=lambda: results.append(load_hidden_states(path, timeout=30)),
        daemon=True,
    )
    timed.start()
    file.write(0, data)
    time.sleep(0.1)
    assert results == []
    finish(file, 5)
    for thread in (reader, timed):
        thread.join(10)
    assert len(results) == 2
    assert all(torch.equal(result["hidden_states"], rows) for result in results)


def test_consumers_that_lock_for_themselves(tmp_path):
    """As ``speculators`` does it: poll for an exclusive lock, delete it, load."""
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request")
    file.open()
    with open(path + ".lock", "r+") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        rows, data = rows_and_bytes(2)
        file.write(0, data)
        finish(file, 2)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert torch.equal(load_file(path)["hidden_states"], rows)


@pytest.mark.parametrize("use_lock", [True, False], ids=["lock", "no lock"])
def test_a_failure_reaches_the_reader(tmp_path, use_lock):
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request-7", use_lock)
    file.open()
    file.write(0, rows_and_bytes(100)[1])
    file.fail("the disk is on fire")
    for _ in range(2):
        with pytest.raises(HiddenStatesError, match="on fire") as caught:
            load_hidden_states(path, timeout=1)
    assert caught.value.request_id == "request-7"
    assert caught.value.path == path
    assert caught.value.cause == "the disk is on fire"
    assert not isinstance(caught.value, TimeoutError)
    assert os.listdir(tmp_path) == ["a.safetensors.error"]
    # A later request at the same path starts afresh.
    write_file(path, use_lock=use_lock)
    assert len(load_hidden_states(path)["token_ids"]) == 5
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_long_and_odd_causes_and_ids_fit_their_room(tmp_path):
    path = str(tmp_path / "a.safetensors")
    odd = "\U0001f600\0\n" * 2000
    file = HiddenStatesFile(path, odd)
    file.open()
    file.fail(odd)
    assert os.path.getsize(path + ".error") == HEADER_ROOM
    with pytest.raises(HiddenStatesError, match="\U0001f600"):
        load_hidden_states(path)
    file = HiddenStatesFile(path, odd)
    file.open()
    file.write(0, rows_and_bytes(1)[1])
    finish(file, 1)
    assert len(load_hidden_states(path)["token_ids"]) == 1


def test_withdrawn_files_leave_nothing(tmp_path):
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request")
    file.open()
    file.withdraw()
    file.withdraw()
    assert os.listdir(tmp_path) == []
    write_file(path)
    file.remove()
    assert os.listdir(tmp_path) == []


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_no_descriptor_is_left(tmp_path):
    before = open_descriptors()
    path = str(tmp_path / "a.safetensors")
    for end in ("finish", "fail", "withdraw", "remove"):
        file = HiddenStatesFile(path, "request")
        file.open()
        if end == "finish":
            file.write(0, rows_and_bytes(5)[1])
            finish(file, 5)
        elif end == "fail":
            file.fail("cause")
        else:
            getattr(file, end)()
    assert open_descriptors() == before


# ---- Paths at which there is nothing, or nothing good -------------------------


def test_a_path_where_nothing_ever_was(tmp_path):
    with pytest.raises(HiddenStatesError, match="no such file, and none is being"):
        load_hidden_states(str(tmp_path / "a.safetensors"))
    with pytest.raises(HiddenStatesError, match="no such file"):
        load_hidden_states(str(tmp_path / "no folder" / "a.safetensors"))


def die_while_writing(path: str, use_lock: bool, ready) -> None:
    file = HiddenStatesFile(path, "request", use_lock)
    file.open()
    file.write(0, rows_and_bytes(5)[1])
    ready.set()
    time.sleep(60)


@pytest.mark.parametrize("use_lock", [True, False], ids=["lock", "no lock"])
def test_a_killed_writer_releases_its_readers(tmp_path, use_lock):
    path = str(tmp_path / "a.safetensors")
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    writer = context.Process(target=die_while_writing, args=(path, use_lock, ready))
    writer.start()
    assert ready.wait(10)
    errors: list = []

    def read() -> None:
        try:
            load_hidden_states(path)
        except HiddenStatesError as error:
            errors.append(str(error))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    time.sleep(0.1)
    assert reader.is_alive()
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    reader.join(1)
    assert errors and "its writer ended before the file was complete" in errors[0]
    # The leftovers are in nobody's way.
    write_file(path, use_lock=use_lock)
    assert len(load_hidden_states(path)["token_ids"]) == 5


@pytest.mark.parametrize("size", [0, 4, 100, HEADER_ROOM, HEADER_ROOM + 7, -1])
def test_a_truncated_file(tmp_path, size):
    path = tmp_path / "a.safetensors"
    write_file(path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(HiddenStatesError, match="not whole, or no safetensors file"):
        load_hidden_states(str(path))


def test_files_of_something_else(tmp_path):
    path = tmp_path / "a.safetensors"
    header = json.dumps(
        {"weights": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(HiddenStatesError, match="no tensor 'hidden_states'"):
        load_hidden_states(str(path))
    path.write_bytes(struct.pack("<Q", 1 << 60) + bytes(100))
    with pytest.raises(HiddenStatesError, match="not whole"):
        load_hidden_states(str(path))
    path.unlink()
    path.mkdir()
    with pytest.raises(HiddenStatesError):
        load_hidden_states(str(path))


def test_rows_and_token_ids_must_agree(tmp_path):
    from safetensors.torch import save_file

    path = str(tmp_path / "a.safetensors")
    save_file(
        {"hidden_states": torch.zeros(3, L, H), "token_ids": torch.zeros(4).long()},
        path,
    )
    with pytest.raises(HiddenStatesError, match="3 rows for 4 token ids"):
        load_hidden_states(path)


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=300))
def test_random_bytes_are_an_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("random") / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(HiddenStatesError):
        load_hidden_states(str(path))
    (path.parent / "b.safetensors.error").write_bytes(content)
    with pytest.raises(HiddenStatesError):
        load_hidden_states(str(path.parent / "b.safetensors"))


def test_two_writers_never_share_a_path(tmp_path):
    path = str(tmp_path / "a.safetensors")
    for use_lock in (True, False):
        first = HiddenStatesFile(path, "first", use_lock)
        first.open()
        second = HiddenStatesFile(path, "second", use_lock)
        with pytest.raises(FileExistsError, match="held by another writer"):
            second.open()
        rows, data = rows_and_bytes(2)
        first.write(0, data)
        finish(first, 2)
        assert torch.equal(load_hidden_states(path)["hidden_states"], rows)


def test_symbolic_links_are_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    path = tmp_path / "a.safetensors"
    for suffix in (".lock", ".partial"):
        os.symlink(target, f"{path}{suffix}")
        with pytest.raises(OSError):
            HiddenStatesFile(str(path), "request").open()
        os.unlink(f"{path}{suffix}")
    assert target.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["target"]


def test_cleanup(tmp_path):
    path = str(tmp_path / "a.safetensors")
    write_file(path)
    open(path + ".lock", "w").close()
    cleanup_hidden_states(path, keep_hidden_states=True)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    cleanup_hidden_states(path)
    cleanup_hidden_states(path)
    assert os.listdir(tmp_path) == []


def test_cleanup_after_a_dead_writer(tmp_path):
    """What it left goes; what a living writer holds stays."""
    path = str(tmp_path / "a.safetensors")
    open(path + ".partial", "w").close()
    open(path + ".lock", "w").close()
    with pytest.raises(HiddenStatesError, match="its writer ended before"):
        load_hidden_states(path)
    cleanup_hidden_states(path)
    assert os.listdir(tmp_path) == []
    file = HiddenStatesFile(path, "request", use_lock=False)
    file.open()
    cleanup_hidden_states(path)
    file.write(0, rows_and_bytes(1)[1])
    finish(file, 1)
    assert len(load_hidden_states(path)["token_ids"]) == 1


def test_a_reader_that_comes_after_another_ones_cleanup(tmp_path):
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request")
    file.open()
    causes: list = []

    def read() -> None:
        with pytest.raises(HiddenStatesError) as caught:
            load_hidden_states(path)
        causes.append(caught.value.cause)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    time.sleep(0.1)
    file.withdraw()  # as an abort does; a cleanup of the complete file looks the same
    reader.join(5)
    assert "removed by another reader, or the request was aborted" in causes[0]


def test_errors_travel_between_processes():
    for kind in (HiddenStatesError, HiddenStatesTimeoutError):
        error = pickle.loads(pickle.dumps(kind("/path", "cause", "request")))
        assert type(error) is kind
        assert (error.path, error.cause, error.request_id) == (
            "/path",
            "cause",
            "request",
        )


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_timeouts_that_are_over(tmp_path, timeout):
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request")
    file.open()
    with pytest.raises(HiddenStatesTimeoutError):
        load_hidden_states(path, timeout)
    file.withdraw()


def test_a_path_with_nul():
    with pytest.raises(HiddenStatesError, match="null byte"):
        load_hidden_states("/tmp/a\0b")


def test_what_an_earlier_request_left_is_not_this_ones(tmp_path):
    path = str(tmp_path / "a.safetensors")
    write_file(path)
    file = HiddenStatesFile(path, "request")
    file.open()
    assert not os.path.exists(path)
    file.fail("cause")
    with pytest.raises(HiddenStatesError, match="cause"):
        load_hidden_states(path)


def test_a_request_id_that_utf_8_cannot_hold(tmp_path):
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "\ud800")
    file.open()
    file.write(0, rows_and_bytes(1)[1])
    finish(file, 1)
    assert len(load_hidden_states(path)["token_ids"]) == 1
    file = HiddenStatesFile(path, "\ud800")
    file.open()
    file.fail("\ud800")
    with pytest.raises(HiddenStatesError):
        load_hidden_states(path)


def test_a_forked_process_keeps_no_reader_waiting(tmp_path):
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request")
    file.open()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    child.start()
    try:
        file.write(0, rows_and_bytes(1)[1])
        lock = os.open(path + ".lock", os.O_RDONLY)
        finish(file, 1)
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(lock)
    finally:
        child.kill()
        child.join()


def test_a_lock_that_cannot_be_removed(tmp_path):
    """The file is complete and stays so."""
    path = str(tmp_path / "a.safetensors")
    rows, data = rows_and_bytes(2)
    before = open_descriptors()
    file = HiddenStatesFile(path, "request")
    file.open()
    os.unlink(path + ".lock")
    os.mkdir(path + ".lock")
    file.write(0, data)
    finish(file, 2)
    assert open_descriptors() == before
    os.rmdir(path + ".lock")
    assert torch.equal(load_hidden_states(path)["hidden_states"], rows)


@pytest.mark.parametrize("end", ["fail", "withdraw"])
def test_a_directory_that_becomes_a_file(tmp_path, end):
    """Nothing can be written or removed there; the waiting reader is told."""
    folder = tmp_path / "folder"
    path = str(folder / "a.safetensors")
    before = open_descriptors()
    file = HiddenStatesFile(path, "request")
    file.open()
    errors: list = []

    def read() -> None:
        try:
            load_hidden_states(path)
        except HiddenStatesError as error:
            errors.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    time.sleep(0.1)
    os.rename(folder, tmp_path / "moved")
    folder.write_text("a file")
    with pytest.raises(OSError):
        file.fail("cause") if end == "fail" else file.withdraw()
    reader.join(5)
    assert len(errors) == 1
    assert open_descriptors() == before


# ---- Disks that refuse ---------------------------------------------------------


def test_a_disk_that_fills_up_in_the_middle(small_disk):
    path = str(small_disk / "a.safetensors")
    file = HiddenStatesFile(path, "request")
    file.open()
    block = memoryview(bytes(256 * 1024))
    with pytest.raises(OSError) as caught:
        for index in range(10):
            file.write(index * len(block), block)
    assert caught.value.errno == errno.ENOSPC
    # Another process takes the last byte before the note is left.
    with open(small_disk / "filler", "wb", buffering=0) as filler:
        with pytest.raises(OSError):
            while filler.write(bytes(4096)):
                pass
        file.fail(f"cannot write the file: {caught.value}")
        with pytest.raises(HiddenStatesError, match="No space left on device"):
            load_hidden_states(path)
    assert sorted(os.listdir(small_disk)) == ["a.safetensors.error", "filler"]


def test_a_disk_that_is_full_from_the_start(small_disk):
    with (
        open(small_disk / "filler", "wb", buffering=0) as filler,
        pytest.raises(OSError),
    ):
        while filler.write(bytes(4096)):
            pass
    before = open_descriptors()
    file = HiddenStatesFile(str(small_disk / "a.safetensors"), "request")
    with pytest.raises(OSError) as caught:
        file.open()
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(small_disk) == ["filler"]
    assert open_descriptors() == before


def test_no_descriptors_left_to_open_files_with(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is on the number of a descriptor: fill the gaps below the highest.
    highest = max(map(int, open_descriptors()))
    fillers = [os.dup(0)]
    while fillers[-1] < highest:
        fillers.append(os.dup(0))
    try:
        for spare in (0, 1):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (fillers[-1] + 1 + spare, limits[1])
            )
            try:
                with pytest.raises(OSError) as caught:
                    HiddenStatesFile(str(tmp_path / "a.safetensors"), "request").open()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert caught.value.errno == errno.EMFILE
            assert os.listdir(tmp_path) == []
    finally:
        for filler in fillers:
            os.close(filler)
