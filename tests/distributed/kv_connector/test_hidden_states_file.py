# SPDX-License-Identifier: Apache-2.0
"""The file: what readers see before, while, and after it is written."""

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import stat
import struct
import threading
import time
import zlib

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from vllm.distributed.kv_transfer.kv_connector.v1 import hidden_states_file
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_file import (
    ADVICE,
    CHECKSUMS,
    HEADER_ROOM,
    FileOptions,
    HiddenStatesError,
    HiddenStatesFile,
    HiddenStatesTimeoutError,
    advice_about,
    cleanup_hidden_states,
    is_anothers,
    is_hidden_states_file,
    is_note,
    load_hidden_states,
    make_directories,
    note_death,
    remove_unheld,
)

L, H = 3, 8


def rows_and_bytes(num_tokens: int, dtype=torch.float32):
    rows = torch.randn(num_tokens, L, H).to(dtype)
    return rows, rows.view(-1).view(torch.uint8).numpy().data


def finish(file: HiddenStatesFile, num_tokens: int, dtype=torch.float32) -> None:
    file.finish(np.arange(num_tokens), L, H, dtype, {"layer_ids": "[1, 2, 3]"})


def write_file(path, num_tokens: int = 5, dtype=torch.float32, **options):
    rows, data = rows_and_bytes(num_tokens, dtype)
    file = HiddenStatesFile(str(path), "request", FileOptions(**options))
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
    assert files_in(path.parent) == ["a.safetensors"]


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
    file = HiddenStatesFile(path, "request", FileOptions(use_lock))
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
        os.remove(path + ".lock")  # of two that wait, the first one's alone
        assert torch.equal(load_file(path)["hidden_states"], rows)
    file = HiddenStatesFile(path, "request")
    file.open()
    with open(path + ".lock", "r+"):
        file.fail("the disk is on fire")
        os.remove(path + ".lock")


@pytest.mark.parametrize("use_lock", [True, False], ids=["lock", "no lock"])
def test_a_failure_reaches_the_reader(tmp_path, use_lock):
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request-7", FileOptions(use_lock))
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
    assert files_in(tmp_path) == ["a.safetensors.error"]
    # A later request at the same path starts afresh.
    write_file(path, use_lock=use_lock)
    assert len(load_hidden_states(path)["token_ids"]) == 5
    assert files_in(tmp_path) == ["a.safetensors"]


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
    file.remove()  # it is another request's by now
    assert files_in(tmp_path) == ["a.safetensors"]
    cleanup_hidden_states(path)
    file.open()
    file.write(0, rows_and_bytes(2)[1])
    finish(file, 2)
    file.remove()
    assert os.listdir(tmp_path) == []


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def files_in(folder) -> list[str]:
    """But for locks that nobody holds, which stay for a while."""
    names = sorted(os.listdir(folder))
    for name in [name for name in names if name.endswith(".lock")]:
        with open(os.path.join(folder, name), "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        names.remove(name)
    return names


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


# ---- Paths at which there is nothing, or nothing good --------------------------


def test_a_path_where_nothing_ever_was(tmp_path):
    with pytest.raises(HiddenStatesError, match="no such file, and none is being"):
        load_hidden_states(str(tmp_path / "a.safetensors"))
    with pytest.raises(HiddenStatesError, match="no such file"):
        load_hidden_states(str(tmp_path / "no folder" / "a.safetensors"))


def die_while_writing(path: str, use_lock: bool, ready) -> None:
    file = HiddenStatesFile(path, "request", FileOptions(use_lock))
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


def test_files_of_another_version(tmp_path):
    path = tmp_path / "a.safetensors"
    write_file(path)
    known, later = (f'"hidden_states_format_version": "{n}"'.encode() for n in "12")
    data = path.read_bytes()
    assert known in data
    path.write_bytes(data.replace(known, later))
    with pytest.raises(HiddenStatesError, match="version '2'; known here: '1'"):
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
        first = HiddenStatesFile(path, "first", FileOptions(use_lock))
        first.open()
        second = HiddenStatesFile(path, "second", FileOptions(use_lock))
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
    assert files_in(tmp_path) == ["a.safetensors"]
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
    file = HiddenStatesFile(path, "request", FileOptions(use_lock=False))
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
    assert files_in(small_disk) == ["a.safetensors.error", "filler"]


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


# ---- Checksums -----------------------------------------------------------------


@pytest.mark.parametrize("algorithm", CHECKSUMS)
def test_the_checksum_is_that_of_rows_and_token_ids(tmp_path, algorithm, monkeypatch):
    monkeypatch.setattr(hidden_states_file, "CHECKSUM_BLOCK", 1000)  # several blocks
    path = tmp_path / "a.safetensors"
    rows = write_file(path, 50, checksum=algorithm)
    data = path.read_bytes()[HEADER_ROOM:]
    expected = {
        "crc32": f"{zlib.crc32(data):08x}",
        "xxh3": xxhash.xxh3_64_hexdigest(data),
    }
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["checksum"] == f"{algorithm}:{expected[algorithm]}"
    loaded = load_hidden_states(path, verify=True)
    assert torch.equal(loaded["hidden_states"], rows)
    assert loaded["token_ids"].tolist() == list(range(50))


@pytest.mark.parametrize("algorithm", CHECKSUMS)
@pytest.mark.parametrize("place", ["first row", "last row", "first id", "last id"])
def test_a_changed_byte_is_found(tmp_path, algorithm, place):
    path = tmp_path / "a.safetensors"
    rows = write_file(path, 50, checksum=algorithm)
    content = bytearray(path.read_bytes())
    first_id = HEADER_ROOM + rows.numel() * 4
    offset = {
        "first row": HEADER_ROOM,
        "last row": first_id - 1,
        "first id": first_id,
        "last id": len(content) - 1,
    }[place]
    content[offset] ^= 1
    path.write_bytes(content)
    load_hidden_states(path)  # nobody asked
    with pytest.raises(HiddenStatesError, match=f"changed.*is {algorithm}:.*, not"):
        load_hidden_states(path, verify=True)


def test_a_file_without_a_checksum_is_not_verified(tmp_path):
    path = tmp_path / "a.safetensors"
    write_file(path)
    with pytest.raises(HiddenStatesError, match="no checksum .*option `checksum`"):
        load_hidden_states(path, verify=True)


def test_a_checksum_of_an_unknown_kind(tmp_path):
    path = tmp_path / "a.safetensors"
    write_file(path, checksum="crc32")
    path.write_bytes(path.read_bytes().replace(b"crc32:", b"crc99:"))
    load_hidden_states(path)
    with pytest.raises(HiddenStatesError, match="'crc99'; valid: crc32, xxh3"):
        load_hidden_states(path, verify=True)


def test_verifying_waits_and_tells_causes_as_ever(tmp_path):
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request", FileOptions(checksum="crc32"))
    file.open()
    with pytest.raises(HiddenStatesTimeoutError):
        load_hidden_states(path, timeout=0, verify=True)
    file.fail("on fire")
    with pytest.raises(HiddenStatesError, match="on fire"):
        load_hidden_states(path, verify=True)
    with open(path, "wb") as broken:
        broken.write(b"broken")
    with pytest.raises(HiddenStatesError, match="checksum cannot be read"):
        load_hidden_states(path, verify=True)


# ---- Options of files ----------------------------------------------------------


def test_a_lock_need_not_be_kept(tmp_path):
    path = str(tmp_path / "a.safetensors")
    write_file(path, keep_lock=False)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    file = HiddenStatesFile(path, "request", FileOptions(keep_lock=False))
    file.open()
    assert os.path.exists(path + ".lock")
    file.fail("cause")
    assert os.listdir(tmp_path) == ["a.safetensors.error"]


def test_a_kept_lock_stays_but_nobody_holds_it(tmp_path):
    path = str(tmp_path / "a.safetensors")
    for _ in range(2):  # the second request takes over the lock of the first
        file = HiddenStatesFile(path, "request")
        file.open()
        with open(path + ".lock", "r+") as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rows, data = rows_and_bytes(2)
            file.write(0, data)
            finish(file, 2)
            assert sorted(os.listdir(tmp_path)) == [
                "a.safetensors",
                "a.safetensors.lock",
            ]
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever waited for it removes it then, and has to find it.
            assert os.path.samestat(os.fstat(lock.fileno()), os.stat(path + ".lock"))
        loaded = load_hidden_states(path, timeout=0)
        assert torch.equal(loaded["hidden_states"], rows)
    cleanup_hidden_states(path)
    assert os.listdir(tmp_path) == []


def test_a_kept_lock_of_a_request_that_failed(tmp_path):
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request", FileOptions(keep_lock=True))
    file.open()
    file.fail("on fire")
    assert sorted(os.listdir(tmp_path)) == [
        "a.safetensors.error",
        "a.safetensors.lock",
    ]
    with pytest.raises(HiddenStatesError, match="on fire"):
        load_hidden_states(path, timeout=0)
    cleanup_hidden_states(path)
    assert os.listdir(tmp_path) == []


def test_an_aborted_request_leaves_no_lock_either(tmp_path):
    path = str(tmp_path / "a.safetensors")
    options = FileOptions(keep_lock=True)
    for end in ("withdraw", "remove", "finish, then remove", "fail, then remove"):
        file = HiddenStatesFile(path, "request", options)
        file.open()
        if "finish" in end:
            file.write(0, rows_and_bytes(1)[1])
            finish(file, 1)
        if "fail" in end:
            file.fail("cause")
        file.withdraw() if end == "withdraw" else file.remove()
        assert os.listdir(tmp_path) == [], end
    os.symlink("elsewhere", path + ".partial")
    with pytest.raises(OSError):
        HiddenStatesFile(path, "request", options).open()
    assert os.listdir(tmp_path) == ["a.safetensors.partial"]


def mode_of(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@contextlib.contextmanager
def umask(mask: int):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o027])
@pytest.mark.parametrize(
    ("mode", "directory_mode"), [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755)]
)
def test_modes_are_those_asked_for_whatever_the_umask(
    tmp_path, mode, directory_mode, mask
):
    path = str(tmp_path / "outer" / "inner" / "a.safetensors")
    with umask(mask):
        file = HiddenStatesFile(path, "request", FileOptions(mode=mode))
        file.open()
        assert mode_of(path + ".lock") == mode_of(path + ".partial") == mode
        file.fail("cause")
        assert mode_of(path + ".error") == mode
        write_file(path, mode=mode)
        assert mode_of(path) == mode
        file.open()
        file.finish_by(lambda whole, lock_fd: open(whole, "w").close())
        assert mode_of(path) == mode
    assert mode_of(tmp_path / "outer" / "inner") == directory_mode
    assert mode_of(tmp_path / "outer") == directory_mode


def test_directories_that_were_there_keep_their_mode(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    write_file(folder / "a.safetensors", mode=0o640)
    assert mode_of(folder) == 0o755


def test_what_is_taken_over_is_not_open_to_others(tmp_path):
    """A dead writer of another mode, or anybody else, may have made them."""
    path = tmp_path / "a.safetensors"
    for suffix in (".lock", ".partial"):
        open(f"{path}{suffix}", "w").close()
        os.chmod(f"{path}{suffix}", 0o666)
    write_file(path)
    assert mode_of(path) == 0o600


def test_a_mode_that_cannot_be_set_leaves_no_descriptor(tmp_path, monkeypatch):
    def refuse(fd, mode):
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(os, "fchmod", refuse)
    before = open_descriptors()
    path = str(tmp_path / "a.safetensors")
    with umask(0o077), pytest.raises(PermissionError):
        HiddenStatesFile(path, "request", FileOptions(mode=0o644)).open()
    assert open_descriptors() == before


@pytest.fixture
def disk_events(monkeypatch):
    """What is asked of the disk, in order; a synced file with its size."""
    events: list = []
    rename, fsync = os.rename, os.fsync

    def recording_fsync(fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        status = os.fstat(fd)
        size = None if stat.S_ISDIR(status.st_mode) else status.st_size
        header = None if size is None else os.pread(fd, HEADER_ROOM, 0)
        events.append(("fsync", name, size, header))
        fsync(fd)

    def recording_rename(source: str, target: str) -> None:
        rename(source, target)
        events.append(("rename", os.path.basename(target)))

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    return events


def test_a_synced_file_is_on_the_disk_before_it_is_shown(tmp_path, disk_events):
    path = tmp_path / "folder" / "a.safetensors"
    write_file(path, fsync=True)
    content = path.read_bytes()
    assert disk_events == [
        ("fsync", "a.safetensors.partial", len(content), content[:HEADER_ROOM]),
        ("rename", "a.safetensors"),
        ("fsync", "folder", None, None),
    ]


def test_a_synced_file_of_another_writer(tmp_path, disk_events):
    path = tmp_path / "folder" / "a.safetensors"
    file = HiddenStatesFile(str(path), "request", FileOptions(fsync=True))
    file.open()

    def write(whole: str, lock_fd: int | None) -> None:
        with open(whole, "wb") as target:
            target.write(b"theirs")

    file.finish_by(write)
    assert disk_events == [
        ("fsync", "a.safetensors.whole", 6, b"theirs"),
        ("rename", "a.safetensors"),
        ("fsync", "folder", None, None),
    ]


def test_without_the_option_nothing_is_synced(tmp_path, disk_events):
    write_file(tmp_path / "a.safetensors")
    assert disk_events == [("rename", "a.safetensors")]


def finish_either_way(file: HiddenStatesFile, by_others: bool) -> None:
    if by_others:
        file.finish_by(lambda whole, lock_fd: open(whole, "w").close())
    else:
        finish(file, 1)


@pytest.mark.parametrize("by_others", [False, True], ids=["ours", "by others"])
def test_a_directory_that_cannot_be_synced(tmp_path, monkeypatch, by_others):
    """The file is not shown; finishing may be tried again, or there is an error."""
    path = str(tmp_path / "a.safetensors")
    fsync, refusals = os.fsync, 2

    def refuse_directories(fd: int) -> None:
        nonlocal refusals
        if stat.S_ISDIR(os.fstat(fd).st_mode) and refusals:
            refusals -= 1
            raise OSError(errno.EIO, "bad disk")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    for is_lost in (False, True):
        refusals = 1
        file = HiddenStatesFile(path, "request", FileOptions(fsync=True))
        file.open()
        file.write(0, rows_and_bytes(1)[1])
        with pytest.raises(OSError, match="bad disk"):
            finish_either_way(file, by_others)
        assert not os.path.exists(path)
        with pytest.raises(HiddenStatesTimeoutError):
            load_hidden_states(path, timeout=0)
        if is_lost:
            file.fail("bad disk")
            with pytest.raises(HiddenStatesError, match="bad disk"):
                load_hidden_states(path)
            assert files_in(tmp_path) == ["a.safetensors.error"]
        else:
            finish_either_way(file, by_others)
            assert files_in(tmp_path) == ["a.safetensors"]


# ---- Advice --------------------------------------------------------------------


def test_advice_goes_with_the_error_wherever_it_goes(tmp_path):
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request-7")
    file.open()
    file.fail("the disk is full", "buy another one")
    with pytest.raises(HiddenStatesError, match="is full .buy another one.") as caught:
        load_hidden_states(path)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert type(error) is HiddenStatesError
        assert (error.path, error.cause) == (path, "the disk is full")
        assert (error.request_id, error.advice) == ("request-7", "buy another one")
        assert str(error) == str(caught.value)
    timeout = HiddenStatesTimeoutError(path, "cause", None, "advice")
    assert pickle.loads(pickle.dumps(timeout)).advice == "advice"


def test_without_advice_there_is_none(tmp_path):
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request")
    file.open()
    file.fail("cause")
    with pytest.raises(HiddenStatesError, match="cause$") as caught:
        load_hidden_states(path)
    assert caught.value.advice is None


def test_failures_of_disks_come_with_advice():
    wanted = "ENOSPC EDQUOT EFBIG EMFILE ENFILE EACCES EROFS ENOENT EIO"
    for name in wanted.split():
        assert advice_about(OSError(getattr(errno, name), "failed")), name
    for number, advice in ADVICE.items():
        assert advice_about(OSError(number, "failed")) == advice
    for error in (ValueError("failed"), OSError("failed"), OSError(errno.EINTR, "")):
        assert advice_about(error) is None


@settings(max_examples=50, deadline=None)
@example(request_id="\0" * 1000, cause="\0" * 1000, advice="\0" * 5000)
@given(
    request_id=st.text(max_size=300),
    cause=st.text(min_size=1, max_size=900),
    advice=st.text(max_size=900),
)
def test_a_note_fits_its_room_whatever_it_says(
    tmp_path_factory, request_id, cause, advice
):
    """More would need space, on a disk that may be full."""
    path = str(tmp_path_factory.getbasetemp() / "note" / "a.safetensors")
    file = HiddenStatesFile(path, request_id)
    file.open()
    file.fail(cause, advice)
    assert os.path.getsize(path + ".error") == HEADER_ROOM
    with pytest.raises(HiddenStatesError) as caught:
        load_hidden_states(path)
    assert caught.value.cause and cause.startswith(caught.value.cause)


@pytest.mark.parametrize("note", ["[" * 100_000, "[]", "7", '{"cause": "x"}', ""])
def test_a_note_that_is_none(tmp_path, note):
    (tmp_path / "a.safetensors.error").write_text(note)
    with pytest.raises(HiddenStatesError, match="its error note is unreadable"):
        load_hidden_states(tmp_path / "a.safetensors")


def test_a_timeout_names_its_seconds(tmp_path):
    path = str(tmp_path / "a.safetensors")
    for use_lock in (True, False):
        file = HiddenStatesFile(path, "request", FileOptions(use_lock))
        file.open()
        with pytest.raises(HiddenStatesTimeoutError, match=r"written after 0\.02 s$"):
            load_hidden_states(path, timeout=0.02)
        file.withdraw()


# ---- Dead writers, and writers that only sleep ---------------------------------


@contextlib.contextmanager
def child_process(target, *args):
    """A forked process that has said that it is ready; killed at the end."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=target, args=(*args, ready))
    child.start()
    try:
        assert ready.wait(10)
        yield child
    finally:
        child.kill()
        child.join()


def kill(child) -> None:
    os.kill(child.pid, signal.SIGKILL)
    child.join()


@pytest.mark.parametrize("use_lock", [True, False], ids=["lock", "no lock"])
def test_the_death_of_a_writer_is_noted_for_its_readers(tmp_path, use_lock):
    path = str(tmp_path / "a.safetensors")
    with child_process(die_while_writing, path, use_lock) as writer:
        assert not note_death(path)  # it lives
        assert not os.path.exists(path + ".error")
        with pytest.raises(HiddenStatesTimeoutError):
            load_hidden_states(path, timeout=0)
        kill(writer)
    assert note_death(path)
    assert not note_death(path)
    for _ in range(2):
        with pytest.raises(HiddenStatesError, match="its writer ended") as caught:
            load_hidden_states(path)
        assert caught.value.request_id == "request"
    assert os.path.getsize(path + ".error") == HEADER_ROOM  # the rows' space is free
    assert not os.path.exists(path + ".partial")
    # The leftovers are in nobody's way.
    rows = write_file(path, use_lock=use_lock)
    assert torch.equal(load_hidden_states(path)["hidden_states"], rows)
    assert files_in(tmp_path) == ["a.safetensors"]


def test_the_death_is_noted_while_a_reader_looks(tmp_path, monkeypatch):
    """Between the reader's look at the note and that at what is left."""
    path = str(tmp_path / "a.safetensors")
    open(path + ".partial", "w").close()
    look = hidden_states_file._raise_noted_error

    def look_and_be_too_early(path: str) -> None:
        look(path)
        assert note_death(path)

    monkeypatch.setattr(hidden_states_file, "_raise_noted_error", look_and_be_too_early)
    with pytest.raises(HiddenStatesError, match="its writer ended before the file"):
        load_hidden_states(path)


def test_there_is_no_death_to_note(tmp_path):
    path = str(tmp_path / "a.safetensors")
    assert not note_death(path)
    write_file(path)
    assert not note_death(path)
    assert files_in(tmp_path) == ["a.safetensors"]


def test_a_living_writer_is_not_disturbed_by_those_who_look(tmp_path):
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request")
    file.open()
    rows, data = rows_and_bytes(3)
    file.write(0, data)
    assert not note_death(path)
    assert not remove_unheld(path + ".lock")
    assert os.path.exists(path + ".lock")
    finish(file, 3)
    assert torch.equal(load_hidden_states(path)["hidden_states"], rows)


def test_the_death_of_a_symbolic_link_is_not_noted(tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    os.symlink(target, tmp_path / "a.safetensors.partial")
    os.symlink(target, tmp_path / "a.safetensors.lock")
    with pytest.raises(OSError):
        note_death(str(tmp_path / "a.safetensors"))
    with pytest.raises(OSError):
        remove_unheld(str(tmp_path / "a.safetensors.lock"))
    assert target.read_text() == "precious"


def test_the_lock_of_a_dead_writer_is_removed(tmp_path):
    path = str(tmp_path / "a.safetensors")
    with child_process(die_while_writing, path, True) as writer:
        assert not remove_unheld(path + ".lock")
        kill(writer)
    with open(path + ".lock", "r+") as lock:  # a reader has it now
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert not remove_unheld(path + ".lock")
    assert os.path.exists(path + ".lock")
    assert remove_unheld(path + ".lock")
    assert not remove_unheld(path + ".lock")
    assert os.listdir(tmp_path) == ["a.safetensors.partial"]


def write_when_told(path: str, content: bytes, go: int, ready) -> None:
    file = HiddenStatesFile(path, "request")
    file.open()
    ready.set()
    os.read(go, 1)
    file.write(0, memoryview(content))
    finish(file, 5)


def test_a_writer_that_was_stopped_is_waited_for(tmp_path):
    path = str(tmp_path / "a.safetensors")
    rows, data = rows_and_bytes(5)
    go, tell = os.pipe()
    results: list = []
    with child_process(write_when_told, path, bytes(data), go) as writer:
        os.kill(writer.pid, signal.SIGSTOP)
        _, status = os.waitpid(writer.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        os.write(tell, b"1")
        with pytest.raises(HiddenStatesTimeoutError, match="after 0.2 s"):
            load_hidden_states(path, timeout=0.2)
        assert not note_death(path)
        assert not remove_unheld(path + ".lock")
        reader = threading.Thread(
            target=lambda: results.append(load_hidden_states(path)), daemon=True
        )
        reader.start()
        os.kill(writer.pid, signal.SIGCONT)
        reader.join(10)
    os.close(go)
    os.close(tell)
    assert torch.equal(results[0]["hidden_states"], rows)


def write_beyond_the_limit(folder: str, told, ready) -> None:
    ready.set()
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))
    path = f"{folder}/a.safetensors"
    file = HiddenStatesFile(path, "request")
    try:
        file.open(num_bytes=100_000)
    except OSError as error:
        told.send((error.errno, advice_about(error), os.listdir(folder)))
    file.open()  # of a request whose rows nobody can count
    try:
        for index in range(10):
            file.write(index * 10_000, memoryview(bytes(10_000)))
    except OSError as error:
        told.send((error.errno, advice_about(error), os.listdir(folder)))
        file.fail(f"cannot write the file: {error}", advice_about(error))
    told.send(files_in(folder))


def test_a_limit_of_file_sizes(tmp_path):
    """It shows before the first row is computed, where their number is known."""
    here, there = multiprocessing.get_context("fork").Pipe()
    with child_process(write_beyond_the_limit, str(tmp_path), there):
        for files in ([], ["a.safetensors.lock", "a.safetensors.partial"]):
            assert here.poll(10)
            number, advice, found = here.recv()
            assert number == errno.EFBIG
            assert "ulimit -f" in advice
            assert sorted(found) == files
        assert here.poll(10)
        assert here.recv() == ["a.safetensors.error"]
    with pytest.raises(HiddenStatesError, match="File too large.*ulimit -f"):
        load_hidden_states(tmp_path / "a.safetensors")


# ---- Files that somebody has spoilt --------------------------------------------


class Good:
    """A good file, to be spoilt."""

    rows, data = rows_and_bytes(5)
    content = b""

    @classmethod
    def make(cls, folder) -> bytes:
        if not cls.content:
            path = str(folder / "good.safetensors")
            file = HiddenStatesFile(path, "request", FileOptions(checksum="crc32"))
            file.open()
            file.write(0, cls.data)
            finish(file, 5)
            with open(path, "rb") as whole:
                cls.content = whole.read()
            os.unlink(path)
        return cls.content


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """Writes content to a path, and gives the path and the good content."""
    folder = tmp_path_factory.mktemp("spoilt")
    return folder / "a.safetensors", Good.make(folder)


def is_right_or_an_error(path, content: bytes, verify: bool) -> bool:
    """Whether it is right; fails where it is neither."""
    path.write_bytes(content)
    try:
        loaded = load_hidden_states(path, verify=verify)
    except HiddenStatesError:
        return False
    assert loaded.keys() == {"hidden_states", "token_ids"}
    assert loaded["hidden_states"].dtype == torch.float32
    assert loaded["token_ids"].dtype == torch.int64
    assert torch.equal(loaded["hidden_states"], Good.rows)
    assert loaded["token_ids"].tolist() == list(range(5))
    return True


@settings(max_examples=100, deadline=None)
@given(data=st.data(), verify=st.booleans())
def test_a_file_cut_anywhere_is_an_error(spoilt, data, verify):
    path, good = spoilt
    size = data.draw(st.integers(0, len(good) - 1))
    assert is_right_or_an_error(path, good, verify)
    assert not is_right_or_an_error(path, good[:size], verify)
    assert not is_right_or_an_error(path, good + bytes(1 + size), verify)


@settings(max_examples=100, deadline=None)
@example(length=2**64 - 1, verify=False)
@example(length=100_000_001, verify=False)
@example(length=HEADER_ROOM - 9, verify=False)
@example(length=0, verify=True)
@given(length=st.integers(0, 2**64 - 1), verify=st.booleans())
def test_a_header_length_that_is_wrong_is_an_error(spoilt, length, verify):
    path, good = spoilt
    is_same = length == HEADER_ROOM - 8
    content = length.to_bytes(8, "little") + good[8:]
    assert is_right_or_an_error(path, content, verify) == is_same


def with_header(good: bytes, change) -> bytes:
    header = json.loads(good[8:HEADER_ROOM])
    change(header)
    text = json.dumps(header).encode().ljust(HEADER_ROOM - 8)
    return good[:8] + text + good[HEADER_ROOM:]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), verify=st.booleans())
def test_data_offsets_that_overlap_or_leave_the_file_are_an_error(spoilt, data, verify):
    path, good = spoilt
    rows_end, size = 5 * L * H * 4, 5 * L * H * 4 + 5 * 8
    edges = [0, 1, 40, rows_end - 8, rows_end, rows_end + 8, size, size + 8, 2**63]
    edge = st.sampled_from([*edges, -1, 2**64])
    offsets = data.draw(st.tuples(edge, edge, edge, edge))
    tilings = ((0, rows_end, rows_end, size), (40, size, 0, 40))
    if offsets in tilings:  # the second one is right, of a file with another layout
        return

    def change(header) -> None:
        header["hidden_states"]["data_offsets"] = list(offsets[:2])
        header["token_ids"]["data_offsets"] = list(offsets[2:])

    assert not is_right_or_an_error(path, with_header(good, change), verify)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("hidden_states", "I32", [5, 3, 8]),
        ("hidden_states", "U32", [5, 3, 8]),
        ("hidden_states", "F32", [5, 24]),
        ("hidden_states", "F32", [120]),
        ("hidden_states", "F32", [5, 3, 8, 1]),
        ("hidden_states", "F32", [6, 4, 5]),
        ("hidden_states", "F32", [2**62, 2**62, 8]),
        ("token_ids", "F64", [5]),
        ("token_ids", "U64", [5]),
        ("token_ids", "I32", [10]),
        ("token_ids", "I64", [5, 1]),
    ],
)
def test_tensors_of_another_kind_are_an_error(spoilt, name, dtype, shape):
    path, good = spoilt

    def change(header) -> None:
        header[name] |= {"dtype": dtype, "shape": shape}

    assert not is_right_or_an_error(path, with_header(good, change), False)


def test_a_tensor_without_dimensions_is_an_error(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    for tensors in (
        {"hidden_states": torch.zeros(()), "token_ids": torch.zeros(1).long()},
        {"hidden_states": torch.zeros(1, L, H), "token_ids": torch.tensor(1)},
    ):
        save_file(tensors, path)
        with pytest.raises(HiddenStatesError, match=r"\[\] of torch"):
            load_hidden_states(path)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), mask=st.integers(1, 255), verify=st.booleans())
def test_a_header_with_a_changed_byte_is_right_or_an_error(spoilt, data, mask, verify):
    path, good = spoilt
    used = len(good[:HEADER_ROOM].rstrip())
    content = bytearray(good)
    content[data.draw(st.integers(0, used))] ^= mask
    is_right_or_an_error(path, bytes(content), verify)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), noise=st.binary(min_size=1, max_size=60), verify=st.booleans())
def test_a_header_with_noise_is_right_or_an_error(spoilt, data, noise, verify):
    path, good = spoilt
    used = len(good[:HEADER_ROOM].rstrip())
    start = data.draw(st.integers(0, used))
    content = good[:start] + noise + good[start + len(noise) :]
    is_right_or_an_error(path, content, verify)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_changed_rows_never_pass_the_checksum(spoilt, data):
    path, good = spoilt
    content = bytearray(good)
    offsets = st.integers(HEADER_ROOM, len(good) - 1)
    masks = st.integers(1, 255)
    for offset, mask in data.draw(
        st.dictionaries(offsets, masks, min_size=1, max_size=20)
    ).items():
        content[offset] ^= mask
    assert not is_right_or_an_error(path, bytes(content), verify=True)


@pytest.mark.parametrize("suffix", ["", ".lock", ".partial", ".error"])
def test_a_directory_is_no_file(tmp_path, suffix):
    path = tmp_path / "a.safetensors"
    os.mkdir(f"{path}{suffix}")
    with pytest.raises(HiddenStatesError) as caught:
        load_hidden_states(path)
    if suffix == "":
        assert "it is a directory; give the path of one file" in str(caught.value)
        with pytest.raises(HiddenStatesError, match="it is a directory; give the path"):
            load_hidden_states(path, verify=True)
        with pytest.raises(HiddenStatesError, match="it is a directory; give the path"):
            cleanup_hidden_states(path)
    assert os.path.isdir(f"{path}{suffix}")


def test_what_is_one_of_our_files(tmp_path):
    from safetensors.torch import save_file

    ours = tmp_path / "a.safetensors"
    write_file(ours)
    assert is_hidden_states_file(str(ours))
    foreign = tmp_path / "b.safetensors"
    save_file({"hidden_states": torch.zeros(3)}, foreign)
    link = tmp_path / "c.safetensors"
    os.symlink(ours, link)
    pipe = tmp_path / "d.safetensors"
    os.mkfifo(pipe)  # to open it must not wait for a writer
    short = tmp_path / "e.safetensors"
    short.touch()
    for path in (foreign, link, pipe, short, tmp_path, tmp_path / "nothing"):
        assert not is_hidden_states_file(str(path)), path


# ---- What closing tells, and what is no file ------------------------------------


@pytest.fixture
def failing_close(monkeypatch):
    """``os.close`` that closes, and then fails, from the n-th call of a file on."""
    close = os.close
    state = {"from": None, "calls": 0}

    def fail(fd: int) -> None:
        close(fd)
        state["calls"] += 1
        if state["from"] is not None and state["calls"] > state["from"]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(hidden_states_file.os, "close", fail)
    yield state
    state["from"] = None


@pytest.mark.parametrize("keep_lock", [True, False])
def test_a_file_that_is_shown_stays_whole_whatever_closing_says(
    tmp_path, failing_close, keep_lock
):
    """Its readers may have it mapped: it is never cut again."""
    path = str(tmp_path / "a.safetensors")
    before = open_descriptors()
    file = HiddenStatesFile(path, "request", FileOptions(keep_lock=keep_lock))
    rows, data = rows_and_bytes(5)
    file.open()
    file.write(0, data)
    # The first one is before the file is shown.
    failing_close |= {"calls": 0, "from": 1}
    finish(file, 5)
    failing_close["from"] = None
    assert not file.is_open
    assert open_descriptors() == before
    assert torch.equal(load_hidden_states(path, timeout=5)["hidden_states"], rows)


def test_a_write_that_is_lost_when_a_descriptor_is_closed(tmp_path, failing_close):
    """As on NFS: it is told before anybody can read the file."""
    path = str(tmp_path / "a.safetensors")
    before = open_descriptors()
    file = HiddenStatesFile(path, "request")
    file.open()
    file.write(0, rows_and_bytes(5)[1])
    failing_close |= {"calls": 0, "from": 0}
    with pytest.raises(OSError, match="Input/output error"):
        finish(file, 5)
    assert not os.path.exists(path)
    file.fail("the disk is ill")
    failing_close["from"] = None
    assert open_descriptors() == before
    with pytest.raises(HiddenStatesError, match="the disk is ill"):
        load_hidden_states(path, timeout=5)


@pytest.mark.parametrize("suffix", ["", ".lock", ".partial", ".error"])
@pytest.mark.parametrize("verify", [False, True])
def test_a_reader_does_not_hang_at_a_pipe(tmp_path, suffix, verify):
    path = tmp_path / "a.safetensors"
    os.mkfifo(f"{path}{suffix}")
    for timeout in (None, 1):
        with pytest.raises(HiddenStatesError, match="no regular file"):
            load_hidden_states(path, timeout, verify=verify)
    if suffix:
        os.unlink(f"{path}{suffix}")
        rows = write_file(path, checksum="crc32")
        (tmp_path / "a.safetensors.lock").unlink()
        os.mkfifo(f"{path}{suffix}")
        if suffix == ".error":
            assert torch.equal(load_hidden_states(path, 5)["hidden_states"], rows)


def test_who_looks_after_files_does_not_hang_at_a_pipe(tmp_path):
    path = str(tmp_path / "a.safetensors")
    for suffix in ("", ".lock", ".partial", ".error"):
        os.mkfifo(f"{path}{suffix}")
    assert not note_death(path)
    assert not remove_unheld(f"{path}.lock")
    assert not is_hidden_states_file(path)
    assert not hidden_states_file.is_note(f"{path}.error")
    cleanup_hidden_states(path, keep_hidden_states=True)
    assert os.path.lexists(f"{path}.partial")


@pytest.mark.parametrize("suffix", [".lock", ".partial"])
def test_a_writer_leaves_a_pipe_where_it_is(tmp_path, suffix):
    path = tmp_path / "a.safetensors"
    os.mkfifo(f"{path}{suffix}")
    before = open_descriptors()
    with pytest.raises(FileExistsError, match="and not ours"):
        HiddenStatesFile(str(path), "request").open()
    assert stat.S_ISFIFO(os.stat(f"{path}{suffix}").st_mode)
    assert open_descriptors() == before


def test_an_aborted_request_takes_its_directories_along(tmp_path):
    (tmp_path / "old").mkdir()
    path = tmp_path / "old" / "new" / "newer" / "a.safetensors"
    file = HiddenStatesFile(str(path), "request")
    file.open()
    assert path.parent.is_dir()
    file.remove()
    assert os.listdir(tmp_path / "old") == []
    # But not one that somebody else has come to use.
    file = HiddenStatesFile(str(path), "request")
    file.open()
    write_file(path.with_name("b.safetensors"), keep_lock=False)
    file.remove()
    assert os.listdir(path.parent) == ["b.safetensors"]


def test_a_directory_that_an_aborted_request_takes_along(tmp_path, monkeypatch):
    """It was there when another request looked, and is made again."""
    path = tmp_path / "new" / "a.safetensors"
    file = HiddenStatesFile(str(path), "request")
    make, calls = file._make_directory, []

    def make_and_lose() -> None:
        make()
        calls.append(1)
        if len(calls) == 1:
            path.parent.rmdir()

    monkeypatch.setattr(file, "_make_directory", make_and_lose)
    file.open()
    assert file.is_open and len(calls) == 2
    file.remove()


def test_a_directory_that_goes_between_the_guards(tmp_path, monkeypatch):
    """With the lock in it: readers of other projects want one."""
    path = tmp_path / "new" / "a.safetensors"
    file = HiddenStatesFile(str(path), "request")
    create, calls = hidden_states_file._create_and_lock, []

    def lose_and_create(name: str, mode: int) -> int:
        calls.append(name)
        if len(calls) == 3:  # no directory, then the lock, then this
            shutil.rmtree(path.parent)
        return create(name, mode)

    monkeypatch.setattr(hidden_states_file, "_create_and_lock", lose_and_create)
    before = len(os.listdir("/proc/self/fd"))
    file.open()
    assert [name.rpartition(".")[2] for name in calls] == [
        "lock",
        "lock",
        "partial",
        "lock",
        "partial",
    ]
    with open(f"{path}.lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    file.withdraw()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_is_replaced_while_it_is_read(tmp_path, monkeypatch, verify):
    """By one of another length: the one or the other is read, not a part of each."""
    path = str(tmp_path / "a.safetensors")
    rows = write_file(path, 30, checksum="crc32")
    other = str(tmp_path / "b.safetensors")
    write_file(other, 60, checksum="crc32")
    opened = hidden_states_file._open_file

    def open_and_be_late(name, *arguments):
        fd = opened(name, *arguments)
        if name == path:
            os.replace(other, path)
        return fd

    monkeypatch.setattr(hidden_states_file, "_open_file", open_and_be_late)
    loaded = load_hidden_states(path, verify=verify)
    assert torch.equal(loaded["hidden_states"], rows)
    assert loaded["token_ids"].tolist() == list(range(30))
    assert not os.path.exists(other)


def replace_again_and_again(paths, target, is_over) -> None:
    while not is_over.is_set():
        for path in paths:
            os.link(path, target + ".new")
            os.replace(target + ".new", target)


def test_files_that_are_replaced_all_the_time(tmp_path):
    known, paths = {}, []
    for length in (3, 50, 700):
        paths.append(str(tmp_path / f"{length}.safetensors"))
        known[length] = write_file(paths[-1], length, checksum="xxh3")
    path = str(tmp_path / "a.safetensors")
    write_file(path, 3, checksum="xxh3")
    is_over = threading.Event()
    replacing = threading.Thread(
        target=replace_again_and_again, args=(paths, path, is_over)
    )
    replacing.start()
    seen = set()
    deadline = time.monotonic() + 20
    try:
        while len(seen) < 3 and time.monotonic() < deadline:
            for verify in (False, True):
                loaded = load_hidden_states(path, verify=verify)
                length = len(loaded["token_ids"])
                if length != 3 or seen:  # the first one is not of the three
                    seen.add(length)
                    assert loaded["token_ids"].tolist() == list(range(length))
                if length != 3:
                    assert torch.equal(loaded["hidden_states"], known[length])
    finally:
        is_over.set()
        replacing.join()
    assert seen == {3, 50, 700}


def test_what_was_read_is_the_readers_own(tmp_path):
    """Whatever becomes of the file: mapped memory would end the process, or change."""
    path = str(tmp_path / "a.safetensors")
    rows = write_file(path, 5000)
    loaded = load_hidden_states(path)
    with open(path, "r+b") as file:
        file.seek(HEADER_ROOM)
        file.write(bytes(100))
    os.truncate(path, 0)
    assert torch.equal(loaded["hidden_states"], rows)
    loaded["hidden_states"].zero_()  # and may be changed


@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_the_disk_cannot_read(tmp_path, verify):
    """A regular file of the kernel's, whose first page no read can have."""
    path = tmp_path / "a.safetensors"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(HiddenStatesError, match="cannot be read: .*Input/output") as e:
        load_hidden_states(path, verify=verify)
    assert e.value.advice == ADVICE[errno.EIO]
    assert isinstance(e.value.__cause__, OSError)


def test_a_note_whose_file_cannot_be_renamed_is_found(tmp_path, monkeypatch):
    """As in a directory that has been made immutable."""
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request")
    file.open()

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        patched.setattr(os, "unlink", refuse)
        with pytest.raises(PermissionError):
            file.fail("no space", "make some")
    for is_noted in (False, True):
        assert os.path.exists(path + ".partial") != is_noted
        with pytest.raises(HiddenStatesError, match="no space") as caught:
            load_hidden_states(path)
        assert (caught.value.request_id, caught.value.advice) == (
            "request",
            "make some",
        )
        # Who sweeps does not know better.
        assert note_death(path) != is_noted


def test_what_cannot_be_removed_is_said(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(HiddenStatesError, match="cannot be removed: .*null"):
        cleanup_hidden_states("a\0b")
    with pytest.raises(HiddenStatesError, match="cannot be removed: .*too long"):
        cleanup_hidden_states(str(tmp_path / ("a" * 300)))
    os.mkdir(f"{path}.error")
    with pytest.raises(HiddenStatesError, match="cannot be removed: .*directory"):
        cleanup_hidden_states(path)
    os.rmdir(f"{path}.error")
    path.touch()
    cleanup_hidden_states(path / "b.safetensors")  # is not there
    assert path.exists()


def test_a_note_beside_a_directory_is_told(tmp_path):
    path = tmp_path / "a.safetensors"
    file = HiddenStatesFile(str(path), "request")
    file.open()
    path.mkdir()
    file.fail("a directory came")
    with pytest.raises(HiddenStatesError, match="a directory came"):
        load_hidden_states(path)


def test_files_that_clients_named_are_known(tmp_path):
    path = str(tmp_path / "a.safetensors")
    assert not is_anothers(path)
    for is_chosen in (True, False):
        for end in ("complete", "failed", "dead", "live"):
            file = HiddenStatesFile(path, "request", is_chosen=is_chosen)
            file.open()
            assert is_anothers(path) != is_chosen
            if end == "complete":
                file.write(0, rows_and_bytes(5)[1])
                finish(file, 5)
            elif end == "failed":
                file.fail("cause")
            elif end == "dead":
                file._close(keep_lock=False)
                assert note_death(path)
            assert is_anothers(path) != is_chosen
            file.withdraw()
            cleanup_hidden_states(path)
            assert files_in(tmp_path) == []
    for suffix in ("", ".partial", ".error"):
        for make in (os.mkdir, os.mkfifo):
            make(path + suffix)
            assert is_anothers(path)
            os.rmdir(path + suffix) if make is os.mkdir else os.unlink(path + suffix)


def test_directories_are_made_with_one_mode(tmp_path):
    """An engine's own storage path, too: whoever may read its files can reach them."""
    folders = [tmp_path / "a", tmp_path / "a" / "b"]
    old = os.umask(0o077)
    try:
        made = list(make_directories(str(folders[-1]), 0o755))
    finally:
        os.umask(old)
    assert made == [str(folder) for folder in folders]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o755, 0o755]
    assert list(make_directories(str(folders[-1]), 0o700)) == []
    assert folders[-1].stat().st_mode & 0o777 == 0o755  # it was there


def test_a_long_file_is_no_note(tmp_path):
    """Whatever its first page says: it is somebody's, and nobody removes it."""
    path = str(tmp_path / "a.safetensors")
    file = HiddenStatesFile(path, "request")
    file.open()
    file.fail("cause")
    assert is_note(path + ".error")
    with open(path + ".error", "ab") as note:
        note.write(b"more")
    assert not is_note(path + ".error")
