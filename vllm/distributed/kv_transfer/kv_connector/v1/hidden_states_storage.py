# SPDX-License-Identifier: Apache-2.0
"""Keeps a directory of hidden states within its bounds, and free of leftovers.

A thread of the scheduler's process looks at the directory now and then: what dead
writers left becomes a note for their readers, notes and (if asked) files go when they
have aged, and what is stored is added up. It touches only what this user owns, by
names that ``hidden_states_file`` makes, and of files only those that say they are
ours. Servers that share a directory each do so; what a living one writes is under a
``flock``, and left alone.
"""

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_file import (
    ERROR_SUFFIX,
    LOCK_SUFFIX,
    PARTIAL_SUFFIX,
    WHOLE_SUFFIX,
    is_hidden_states_file,
    is_note,
    note_death,
    remove_unheld,
)
from vllm.logger import init_logger

logger = init_logger(__name__)

FILE_SUFFIX = ".safetensors"
# Seconds for which the cause of a failure can be asked for.
MAX_NOTE_AGE = 86_400.0
# Seconds between looks at the directory: with a bound on its size, and without.
BOUNDED_INTERVAL = 1.0
INTERVAL = 60.0
# Seconds for which a lock stays that nobody holds: other people's readers remove it
# themselves when they had to wait for it, and fail where it is gone by then.
LOCK_LINGER = 30.0
# A lock or a temporary file is made before it is locked, in between it looks dead.
GRACE = 2.0


@dataclass
class _Reservation:
    """What one request will store."""

    num_bytes: int
    ended: float | None = None
    """When the request ended; its size is on the disk from then on."""


class StorageKeeper:
    """Sweeps directories, and says whether there is room for another file.

    Args:
        roots: The directories.
        is_deep: Whether files may be in directories below them, too.
        max_stored_bytes: Of all files, those to come included; None for no bound.
        max_age_s: Seconds for which a complete file stays; None for ever.
        keep_locks: Leave the lock files of complete files alone.
    """

    def __init__(
        self,
        roots: Sequence[str],
        is_deep: bool = False,
        max_stored_bytes: int | None = None,
        max_age_s: float | None = None,
        keep_locks: bool = False,
    ):
        self.max_stored_bytes = max_stored_bytes
        self.max_age_s = max_age_s
        self._roots = list(roots)
        self._is_deep = is_deep
        self._keep_locks = keep_locks
        self._mutex = threading.Lock()
        self._reserved: dict[str, _Reservation] = {}
        self._stored: dict[str, int] = {}
        self._total = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look once, and from then on in a thread of its own."""
        self._sweep_or_say_why()
        self._thread = threading.Thread(
            target=self._run, name="hidden-states-keeper", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def cannot_hold(self, num_bytes: int) -> str | None:
        """Why there is no room for so many bytes more; None where there is."""
        if self.max_stored_bytes is None:
            return None
        with self._mutex:
            stored = self._num_stored()
        if stored + num_bytes <= self.max_stored_bytes:
            return None
        return (
            f"the hidden states of this request take {num_bytes} bytes, and "
            f"{stored} of max_stored_bytes {self.max_stored_bytes} are taken; "
            + (
                "it never fits"
                if num_bytes > self.max_stored_bytes
                else "try again when files have been read and removed"
            )
        )

    def reserve(self, path: str, num_bytes: int) -> None:
        """Count a file that will come."""
        if self.max_stored_bytes is not None:
            with self._mutex:
                self._reserved[path] = _Reservation(num_bytes)

    def settle(self, path: str) -> None:
        """The request of a file has ended: from now on, what is stored counts."""
        if self.max_stored_bytes is not None:
            with self._mutex:
                if path in self._reserved:
                    self._reserved[path].ended = time.monotonic()

    def _num_stored(self) -> int:
        # Each request asks, and there may be many files: no sum over all of them.
        return self._total + sum(
            reservation.num_bytes - self._stored.get(path, 0)
            for path, reservation in self._reserved.items()
        )

    def _run(self) -> None:
        interval = INTERVAL if self.max_stored_bytes is None else BOUNDED_INTERVAL
        if self.max_age_s is not None:
            interval = min(interval, max(self.max_age_s / 4, 0.1))
        while not self._stop.wait(interval):
            self._sweep_or_say_why()

    def _sweep_or_say_why(self) -> None:
        try:
            self.sweep()
        except Exception:  # of whatever kind: the next look may do better
            logger.exception("Cannot look after %s", ", ".join(self._roots))

    def sweep(self) -> None:
        """Look at all files once."""
        start = time.monotonic()
        now = time.time()
        sizes: dict[str, int] = {}
        being_written: set[str] = set()
        for path, status in self._files():
            base, suffix = os.path.splitext(path)
            try:
                if self._goes(base, suffix, now - status.st_mtime):
                    continue
            except OSError as error:
                logger.debug("Cannot look after %s: %s", path, error)
            if suffix == PARTIAL_SUFFIX:
                being_written.add(base)
            file = path if suffix == FILE_SUFFIX else base
            sizes[file] = sizes.get(file, 0) + status.st_size
        with self._mutex:
            self._stored, self._total = sizes, sum(sizes.values())
            for path, reservation in list(self._reserved.items()):
                ended = reservation.ended
                if ended is not None and ended < start and path not in being_written:
                    del self._reserved[path]

    def _goes(self, base: str, suffix: str, age: float) -> bool:
        """Remove a file whose time is over; whether it was removed.

        Args:
            base, suffix: Of its path.
            age: Seconds since it was written last.
        """
        path = base + suffix
        if suffix == FILE_SUFFIX:
            limit = self.max_age_s
            if limit is None or age <= limit or not is_hidden_states_file(path):
                return False
        elif suffix == PARTIAL_SUFFIX:
            if age <= GRACE or not note_death(base):
                return False
            logger.warning("%s was left by a dead writer", path)
            remove_unheld(base + LOCK_SUFFIX)
            return True
        elif suffix == LOCK_SUFFIX:
            if age <= LOCK_LINGER or (self._keep_locks and os.path.exists(base)):
                return False
            return remove_unheld(path)
        elif suffix == ERROR_SUFFIX:
            if age <= MAX_NOTE_AGE or not is_note(path):
                return False
        elif suffix != WHOLE_SUFFIX or age <= GRACE or not is_note(base + ERROR_SUFFIX):
            return False  # of a dead writer, whose partial file is a note by now
        os.unlink(path)
        return True

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Files of this user by our names, with what they are; each once."""
        seen: set[tuple[int, int]] = set()
        for root in self._roots:
            for folder, folders, names in os.walk(root, onerror=_raise_but_for_missing):
                if not self._is_deep:
                    folders.clear()
                for name in names:
                    base, suffix = os.path.splitext(name)
                    if suffix != FILE_SUFFIX and not base.endswith(FILE_SUFFIX):
                        continue
                    path = os.path.join(folder, name)
                    with contextlib.suppress(OSError):
                        status = os.lstat(path)
                        key = (status.st_dev, status.st_ino)
                        if (
                            stat.S_ISREG(status.st_mode)
                            and status.st_uid == os.geteuid()
                            and key not in seen  # one root may be in another
                        ):
                            seen.add(key)
                            yield path, status


def _raise_but_for_missing(error: OSError) -> None:
    """What cannot be read is not empty: the figures of the last look stay."""
    if not isinstance(error, FileNotFoundError):
        raise error
