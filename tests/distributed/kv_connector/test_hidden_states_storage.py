# SPDX-License-Identifier: Apache-2.0
"""The keeper of a directory: leftovers go, what lives stays, and bounds hold."""

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vllm.distributed.kv_transfer.kv_connector.v1 import hidden_states_storage
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_file import (
    HEADER_ROOM,
    FileOptions,
    HiddenStatesError,
    HiddenStatesFile,
    HiddenStatesTimeoutError,
    load_hidden_states,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_storage import (
    LOCK_LINGER,
    MAX_NOTE_AGE,
    StorageKeeper,
)

L, H = 2, 4
ROW_BYTES = L * H * 4


def write_file(path, num_tokens: int = 5, **options) -> int:
    """A complete file; how large it is."""
    options = {"keep_lock": False} | options
    file = HiddenStatesFile(str(path), "request", FileOptions(**options))
    file.open()
    finish(file, num_tokens)
    return os.path.getsize(path)


def finish(file: HiddenStatesFile, num_tokens: int = 5) -> None:
    file.write(0, memoryview(bytes(num_tokens * ROW_BYTES)))
    file.finish(np.arange(num_tokens), L, H, torch.float32, {})


def leave_note(path) -> None:
    file = HiddenStatesFile(str(path), "request", FileOptions(keep_lock=False))
    file.open()
    file.fail("on fire")


def make_old(path, seconds: float = 10 * LOCK_LINGER) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)


def make_all_old(folder, seconds: float = 10 * LOCK_LINGER) -> None:
    for name in os.listdir(folder):
        make_old(os.path.join(folder, name), seconds)


def sweep(*roots, **options) -> StorageKeeper:
    keeper = StorageKeeper([str(root) for root in roots], **options)
    keeper.sweep()
    return keeper


def taken(*roots, **options) -> int:
    """Of a bound, by what is in the directories."""
    keeper = sweep(*roots, max_stored_bytes=10**9, **options)
    return num_taken(keeper)


def num_taken(keeper: StorageKeeper) -> int:
    """How much of a bound is taken, as those hear who want all of it."""
    assert keeper.max_stored_bytes is not None
    refusal = keeper.cannot_hold(keeper.max_stored_bytes)
    return 0 if refusal is None else int(refusal.split(" and ")[1].split(" of ")[0])


def hold_files(folder: str, go: int, ready) -> None:
    """A writer of several kinds of file, in the midst of its work."""
    streamed = HiddenStatesFile(f"{folder}/streamed.safetensors", "streamed")
    streamed.open(5 * ROW_BYTES)
    unlocked = HiddenStatesFile(
        f"{folder}/unlocked.safetensors", "unlocked", FileOptions(use_lock=False)
    )
    unlocked.open()
    whole = HiddenStatesFile(f"{folder}/whole.safetensors", "whole")
    whole.open()

    def write(path: str, lock_fd: int | None) -> None:
        with open(path, "w") as file:
            file.write("half")
        ready.set()
        os.read(go, 1)
        save_file({"hidden_states": torch.zeros(5, L, H)}, path)

    whole.finish_by(write)
    finish(streamed)
    finish(unlocked)


@contextlib.contextmanager
def another_server(folder):
    """A process that shares the directory, with what tells it to go on."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    go, tell = os.pipe()
    server = context.Process(target=hold_files, args=(str(folder), go, ready))
    server.start()
    try:
        assert ready.wait(10)
        yield server, tell
    finally:
        server.kill()
        server.join()
        os.close(go)
        os.close(tell)


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


HELD = [
    "streamed.safetensors.lock",
    "streamed.safetensors.partial",
    "unlocked.safetensors.partial",
    "whole.safetensors.lock",
    "whole.safetensors.partial",
    "whole.safetensors.whole",
]


# ---- Leftovers -----------------------------------------------------------------


def test_what_a_dead_server_left_becomes_notes(tmp_path):
    with another_server(tmp_path) as (server, _):
        server.kill()
        server.join()
    assert sorted(os.listdir(tmp_path)) == HELD
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == HELD  # it may be just about to lock them
    make_all_old(tmp_path, LOCK_LINGER / 2)  # the locks of the dead go with them
    for _ in range(2):  # what stands beside a note goes with the second look
        sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [
        "streamed.safetensors.error",
        "unlocked.safetensors.error",
        "whole.safetensors.error",
    ]
    for name in ("streamed", "unlocked", "whole"):
        with pytest.raises(HiddenStatesError, match="its writer ended before the file"):
            load_hidden_states(tmp_path / f"{name}.safetensors")


def test_what_a_living_server_writes_is_left_alone(tmp_path):
    with another_server(tmp_path) as (server, tell):
        make_all_old(tmp_path)
        keeper = StorageKeeper([str(tmp_path)], max_age_s=1, max_stored_bytes=1)
        for _ in range(2):
            keeper.sweep()
        assert sorted(os.listdir(tmp_path)) == HELD
        with pytest.raises(HiddenStatesTimeoutError):
            load_hidden_states(tmp_path / "streamed.safetensors", timeout=0)
        os.write(tell, b"1")
        server.join(10)
        assert server.exitcode == 0
    for name in ("streamed", "unlocked"):
        loaded = load_hidden_states(tmp_path / f"{name}.safetensors")
        assert loaded["token_ids"].tolist() == list(range(5))
    assert (tmp_path / "whole.safetensors").exists()


def test_the_dead_and_the_living_in_one_directory(tmp_path):
    """A sweeper of one server, while another writes: each file by its own lock."""
    (tmp_path / "dead").mkdir()
    (tmp_path / "living").mkdir()
    with another_server(tmp_path / "living"):
        with another_server(tmp_path / "dead"):
            pass
        for name in ("dead", "living"):
            make_all_old(tmp_path / name)
        keeper = StorageKeeper([str(tmp_path)], is_deep=True)
        for _ in range(2):
            keeper.sweep()
        assert sorted(os.listdir(tmp_path / "living")) == HELD
        names = os.listdir(tmp_path / "dead")
        assert len(names) == 3 and all(name.endswith(".error") for name in names)


def test_a_lock_that_a_reader_holds_stays(tmp_path):
    path = tmp_path / "a.safetensors.lock"
    path.touch()
    make_old(path)
    with open(path, "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep(tmp_path)
        assert path.exists()
    sweep(tmp_path)
    assert not path.exists()


@pytest.mark.parametrize("keep_locks", [True, False])
def test_locks_of_complete_files_stay_if_asked_for(tmp_path, keep_locks):
    write_file(tmp_path / "a.safetensors", keep_lock=True)
    (tmp_path / "gone.safetensors.lock").touch()
    before = sorted(os.listdir(tmp_path))
    make_all_old(tmp_path, LOCK_LINGER / 2)
    sweep(tmp_path, keep_locks=keep_locks)
    assert sorted(os.listdir(tmp_path)) == before  # some reader may want to remove it
    make_all_old(tmp_path)
    sweep(tmp_path, keep_locks=keep_locks)
    kept = ["a.safetensors", "a.safetensors.lock"]
    assert sorted(os.listdir(tmp_path)) == (kept if keep_locks else kept[:1])


def test_a_lock_stays_for_its_time_from_the_end_on(tmp_path):
    """However long its file took to be written."""
    path = tmp_path / "a.safetensors"
    file = HiddenStatesFile(str(path), "request")
    file.open()
    make_all_old(tmp_path)
    finish(file)
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "a.safetensors.lock"]
    make_old(f"{path}.lock")
    sweep(tmp_path)
    assert os.listdir(tmp_path) == ["a.safetensors"]


# ---- Ages ----------------------------------------------------------------------


def test_notes_go_when_nobody_has_asked_for_a_day(tmp_path):
    for name, age in (("old", MAX_NOTE_AGE + 60), ("new", MAX_NOTE_AGE - 60)):
        leave_note(tmp_path / f"{name}.safetensors")
        make_old(tmp_path / f"{name}.safetensors.error", age)
    sweep(tmp_path)
    assert os.listdir(tmp_path) == ["new.safetensors.error"]


@pytest.mark.parametrize("max_age_s", [None, 100.0])
def test_files_go_when_they_have_aged_if_asked_for(tmp_path, max_age_s):
    for name, age in (("old", 160), ("new", 40)):
        write_file(tmp_path / f"{name}.safetensors", keep_lock=True)
        for suffix in ("", ".lock"):
            make_old(tmp_path / f"{name}.safetensors{suffix}", age)
    for _ in range(2):
        sweep(tmp_path, max_age_s=max_age_s, keep_locks=True)
    new = ["new.safetensors", "new.safetensors.lock"]
    old = ["old.safetensors", "old.safetensors.lock"]
    assert sorted(os.listdir(tmp_path)) == (new if max_age_s else new + old)


def test_what_is_not_ours_stays_whatever_its_age(tmp_path):
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "broken.safetensors").write_text("no safetensors file")
    for name in (
        "notes.txt",
        "notes.txt.error",
        "notes.txt.lock",
        "notes.txt.partial",
        "data.partial",
        "data.bin.whole",
        "a.safetensors.bak",
        "a.safetensors.error.txt",
        ".safetensors",
        "safetensors.lock",
    ):
        (tmp_path / name).write_text("precious")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "b.safetensors.lock").mkdir()
    make_all_old(tmp_path, 10 * MAX_NOTE_AGE)
    before = sorted(os.listdir(tmp_path))
    for _ in range(2):
        sweep(tmp_path, max_age_s=1, max_stored_bytes=1, is_deep=True)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "a.safetensors.bak").read_text() == "precious"


def test_files_of_other_users_stay_and_do_not_count(tmp_path, monkeypatch):
    write_file(tmp_path / "a.safetensors")
    make_all_old(tmp_path)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert taken(tmp_path, max_age_s=1) == 0
    assert os.listdir(tmp_path) == ["a.safetensors"]
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert taken(tmp_path, max_age_s=1) == 0
    assert os.listdir(tmp_path) == []


def test_symbolic_links_are_not_followed(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    write_file(outside / "a.safetensors")
    leave_note(outside / "b.safetensors")
    (outside / "c.safetensors.partial").touch()
    (outside / "c.safetensors.lock").touch()
    make_all_old(outside, 10 * MAX_NOTE_AGE)
    before = sorted(os.listdir(outside))
    for name in before:
        os.symlink(outside / name, root / name)
    os.symlink(outside, root / "link")
    make_all_old(root, 10 * MAX_NOTE_AGE)
    assert taken(root, max_age_s=1, is_deep=True) == 0
    assert sorted(os.listdir(outside)) == before
    assert sorted(os.listdir(root)) == sorted([*before, "link"])


@pytest.mark.parametrize("is_deep", [True, False])
def test_directories_below_are_looked_at_if_asked_for(tmp_path, is_deep):
    deep = tmp_path / "deep" / "er"
    size = write_file(tmp_path / "a.safetensors")
    size_of_deep = write_file(deep / "a.safetensors", 50)
    assert taken(tmp_path, is_deep=is_deep) == size + size_of_deep * is_deep
    make_old(deep / "a.safetensors", 100)
    sweep(tmp_path, is_deep=is_deep, max_age_s=50)
    assert (deep / "a.safetensors").exists() != is_deep


def test_a_directory_that_is_not_there(tmp_path):
    root = tmp_path / "root"
    keeper = StorageKeeper([str(root)], max_stored_bytes=100_000)
    keeper.sweep()
    root.mkdir()
    size = write_file(root / "a.safetensors")
    keeper.sweep()
    assert num_taken(keeper) == size
    shutil.rmtree(root)
    keeper.sweep()
    assert num_taken(keeper) == 0


def test_files_that_vanish_while_they_are_looked_at(tmp_path, monkeypatch):
    """Other servers' keepers, and readers, remove files at any time."""
    names = [f"{name}.safetensors" for name in "abc"]
    for name in names:
        write_file(tmp_path / name)
        (tmp_path / f"{name}.lock").touch()
    make_all_old(tmp_path)
    lstat, unlink = os.lstat, os.unlink

    def lstat_of_what_is_gone(path):
        if str(path).endswith("b.safetensors"):
            unlink(path)
        return lstat(path)

    def unlink_what_is_gone(path):
        unlink(path)
        unlink(path)  # as if another one had been there first

    monkeypatch.setattr(os, "lstat", lstat_of_what_is_gone)
    monkeypatch.setattr(os, "unlink", unlink_what_is_gone)
    sweep(tmp_path, max_age_s=1)
    assert os.listdir(tmp_path) == []


# ---- Bounds --------------------------------------------------------------------


def test_without_a_bound_everything_fits(tmp_path):
    keeper = sweep(tmp_path)
    keeper.reserve("/a.safetensors", 10**15)
    assert keeper.cannot_hold(10**18) is None
    keeper.settle("/a.safetensors")


def test_the_bound_is_what_it_says(tmp_path):
    size = write_file(tmp_path / "a.safetensors")
    bound = size + 1000
    keeper = sweep(tmp_path, max_stored_bytes=bound)
    assert keeper.cannot_hold(1000) is None
    refusal = keeper.cannot_hold(1001)
    assert refusal is not None
    assert "take 1001 bytes" in refusal
    assert f"{size} of max_stored_bytes {bound} are taken" in refusal
    assert "try again when files have been read and removed" in refusal
    os.unlink(tmp_path / "a.safetensors")
    keeper.sweep()
    assert keeper.cannot_hold(1001) is None
    assert keeper.cannot_hold(bound) is None
    refusal = keeper.cannot_hold(bound + 1)
    assert refusal is not None and "it never fits" in refusal
    assert "try again" not in refusal


def test_what_is_reserved_is_taken(tmp_path):
    keeper = sweep(tmp_path, max_stored_bytes=1000)
    keeper.reserve(str(tmp_path / "a.safetensors"), 600)
    assert keeper.cannot_hold(400) is None
    assert keeper.cannot_hold(401) is not None
    keeper.reserve(str(tmp_path / "b.safetensors"), 400)
    assert keeper.cannot_hold(1) is not None
    for _ in range(2):
        keeper.sweep()  # they have not come yet, and are waited for
    assert num_taken(keeper) == 1000


def test_a_file_is_not_counted_beside_its_reservation(tmp_path):
    path = str(tmp_path / "a.safetensors")
    keeper = sweep(tmp_path, max_stored_bytes=100_000)
    keeper.reserve(path, 50_000)
    file = HiddenStatesFile(path, "request")
    file.open(5 * ROW_BYTES)
    keeper.sweep()
    assert num_taken(keeper) == 50_000
    keeper.settle(path)
    keeper.sweep()
    assert num_taken(keeper) == 50_000  # it is being written still
    finish(file)
    keeper.sweep()
    assert num_taken(keeper) == os.path.getsize(path)
    os.unlink(path)
    keeper.sweep()
    assert num_taken(keeper) == 0


def test_a_request_that_left_no_file_takes_nothing(tmp_path):
    path = str(tmp_path / "a.safetensors")
    keeper = sweep(tmp_path, max_stored_bytes=100_000)
    keeper.reserve(path, 50_000)
    keeper.settle(path)
    assert num_taken(keeper) == 50_000  # until somebody has looked
    keeper.sweep()
    assert num_taken(keeper) == 0
    keeper.settle(path)  # of an end that is told twice
    keeper.settle("/nothing/a.safetensors")


def test_a_request_that_ends_during_a_look_counts_until_the_next(tmp_path, monkeypatch):
    """That look may have passed by before its file was there."""
    path = str(tmp_path / "a.safetensors")
    keeper = sweep(tmp_path, max_stored_bytes=100_000)
    keeper.reserve(path, 50_000)
    look = keeper._files

    def look_and_be_too_early():
        yield from look()
        write_file(path)
        keeper.settle(path)

    monkeypatch.setattr(keeper, "_files", look_and_be_too_early)
    keeper.sweep()
    assert num_taken(keeper) == 50_000
    monkeypatch.undo()
    keeper.sweep()
    assert num_taken(keeper) == os.path.getsize(path)


def test_what_others_write_counts_at_its_final_size(tmp_path):
    with another_server(tmp_path):
        notes = 3 * HEADER_ROOM  # unlocked and whole have said nothing of rows
        assert taken(tmp_path) == notes + 5 * ROW_BYTES + len("half")


def test_foreign_files_and_notes_take_room_too(tmp_path):
    save_file({"weight": torch.zeros(1000)}, tmp_path / "model.safetensors")
    leave_note(tmp_path / "a.safetensors")
    (tmp_path / "notes.txt").write_text("does not count")
    size = os.path.getsize(tmp_path / "model.safetensors")
    assert taken(tmp_path) == size + HEADER_ROOM


def test_a_root_within_another_is_counted_once(tmp_path):
    inner = tmp_path / "inner"
    sizes = write_file(tmp_path / "a.safetensors"), write_file(inner / "a.safetensors")
    os.symlink(tmp_path, tmp_path / "link")
    assert taken(tmp_path, inner, tmp_path / "link", is_deep=True) == sum(sizes)
    (tmp_path / "other").mkdir()
    size = write_file(tmp_path / "other" / "a.safetensors")
    assert taken(inner, tmp_path / "other") == sizes[1] + size


# ---- The thread ----------------------------------------------------------------


def keeper_threads() -> int:
    return sum(
        thread.name == "hidden-states-keeper" for thread in threading.enumerate()
    )


def test_the_thread_looks_until_it_is_stopped(tmp_path):
    before = keeper_threads()
    path = tmp_path / "a.safetensors"
    write_file(path)
    make_old(path, 100)
    keeper = StorageKeeper([str(tmp_path)], max_age_s=0.2)
    keeper.start()
    assert not path.exists()  # the first look is over when start returns
    assert keeper_threads() == before + 1
    write_file(path)
    wait_until(lambda: not path.exists())
    keeper.stop()
    assert keeper_threads() == before
    keeper.stop()


def test_a_keeper_that_was_never_started_can_be_stopped(tmp_path):
    before = keeper_threads()
    StorageKeeper([str(tmp_path)]).stop()
    assert keeper_threads() == before


def test_the_thread_outlives_what_goes_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(hidden_states_storage, "BOUNDED_INTERVAL", 0.01)
    keeper = StorageKeeper([str(tmp_path)], max_stored_bytes=100_000)
    looks: list[int] = []
    files = keeper._files

    def look():
        looks.append(1)
        if len(looks) == 2:
            raise RuntimeError("odd")
        return files()

    monkeypatch.setattr(keeper, "_files", look)
    keeper.start()
    try:
        wait_until(lambda: len(looks) > 2)
        size = write_file(tmp_path / "a.safetensors")
        wait_until(lambda: num_taken(keeper) == size)
        shutil.rmtree(tmp_path)
        wait_until(lambda: num_taken(keeper) == 0)
    finally:
        keeper.stop()


def test_a_bound_is_looked_after_more_often():
    """Room that was made is seen soon; a mere sweep may take its time."""
    intervals: list[float] = []

    class Waits(threading.Event):
        def wait(self, timeout=None):
            intervals.append(timeout)
            return True

    for options in ({}, {"max_stored_bytes": 1}, {"max_age_s": 8.0}, {"max_age_s": 0}):
        keeper = StorageKeeper([], **options)
        keeper._stop = Waits()
        keeper.start()
        keeper.stop()
    assert intervals[0] >= 10
    assert intervals[1:] == [1.0, 2.0, 0.1]


def test_what_others_left_is_not_ours(tmp_path):
    """Downloaders have such names, too."""
    for suffix in (".partial", ".error", ".whole", ".lock"):
        path = tmp_path / f"model.safetensors{suffix}"
        path.write_bytes(b"precious" * 1000)
        os.utime(path, (0, 0))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    sweep(tmp_path, max_age_s=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(FileExistsError, match="not ours"):
        HiddenStatesFile(str(tmp_path / "model.safetensors"), "request").open()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_directory_that_cannot_be_read_is_not_empty(tmp_path, monkeypatch):
    write_file(tmp_path / "a.safetensors")
    keeper = sweep(tmp_path, max_stored_bytes=100)
    assert keeper.cannot_hold(1) is not None

    def scandir(path):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OSError, match="Too many"):
        keeper.sweep()
    assert keeper.cannot_hold(1) is not None
