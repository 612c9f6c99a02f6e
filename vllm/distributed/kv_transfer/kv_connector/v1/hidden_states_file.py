# SPDX-License-Identifier: Apache-2.0
"""One request's hidden states in one ``.safetensors`` file.

The writer streams rows to their places while the model runs, in whatever order they
come, then closes the file with its header. What a reader can see at a path:

- ``<path>.partial``: being written, exclusively ``flock``-ed by its writer. Readers
  never open it as data. Rows stand at their final offsets behind a room for the
  header.
- ``<path>.lock``: exclusively ``flock``-ed until the file is complete or has failed.
  It stays for a while without a ``flock``: readers of other people's remove it
  themselves when they had to wait for it, and fail where it is gone by then. (Not with
  ``use_lock=False``.)
- ``<path>``: complete. It appears by rename, so it is complete or not there.
- ``<path>.error``: why there is no file, as JSON. It is the ``.partial`` renamed, so
  that it needs no space on a full disk.

A writer that dies leaves ``.partial`` (and ``.lock``) without a ``flock``: readers see
that at once and raise.

Format: https://huggingface.co/docs/safetensors (8 bytes of little-endian header
length, JSON padded with spaces, tensors back to back).
"""

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from vllm.v1.hidden_states.dtypes import FLOAT8, SCALES, dequantized

FORMAT_VERSION = "1"

PARTIAL_SUFFIX = ".partial"
LOCK_SUFFIX = ".lock"
ERROR_SUFFIX = ".error"
WHOLE_SUFFIX = ".whole"

# One page: room for the header, whose numbers are final only at the end, and for the
# note that takes its place when the file fails. Rows start on a page boundary.
HEADER_ROOM = 4096
# The most that a header or a note keeps of what has no bound of its own, in
# characters (of up to four bytes).
MAX_REQUEST_ID = 200
MAX_CAUSE = 600
# With a timeout there is no blocking flock; how often to ask, in seconds.
POLL_INTERVAL = 0.01
# How often a file is tried to be made in a directory that others take away.
MAX_ATTEMPTS = 3
# How much of a file is read at once for its checksum, in bytes.
CHECKSUM_BLOCK = 1 << 20

VERSION_KEY = "hidden_states_format_version"
# In the metadata of a file whose path a client chose: another client may choose it.
CHOSEN_KEY = "custom_save_path"
CHECKSUM_KEY = "checksum"
CHECKSUMS = ("crc32", "xxh3")

# What an operator may do about a failure of the file system.
ADVICE = {
    errno.ENOSPC: "free space there, or bound what is stored by max_stored_bytes",
    errno.EDQUOT: "free space there, or have the quota raised",
    errno.EFBIG: "raise the server's limit of file sizes (ulimit -f)",
    errno.EMFILE: "raise the server's limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files",
    errno.EACCES: "let the server's user write to shared_storage_path",
    errno.EPERM: "let the server's user write to shared_storage_path",
    errno.EROFS: "mount shared_storage_path writable",
    errno.ENOENT: "leave shared_storage_path alone while the server runs",
    errno.ENOTDIR: "leave shared_storage_path alone while the server runs",
    errno.EIO: "look at the health of the disk",
    errno.ESTALE: "look at the health of the network file system",
}

# Not to ASCII alone, which takes up to twelve bytes a character.
_ENCODER = json.JSONEncoder(ensure_ascii=False)

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    FLOAT8: "F8_E4M3",
}


class HiddenStatesError(RuntimeError):
    """There are no hidden states at a path, and the message says why.

    Attributes:
        path: The path that was handed out.
        cause: What went wrong, in a sentence.
        request_id: Of the request, where known.
        advice: What an operator may do about it, where there is something.
    """

    def __init__(
        self,
        path: str,
        cause: str,
        request_id: str | None = None,
        advice: str | None = None,
    ):
        self.path = path
        self.cause = cause
        self.request_id = request_id
        self.advice = advice
        request = f" of request {request_id}" if request_id else ""
        end = f" ({advice})" if advice else ""
        super().__init__(f"no hidden states{request} at {path!r}: {cause}{end}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled by their message alone, which is not what they take.
        return type(self), (self.path, self.cause, self.request_id, self.advice)


class HiddenStatesTimeoutError(HiddenStatesError, TimeoutError):
    """The file was not complete in time; it may be later."""


def advice_about(error: BaseException) -> str | None:
    """What an operator may do about a failure, where that is known."""
    return ADVICE.get(getattr(error, "errno", None) or 0)


@dataclass(frozen=True)
class FileOptions:
    """How files are made."""

    use_lock: bool = True
    """Hold ``<path>.lock`` until the file is complete."""

    keep_lock: bool = True
    """Leave ``<path>.lock`` behind, without a ``flock``: who waits for it may be
    about to remove it, and fail where it is gone."""

    fsync: bool = False
    """Show a file only when it is on the disk, and would outlive a power failure."""

    checksum: str | None = None
    """One of ``CHECKSUMS``, of all that follows the header; None for none."""

    mode: int = 0o600
    """Of files; directories can be searched by those who may read their files."""

    @property
    def directory_mode(self) -> int:
        """Of directories that are made."""
        return 0o700 | self.mode | (self.mode & 0o444) >> 2


class HiddenStatesFile:
    """The writer's side of one file. Used by one thread at a time.

    Args:
        path: Where the complete file will appear.
        request_id: Told to readers in metadata and errors.
        options: How it is made.
        is_chosen: A client named the path, and another may, later.
    """

    def __init__(
        self,
        path: str,
        request_id: str,
        options: FileOptions | None = None,
        is_chosen: bool = False,
    ):
        self.path = path
        self.request_id = request_id
        self.options = options or FileOptions()
        # What the file says of itself from its beginning to its end, a note, too.
        self._about = {
            VERSION_KEY: FORMAT_VERSION,
            "request_id": request_id[:MAX_REQUEST_ID],
        } | ({CHOSEN_KEY: "true"} if is_chosen else {})
        self._fd = -1
        self._lock_fd = -1
        # Bytes that the file has behind its header before they are written.
        self._reserved = -1
        # Device and inode of the complete file.
        self._shown: tuple[int, int] | None = None
        # Directories that were made for it, the outermost first.
        self._made: list[str] = []

    @property
    def is_open(self) -> bool:
        """Whether it is being written: opened, not yet complete nor withdrawn."""
        return self._fd >= 0

    def open(self, num_bytes: int = 0) -> None:
        """Take the lock and make the partial file.

        Args:
            num_bytes: Of all tensors, where known: others who look at the directory
                see how large the file will be.

        Raises:
            OSError: if that cannot be done; nothing is left behind.
        """
        try:
            self._take_guards()
            # Room for a note about what fails later; a full disk shows here. It says
            # from the start whose file this is, or others' would be swept with it.
            mark = _encoded(self._about).ljust(HEADER_ROOM)
            _write_at(self._fd, memoryview(mark), 0)
            if num_bytes:
                os.ftruncate(self._fd, HEADER_ROOM + num_bytes)
                self._reserved = num_bytes
            # What an earlier request left at this path is not this one's.
            _unlink(self.path)
            if os.path.lexists(self.path + ERROR_SUFFIX):
                if not is_note(self.path + ERROR_SUFFIX):
                    raise FileExistsError(f"{self.path + ERROR_SUFFIX!r} is no note")
                _unlink(self.path + ERROR_SUFFIX)
        except BaseException:
            self.withdraw()
            raise

    def _take_guards(self) -> None:
        mode = self.options.mode
        # The directory is there but for the first file in it; and an aborted request
        # may just have taken away the one that it had made.
        for attempt in range(MAX_ATTEMPTS):
            try:
                if self.options.use_lock:
                    self._lock_fd = _create_and_lock(self.path + LOCK_SUFFIX, mode)
                self._fd = _create_and_lock(self.path + PARTIAL_SUFFIX, mode)
                return
            except FileNotFoundError:
                if attempt + 1 == MAX_ATTEMPTS:
                    raise
                self._close(keep_lock=True)  # gone with the directory
                self._make_directory()

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
        scales: bytes | memoryview = b"",
    ) -> None:
        """Write token ids and header, show the file under its name, drop the lock.

        Args:
            token_ids: ``[num_tokens]`` int64; as many rows have been written.
            num_layers: L of the rows ``[num_tokens, L, H]``.
            hidden_size: H.
            dtype: Of the rows.
            metadata: For the header, beside the request id and format version.
            scales: ``[num_tokens]`` float32, of float8_e4m3 rows.
        """
        num_tokens = len(token_ids)
        rows_end = num_tokens * num_layers * hidden_size * dtype.itemsize
        scales_end = rows_end + len(scales)
        token_bytes = np.ascontiguousarray(token_ids, "<i8").data.cast("B")
        end = scales_end + len(token_bytes)
        about = {
            "format": "pt",
            **self._about,
            **metadata,
        }
        header: dict[str, Any] = {
            "__metadata__": about,
            "hidden_states": {
                "dtype": DTYPE_NAMES[dtype],
                "shape": [num_tokens, num_layers, hidden_size],
                "data_offsets": [0, rows_end],
            },
            "token_ids": {
                "dtype": "I64",
                "shape": [num_tokens],
                "data_offsets": [scales_end, end],
            },
        }
        if scales:
            header[SCALES] = {
                "dtype": "F32",
                "shape": [num_tokens, 1, 1],
                "data_offsets": [rows_end, scales_end],
            }
            _write_at(self._fd, memoryview(scales), HEADER_ROOM + rows_end)
        _write_at(self._fd, token_bytes, HEADER_ROOM + scales_end)
        if end != self._reserved:
            os.ftruncate(self._fd, HEADER_ROOM + end)
        if self.options.checksum is not None:
            # Of what stands in the file, not of what was meant to.
            blocks = _blocks(self._fd)
            about[CHECKSUM_KEY] = _checksum(blocks, self.options.checksum)
        size = HEADER_ROOM - 8
        text = _encoded(header).ljust(size)
        if len(text) > size:
            raise OSError(f"a header of {len(text)} bytes has no room in {size}")
        _write_at(self._fd, memoryview(size.to_bytes(8, "little") + text), 0)
        partial = self.path + PARTIAL_SUFFIX
        _hear_of_lost_writes(self._fd)
        if self.options.fsync:
            os.fsync(self._fd)
        status = os.fstat(self._fd)
        if not os.path.samestat(status, os.stat(partial)):
            raise FileExistsError(f"{partial!r} has been replaced by another file")
        os.rename(partial, self.path)
        if self.options.fsync:
            try:
                _sync_directory(self.path)
            except OSError:
                # Not shown yet, then: what fails now may be done again, or fail.
                os.rename(self.path, partial)
                raise
        self._shown = status.st_dev, status.st_ino
        self._close(self.options.keep_lock)  # from here on it is its readers'

    def finish_by(self, write: Callable[[str, int | None], None]) -> None:
        """Show a file that somebody else writes, and drop the lock.

        Args:
            write: Takes the path to write to, and a descriptor of the lock, which it
                closes; None where there is no lock.
        """
        whole = self.path + WHOLE_SUFFIX
        _unlink(whole)  # a link there would lead the writer elsewhere
        lock_fd = None
        if self._lock_fd >= 0:
            # Opened again, not duplicated: what others do to its flock is not ours.
            lock_fd = os.open(
                f"/proc/self/fd/{self._lock_fd}", os.O_RDWR | os.O_CLOEXEC
            )
        try:
            try:
                write(whole, lock_fd)
            finally:
                self._close_again(lock_fd)
            os.chmod(whole, self.options.mode)
            if self.options.fsync:
                with open(whole, "rb") as file:
                    os.fsync(file.fileno())
            os.rename(whole, self.path)
            if self.options.fsync:
                try:
                    _sync_directory(self.path)
                except OSError:
                    os.rename(self.path, whole)
                    raise
        except BaseException:
            _unlink(whole)
            raise
        status = os.stat(self.path)
        self._shown = status.st_dev, status.st_ino
        self._drop(self.options.keep_lock)  # the partial file has no rows

    def _close_again(self, lock_fd: int | None) -> None:
        """Close a descriptor of the lock that its user should have closed."""
        with contextlib.suppress(OSError):  # it has
            if lock_fd is not None and os.path.samestat(
                os.fstat(lock_fd), os.fstat(self._lock_fd)
            ):
                os.close(lock_fd)

    def fail(self, cause: str, advice: str | None = None) -> None:
        """Take the file back and leave a note that says why.

        Raises:
            OSError: if not even the note can be left. Readers are released all the
                same, and told that the file was never completed.
        """
        text = _note(self._about, cause, advice)
        try:
            os.ftruncate(self._fd, HEADER_ROOM)  # frees the rows' space first
            _write_at(self._fd, memoryview(text.ljust(HEADER_ROOM)), 0)
            try:
                os.rename(self.path + PARTIAL_SUFFIX, self.path + ERROR_SUFFIX)
            except FileNotFoundError:  # removed, perhaps with its directory
                self._write_note(text)
        finally:
            self._drop(self.options.keep_lock)

    def _write_note(self, text: bytes) -> None:
        self._make_directory()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path + ERROR_SUFFIX, flags, self.options.mode)
        with open(fd, "wb") as file:
            file.write(text)

    def _make_directory(self) -> None:
        folder = os.path.dirname(self.path) or "."
        for made in make_directories(folder, self.options.directory_mode):
            self._made.append(made)

    def withdraw(self) -> None:
        """Take back what has been written; leaves nothing. May be called twice.

        Raises:
            OSError: if the partial file cannot be removed; it is let go all the same.
        """
        self._drop(keep_lock=False)

    def remove(self) -> None:
        """Remove the complete file or the note: for a request that was aborted."""
        self.withdraw()
        if self._shown is not None:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(self.path)
                # Another request may have put its own file there since.
                if (status.st_dev, status.st_ino) == self._shown:
                    os.unlink(self.path)
        if is_note(self.path + ERROR_SUFFIX):
            _unlink(self.path + ERROR_SUFFIX)
        if self.options.use_lock and self.options.keep_lock:
            remove_unheld(self.path + LOCK_SUFFIX)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # others' files are in it
                os.rmdir(folder)

    def _drop(self, keep_lock: bool) -> None:
        """Remove the partial file, if it is there still, and close."""
        try:
            if self._fd >= 0:
                _unlink(self.path + PARTIAL_SUFFIX)
        finally:
            self._close(keep_lock)

    def _close(self, keep_lock: bool) -> None:
        # A lock file that goes does so before its flock: whoever comes later finds
        # none. One that cannot be removed is in nobody's way without its flock.
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                if keep_lock:
                    os.utime(self._lock_fd)  # the time for which it stays starts now
                else:
                    _unlink(self.path + LOCK_SUFFIX)
        fds = (self._lock_fd, self._fd)
        # First: a number that is closed, if with an error, may be another file's.
        self._lock_fd = self._fd = -1
        for fd in fds:
            if fd >= 0:
                # Whatever it says, nothing can be done, and the file may be shown.
                with contextlib.suppress(OSError):
                    # Not by closing alone: a forked process would keep the flock.
                    fcntl.flock(fd, fcntl.LOCK_UN)
                with contextlib.suppress(OSError):
                    os.close(fd)


def make_directories(folder: str, mode: int) -> Iterator[str]:
    """Make a directory, and those above it that are missing; gives those made.

    Args:
        folder: Its path.
        mode: Of all of them, whatever the umask.
    """
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder) or "."
        if missing[-1] == folder:
            break
    # Not os.makedirs, which has the mode for the last one alone.
    for folder in reversed(missing):
        try:
            os.mkdir(folder, mode)
        except FileExistsError:  # somebody else's, at once; or a file
            continue
        yield folder
        if mode & 0o077:
            os.chmod(folder, mode)


def load_hidden_states(
    path: str,
    timeout: float | None = None,
    verify: bool = False,
    dequantize: bool = False,
) -> dict[str, torch.Tensor]:
    """Load the hidden states of one request; waits until they are complete.

    Works whether or not the writer uses ``<path>.lock``.

    Args:
        path: ``kv_transfer_params["hidden_states_path"]`` of the request's output.
        timeout: How many seconds to wait at the most; None waits for as long as the
            writer lives.
        verify: Compare the file with its checksum (of a server with the option
            ``checksum``) before it is loaded.
        dequantize: Give hidden states in the model's dtype, whatever is stored (a
            server's option ``storage_dtype``), and no scales.

    Returns:
        ``hidden_states`` ``[num_tokens, num_layers, hidden_size]`` and ``token_ids``
        ``[num_tokens]`` int64, on the CPU, in memory of their own. Beside float8_e4m3
        hidden states stand ``hidden_states_scales`` ``[num_tokens, 1, 1]`` float32, by
        which they have to be multiplied.

    Raises:
        HiddenStatesError: if there is no complete file and none will come; if it cannot
            be read; with ``verify``, if it has changed, or has no checksum.
        HiddenStatesTimeoutError: if the file is not complete in time.
    """
    path = os.fspath(path)
    deadline = None if timeout is None else time.monotonic() + timeout
    # Guards first, then the data: the writer shows the data before it lets go.
    was_locked = _wait_for(path, path + LOCK_SUFFIX, deadline, timeout)
    is_abandoned = _wait_for(path, path + PARTIAL_SUFFIX, deadline, timeout)
    if os.path.exists(path) and not os.path.isdir(path):
        data = _contents(path)
        if verify:
            _verify_checksum(path, data)
        tensors, metadata = _read(path, data)
        return dequantized(tensors, metadata.get("dtype")) if dequantize else tensors
    # Before the note: a sweeper makes the one of the other at any time.
    is_left = is_abandoned and os.path.exists(path + PARTIAL_SUFFIX)
    _raise_noted_error(path)
    _refuse_directory(path)
    if is_left:
        if is_note(path + PARTIAL_SUFFIX):  # whose name could not be changed
            _raise_noted_error(path, PARTIAL_SUFFIX)
        cause = "its writer ended before the file was complete"
    elif was_locked or is_abandoned:
        cause = (
            "the file was removed by another reader, or the request was aborted, or "
            "its failure could not be noted (see the server's log)"
        )
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

    Raises:
        HiddenStatesError: if the path is a directory's, or cannot be removed.
    """
    path = os.fspath(path)
    _refuse_directory(path)
    try:
        _unlink(path + LOCK_SUFFIX)
        _unlink(path + ERROR_SUFFIX)
        with contextlib.suppress(FileNotFoundError, BlockingIOError, _NotAFileError):
            fd = _open_file(path + PARTIAL_SUFFIX)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                _unlink(path + PARTIAL_SUFFIX)
            finally:
                os.close(fd)
        if not keep_hidden_states:
            _unlink(path)
    except NotADirectoryError:
        return  # a file stands where its directory was
    except (OSError, ValueError) as error:
        raise HiddenStatesError(path, f"it cannot be removed: {error}") from error


def _refuse_directory(path: str) -> None:
    if os.path.isdir(path):
        cause = "it is a directory; give the path of one file in it"
        raise HiddenStatesError(path, cause)


class _NotAFileError(OSError):
    """There is something, such as a pipe, that might never be ready."""


def _open_file(path: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor of a regular file; never waits.

    Raises:
        FileNotFoundError: if there is none.
        _NotAFileError: if it is something else.
        OSError: if it cannot be opened.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _NotAFileError(errno.EINVAL, "no regular file", path)
    return fd


def _contents(path: str) -> bytes:
    """All of a file, read once.

    By one descriptor: a file that takes its place meanwhile is another request's. And
    not mapped into memory, where an error of the disk would end the process.

    Raises:
        HiddenStatesError: if it cannot be read.
    """
    try:
        with open(_open_file(path), "rb", buffering=0) as file:
            return file.readall()
    except FileNotFoundError as error:
        raise HiddenStatesError(path, "the file was removed") from error
    except (OSError, ValueError) as error:
        cause = f"the file there cannot be read: {error}"
        raise HiddenStatesError(path, cause, None, advice_about(error)) from error


def _metadata(data: bytes) -> dict[str, str]:
    """Of a whole file."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata: dict[str, str] = header.get("__metadata__") or {}
    return metadata


def _read(path: str, data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        tensors = load(data)
        metadata = _metadata(data)
    # KeyError: of a dtype that torch has not. RuntimeError, AssertionError: of a shape.
    except (
        SafetensorError,
        ValueError,
        KeyError,
        RuntimeError,
        AssertionError,
    ) as error:
        raise HiddenStatesError(
            path, f"the file there is not whole, or no safetensors file: {error}"
        ) from error
    version = metadata.get(VERSION_KEY, FORMAT_VERSION)  # stock vLLM's files have none
    if version != FORMAT_VERSION:
        cause = f"the file there has format version {version!r}; known here: "
        raise HiddenStatesError(path, cause + repr(FORMAT_VERSION))
    for name in ("hidden_states", "token_ids"):
        if name not in tensors:
            raise HiddenStatesError(path, f"the file there has no tensor {name!r}")
    rows, token_ids = tensors["hidden_states"], tensors["token_ids"]
    if rows.dim() != 3 or not rows.is_floating_point():
        kind = f"{list(rows.shape)} of {rows.dtype}"
        raise HiddenStatesError(path, f"the file there has hidden states {kind}")
    if token_ids.dim() != 1 or token_ids.dtype != torch.int64:
        kind = f"{list(token_ids.shape)} of {token_ids.dtype}"
        raise HiddenStatesError(path, f"the file there has token ids {kind}")
    num_rows, num_tokens = len(rows), len(token_ids)
    if num_rows != num_tokens:
        raise HiddenStatesError(
            path, f"the file there has {num_rows} rows for {num_tokens} token ids"
        )
    scales = tensors.get(SCALES)
    if scales is not None:
        if list(scales.shape) != [num_rows, 1, 1] or scales.dtype != torch.float32:
            kind = f"{list(scales.shape)} of {scales.dtype} for {num_rows} rows"
            raise HiddenStatesError(path, f"the file there has scales {kind}")
    elif rows.dtype == FLOAT8:
        raise HiddenStatesError(path, f"the file there has no tensor {SCALES!r}")
    return tensors, metadata


def _raise_noted_error(path: str, suffix: str = ERROR_SUFFIX) -> None:
    try:
        with open(_open_file(path + suffix), encoding="utf-8") as file:
            note = json.load(file)
        cause, request_id = str(note["cause"]), str(note["request_id"])
        advice = note.get("advice")
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise HiddenStatesError(path, f"its error note is unreadable: {error}") from (
            error
        )
    raise HiddenStatesError(path, cause, request_id, advice)


def _wait_for(
    path: str, guard: str, deadline: float | None, timeout: float | None
) -> bool:
    """Wait until nobody holds ``guard`` exclusively; whether it was there at all."""
    try:
        fd = _open_file(guard)
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
                raise HiddenStatesTimeoutError(
                    path, f"still being written after {timeout:g} s"
                )
            time.sleep(POLL_INTERVAL)
    finally:
        os.close(fd)


def _create_and_lock(path: str, mode: int) -> int:
    """A descriptor of the file at ``path``, empty, held exclusively.

    It is made, or taken over from one of ours that nobody holds.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        fd = os.open(path, flags, mode)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file may have been removed between open and flock: then what we hold
            # is not what stands at the path.
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise FileExistsError(f"{path!r} is there, and not ours")
            if os.path.samestat(status, os.stat(path)):
                if status.st_size:
                    if not _has_mark(fd):
                        raise FileExistsError(f"{path!r} is there, and not ours")
                    os.ftruncate(fd, 0)
                # Whatever the umask, and whoever made what was taken over.
                if stat.S_IMODE(status.st_mode) != mode:
                    os.fchmod(fd, mode)
                return fd
        except BlockingIOError as error:
            os.close(fd)
            raise FileExistsError(
                errno.EEXIST, "held by another writer, or a reader", path
            ) from error
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    # One call may write less than asked: over 2 GiB on Linux, or at a quota.
    while data:
        written = os.pwrite(fd, data, offset)
        data = data[written:]
        offset += written


def _hear_of_lost_writes(fd: int) -> None:
    """Raise what some file systems (NFS, with a quota) say when a file is closed.

    The writer's own descriptor is closed when the file is shown already.
    """
    try:
        another = os.dup(fd)
    except OSError:
        return  # no descriptor is left: not the disk's fault
    os.close(another)


def _sync_directory(path: str) -> None:
    """Have what was renamed to ``path`` outlive a power failure."""
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checksum(blocks: Iterable[bytes | memoryview], algorithm: str) -> str:
    """Such as ``crc32:1c291ca3``, of all that follows the room for the header."""
    if algorithm == "xxh3":
        import xxhash

        digest = xxhash.xxh3_64()
        for block in blocks:
            digest.update(block)
        return f"{algorithm}:{digest.hexdigest()}"
    if algorithm != "crc32":
        raise ValueError(f"checksum {algorithm!r}; valid: {', '.join(CHECKSUMS)}")
    crc = 0
    for block in blocks:
        crc = zlib.crc32(block, crc)
    return f"{algorithm}:{crc:08x}"


def _blocks(fd: int) -> Iterator[bytes]:
    offset = HEADER_ROOM
    while block := os.pread(fd, CHECKSUM_BLOCK, offset):
        yield block
        offset += len(block)


def _verify_checksum(path: str, data: bytes) -> None:
    """Compare a file with the checksum in its metadata.

    Raises:
        HiddenStatesError: if it has none, or differs.
    """
    try:
        stored = _metadata(data).get(CHECKSUM_KEY)
        if stored is None:
            cause = "its file has no checksum (a server's option `checksum`)"
            raise HiddenStatesError(path, cause)
        found = _checksum([memoryview(data)[HEADER_ROOM:]], stored.partition(":")[0])
    except (
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
        ImportError,
    ) as error:
        raise HiddenStatesError(path, f"its checksum cannot be read: {error}") from (
            error
        )
    if found != stored:
        cause = f"the file there has changed: its checksum is {found}, not {stored}"
        raise HiddenStatesError(path, cause)


def is_hidden_states_file(path: str, key: str = VERSION_KEY) -> bool:
    """Whether a complete file at a path is one of ours, by a key of its metadata."""
    try:
        fd = _open_file(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        size = int.from_bytes(os.pread(fd, 8, 0), "little")
        if size > HEADER_ROOM:  # ours has this room, and no more
            return False
        header = json.loads(os.pread(fd, size, 8))
        return key in header["__metadata__"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False
    finally:
        os.close(fd)


def _note(about: dict[str, str], cause: str, advice: str | None = None) -> bytes:
    note = about | {"cause": cause[:MAX_CAUSE]}
    text = _encoded(note | ({"advice": advice} if advice else {}))
    if len(text) <= HEADER_ROOM:
        return text
    # JSON has six bytes for a control character.
    shorter = advice and advice[: len(advice) // 2]
    return _note(about, cause[: min(len(cause), MAX_CAUSE) // 2], shorter)


def is_note(path: str) -> bool:
    """Whether what stands at a path is a note of ours."""
    # What goes on after that is none.
    return {"request_id", "cause"} <= set(_about(path, HEADER_ROOM + 1))


def _about(path: str, size: int = HEADER_ROOM) -> dict[str, str]:
    """What a file that is not complete says of itself, or a note; empty if nothing."""
    try:
        fd = _open_file(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return {}
    try:
        about = json.loads(os.pread(fd, size, 0))
        return about if isinstance(about, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(fd)


def is_anothers(path: str) -> bool:
    """Whether what stands at a path, or comes there, is no file of a chosen path.

    Such as one of an engine's own choice, which somebody has been told of.
    """
    if os.path.lexists(path) and not is_hidden_states_file(path, CHOSEN_KEY):
        return True
    for other in (path + PARTIAL_SUFFIX, path + ERROR_SUFFIX):
        try:
            fd = _open_file(other, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except OSError:
            return True
        try:
            if os.fstat(fd).st_size and not _has_mark(fd, CHOSEN_KEY):
                return True
        finally:
            os.close(fd)
    return False


def _has_mark(fd: int, key: str = VERSION_KEY) -> bool:
    """Whether a file is one that we were writing, by a key that it says."""
    return f'"{key}"'.encode() in os.pread(fd, HEADER_ROOM, 0)


def note_death(path: str) -> bool:
    """Make what a dead writer left at ``path`` a note; False if its writer lives.

    Args:
        path: Where the file would have been.
    """
    try:
        fd = _open_file(path + PARTIAL_SUFFIX, os.O_RDWR | os.O_NOFOLLOW)
    except (FileNotFoundError, _NotAFileError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(path + PARTIAL_SUFFIX)):
            return False
        if os.fstat(fd).st_size and not _has_mark(fd):
            return False  # a download, perhaps
        # Its writer's, which could not rename it.
        if not is_note(path + PARTIAL_SUFFIX):
            about = {"request_id": ""} | _about(path + PARTIAL_SUFFIX)
            text = _note(about, "its writer ended before the file was complete")
            os.ftruncate(fd, HEADER_ROOM)
            _write_at(fd, memoryview(text.ljust(HEADER_ROOM)), 0)
        os.rename(path + PARTIAL_SUFFIX, path + ERROR_SUFFIX)
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(fd)
    return True


def remove_unheld(path: str) -> bool:
    """Remove a lock file that nobody holds; whether it was removed."""
    try:
        fd = _open_file(path, os.O_RDONLY | os.O_NOFOLLOW)
    except (FileNotFoundError, _NotAFileError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(path)) or os.fstat(fd).st_size:
            return False
        os.unlink(path)
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(fd)
    return True


def _encoded(value: Any) -> bytes:
    # A client's request id may hold what UTF-8 cannot.
    return _ENCODER.encode(value).encode(errors="replace")


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
