# SPDX-License-Identifier: Apache-2.0
"""One request's hidden states in one ``.safetensors`` file.

The writer streams rows to their places while the model runs, in whatever order they
come, then closes the file with its header. What a reader can see at a path:

- ``<path>.partial``: being written, exclusively ``flock``-ed by its writer. Readers
  never open it as data. Rows stand at their final offsets behind a room for the
  header.
- ``<path>.lock``: exists, exclusively ``flock``-ed, until the file is complete or has
  failed; then it goes. (Not with ``use_lock=False``.)
- ``<path>``: complete. It appears by rename, so it is complete or not there.
- ``<path>.error``: why there is no file, as JSON. It is the ``.partial`` renamed, so
  that it needs no space on a full disk.

A writer that dies leaves ``.partial`` (and ``.lock``) without a ``flock``: readers see
that at once and raise.

Format: https://huggingface.co/docs/safetensors (8 bytes of little-endian header
length, JSON padded with spaces, tensors back to back).
"""

import contextlib
import fcntl
import json
import os
import time
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

FORMAT_VERSION = "1"

PARTIAL_SUFFIX = ".partial"
LOCK_SUFFIX = ".lock"
ERROR_SUFFIX = ".error"

# One page: room for the header, whose numbers are final only at the end, and for the
# note that takes its place when the file fails. Rows start on a page boundary.
HEADER_ROOM = 4096
# The most that a header or a note keeps of what has no bound of its own, in
# characters (of up to four bytes).
MAX_REQUEST_ID = 200
MAX_CAUSE = 600
# With a timeout there is no blocking flock; how often to ask, in seconds.
POLL_INTERVAL = 0.01

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
}


class HiddenStatesError(RuntimeError):
    """There are no hidden states at a path, and the message says why.

    Attributes:
        path: The path that was handed out.
        cause: What went wrong, in a sentence.
        request_id: Of the request, where known.
    """

    def __init__(self, path: str, cause: str, request_id: str | None = None):
        self.path = path
        self.cause = cause
        self.request_id = request_id
        request = f" of request {request_id}" if request_id else ""
        super().__init__(f"no hidden states{request} at {path!r}: {cause}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled by their message alone, which is not what they take.
        return type(self), (self.path, self.cause, self.request_id)


class HiddenStatesTimeoutError(HiddenStatesError, TimeoutError):
    """The file was not complete in time; it may be later."""


class HiddenStatesFile:
    """The writer's side of one file. Used by one thread at a time.

    Args:
        path: Where the complete file will appear.
        request_id: Told to readers in metadata and errors.
        use_lock: Hold ``<path>.lock`` until complete.
    """

    def __init__(self, path: str, request_id: str, use_lock: bool = True):
        self.path = path
        self.request_id = request_id
        self.use_lock = use_lock
        self._fd = -1
        self._lock_fd = -1

    @property
    def is_open(self) -> bool:
        """Whether it is being written: opened, not yet complete nor withdrawn."""
        return self._fd >= 0

    def open(self) -> None:
        """Take the lock and make the partial file.

        Raises:
            OSError: if that cannot be done; nothing is left behind.
        """
        try:
            os.makedirs(os.path.dirname(self.path) or ".", mode=0o700, exist_ok=True)
            if self.use_lock:
                self._lock_fd = _create_and_lock(self.path + LOCK_SUFFIX)
            self._fd = _create_and_lock(self.path + PARTIAL_SUFFIX)
            os.ftruncate(self._fd, 0)
            # Room for a note about what fails later; a full disk shows here.
            _write_at(self._fd, memoryview(bytes(HEADER_ROOM)), 0)
            # What an earlier request left at this path is not this one's.
            _unlink(self.path)
            _unlink(self.path + ERROR_SUFFIX)
        except OSError:
            self.withdraw()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes of rows, ``offset`` bytes after the first row's start."""
        _write_at(self._fd, data, HEADER_ROOM + offset)

    def finish(
        self,
        token_ids: np.ndarray,
        num_layers: int,
        hidden_size: int,
        dtype: torch.dtype,
        metadata: dict[str, str],
    ) -> None:
        """Write token ids and header, show the file under its name, drop the lock.

        Args:
            token_ids: ``[num_tokens]`` int64; as many rows have been written.
            num_layers: L of the rows ``[num_tokens, L, H]``.
            hidden_size: H.
            dtype: Of the rows.
            metadata: For the header, beside the request id and format version.
        """
        num_tokens = len(token_ids)
        rows_end = num_tokens * num_layers * hidden_size * dtype.itemsize
        token_bytes = np.ascontiguousarray(token_ids, "<i8").data.cast("B")
        header = {
            "__metadata__": {
                "format": "pt",
                "hidden_states_format_version": FORMAT_VERSION,
                "request_id": self.request_id[:MAX_REQUEST_ID],
                **metadata,
            },
            "hidden_states": {
                "dtype": DTYPE_NAMES[dtype],
                "shape": [num_tokens, num_layers, hidden_size],
                "data_offsets": [0, rows_end],
            },
            "token_ids": {
                "dtype": "I64",
                "shape": [num_tokens],
                "data_offsets": [rows_end, rows_end + len(token_bytes)],
            },
        }
        _write_at(self._fd, token_bytes, HEADER_ROOM + rows_end)
        os.ftruncate(self._fd, HEADER_ROOM + rows_end + len(token_bytes))
        size = HEADER_ROOM - 8
        text = _encoded(header).ljust(size)
        if len(text) > size:
            raise OSError(f"a header of {len(text)} bytes has no room in {size}")
        _write_at(self._fd, memoryview(size.to_bytes(8, "little") + text), 0)
        partial = self.path + PARTIAL_SUFFIX
        if not os.path.samestat(os.fstat(self._fd), os.stat(partial)):
            raise FileExistsError(f"{partial!r} has been replaced by another file")
        os.rename(partial, self.path)
        self._close()  # from here on the file is its readers'

    def fail(self, cause: str) -> None:
        """Take the file back and leave a note that says why.

        Raises:
            OSError: if not even the note can be left. Readers are released all the
                same, and told that the file was never completed.
        """
        note = {
            "request_id": self.request_id[:MAX_REQUEST_ID],
            "cause": cause[:MAX_CAUSE],
        }
        text = _encoded(note)
        try:
            os.ftruncate(self._fd, HEADER_ROOM)  # frees the rows' space first
            _write_at(self._fd, memoryview(text.ljust(HEADER_ROOM)), 0)
            try:
                os.rename(self.path + PARTIAL_SUFFIX, self.path + ERROR_SUFFIX)
            except FileNotFoundError:  # removed, perhaps with its directory
                self._write_note(text)
        finally:
            self.withdraw()

    def _write_note(self, text: bytes) -> None:
        os.makedirs(os.path.dirname(self.path) or ".", mode=0o700, exist_ok=True)
        with open(self.path + ERROR_SUFFIX, "xb") as file:
            file.write(text)

    def withdraw(self) -> None:
        """Take back what has been written; leaves nothing. May be called twice.

        Raises:
            OSError: if the partial file cannot be removed; it is let go all the same.
        """
        try:
            if self._fd >= 0:
                _unlink(self.path + PARTIAL_SUFFIX)
        finally:
            self._close()

    def remove(self) -> None:
        """Remove the complete file or the note: for a request that was aborted."""
        self.withdraw()
        _unlink(self.path)
        _unlink(self.path + ERROR_SUFFIX)

    def _close(self) -> None:
        # The lock file goes before its flock does: whoever waited has it open, and
        # whoever comes later finds none. One that cannot be removed is in nobody's way
        # without its flock.
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                _unlink(self.path + LOCK_SUFFIX)
        for fd in (self._lock_fd, self._fd):
            if fd >= 0:
                # Not by closing alone: a forked process would keep the flock.
                fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)
        self._lock_fd = self._fd = -1


def load_hidden_states(
    path: str, timeout: float | None = None
) -> dict[str, torch.Tensor]:
    """Load the hidden states of one request; waits until they are complete.

    Works whether or not the writer uses ``<path>.lock``.

    Args:
        path: ``kv_transfer_params["hidden_states_path"]`` of the request's output.
        timeout: How many seconds to wait at the most; None waits for as long as the
            writer lives.

    Returns:
        ``hidden_states`` ``[num_tokens, num_layers, hidden_size]`` and ``token_ids``
        ``[num_tokens]`` int64, on the CPU.

    Raises:
        HiddenStatesError: if there is no complete file and none will come.
        HiddenStatesTimeoutError: if the file is not complete in time.
    """
    path = os.fspath(path)
    deadline = None if timeout is None else time.monotonic() + timeout
    # Guards first, then the data: the writer shows the data before it lets go.
    was_locked = _wait_for(path, path + LOCK_SUFFIX, deadline)
    is_abandoned = _wait_for(path, path + PARTIAL_SUFFIX, deadline)
    if os.path.exists(path):
        return _read(path)
    _raise_noted_error(path)
    if is_abandoned and os.path.exists(path + PARTIAL_SUFFIX):
        cause = "its writer ended before the file was complete"
    elif was_locked or is_abandoned:
        cause = "the file was removed by another reader, or the request was aborted"
    else:
        cause = (
            "no such file, and none is being written; it was removed, or the path is "
            "not one that an engine handed out on this file system"
        )
    raise HiddenStatesError(path, cause)


def cleanup_hidden_states(path: str, keep_hidden_states: bool = False) -> None:
    """Remove what stands at a path once it is no longer needed.

    Removes the file, its lock, its error note, and what a dead writer left of it; with
    ``keep_hidden_states`` all but the file. What is not there is no error.
    """
    path = os.fspath(path)
    _unlink(path + LOCK_SUFFIX)
    _unlink(path + ERROR_SUFFIX)
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        fd = os.open(path + PARTIAL_SUFFIX, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            _unlink(path + PARTIAL_SUFFIX)
        finally:
            os.close(fd)
    if not keep_hidden_states:
        _unlink(path)


def _read(path: str) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
    # safetensors opens the file twice, and raises a bare RuntimeError the second time.
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        if not os.path.exists(path):
            cause = "the file was removed while it was read"
            raise HiddenStatesError(path, cause) from error
        raise HiddenStatesError(
            path, f"the file there is not whole, or no safetensors file: {error}"
        ) from error
    for name in ("hidden_states", "token_ids"):
        if name not in tensors:
            raise HiddenStatesError(path, f"the file there has no tensor {name!r}")
    num_rows, num_tokens = len(tensors["hidden_states"]), len(tensors["token_ids"])
    if num_rows != num_tokens:
        raise HiddenStatesError(
            path, f"the file there has {num_rows} rows for {num_tokens} token ids"
        )
    return tensors


def _raise_noted_error(path: str) -> None:
    try:
        with open(path + ERROR_SUFFIX, encoding="utf-8") as file:
            note = json.load(file)
        cause, request_id = str(note["cause"]), str(note["request_id"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise HiddenStatesError(path, f"its error note is unreadable: {error}") from (
            error
        )
    raise HiddenStatesError(path, cause, request_id)


def _wait_for(path: str, guard: str, deadline: float | None) -> bool:
    """Wait until nobody holds ``guard`` exclusively; whether it was there at all."""
    try:
        fd = os.open(guard, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise HiddenStatesError(path, f"cannot open {guard!r}: {error}") from error
    try:
        if deadline is None:
            fcntl.flock(fd, fcntl.LOCK_SH)
            return True
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
            if not time.monotonic() < deadline:  # also where the timeout is NaN
                raise HiddenStatesTimeoutError(path, "still being written")
            time.sleep(POLL_INTERVAL)
    finally:
        os.close(fd)


def _create_and_lock(path: str) -> int:
    """A descriptor of the file at ``path``, made or taken over, held exclusively."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise FileExistsError(f"{path!r} is held by another writer") from error
        except BaseException:
            os.close(fd)
            raise
        # The file may have been removed between open and flock: then what we hold is
        # not what stands at the path.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    # One call may write less than asked: over 2 GiB on Linux, or at a quota.
    while data:
        written = os.pwrite(fd, data, offset)
        data = data[written:]
        offset += written


def _encoded(value: Any) -> bytes:
    # Not ASCII alone, which takes up to twelve bytes a character. A client's request
    # id may hold what UTF-8 cannot.
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
