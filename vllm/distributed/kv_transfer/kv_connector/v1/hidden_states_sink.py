# SPDX-License-Identifier: Apache-2.0
"""Where a request's rows go: a file, the response, or wherever a third party says.

A sink takes the rows of one request. Who wants rows elsewhere (an object store, RDMA,
shared memory) writes a function ``open(request: SinkRequest) -> Sink`` in a module of
their own, and names it in the connector's option ``sink``, as in
``"my_package.my_module:open_sink"``. See ``docs/features/hidden_states_sinks.md``.
"""

import importlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_file import (
    FileOptions,
    HiddenStatesFile,
    is_anothers,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_metadata import (
    InlineRows,
)
from vllm.v1.hidden_states.dtypes import FLOAT8


@dataclass(frozen=True)
class SinkRequest:
    """One request, as its sink has to know it."""

    request_id: str
    path: str
    """What the client is told as ``hidden_states_path``."""

    token_ids: np.ndarray
    """``[num_prompt_tokens]`` int64; -1 where the prompt has embeddings only."""

    num_rows: int | None
    """How many rows will come; None where the output's are among them."""

    layer_ids: tuple[int, ...]
    """Of the columns, in their order."""

    hidden_size: int
    dtype: torch.dtype
    """Of the rows as they are stored."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    """What a file would say of itself; see ``docs/features``."""

    model_dtype: torch.dtype | None = None
    """Of the model that computes them; None for the same."""

    @property
    def bytes_per_row(self) -> int:
        """Of a row ``[num_layers, hidden_size]``."""
        return len(self.layer_ids) * self.hidden_size * self.dtype.itemsize

    @property
    def is_narrower(self) -> bool:
        """Whether there are values of the model that cannot be stored."""
        computed = self.model_dtype or self.dtype
        return self.dtype != computed and self.dtype in (FLOAT8, torch.float16)


@dataclass(frozen=True)
class RowSpan:
    """Rows ``[num_rows, num_layers, hidden_size]`` of one step."""

    position: int
    """Of the first row's token, from 0."""

    num_rows: int
    data: memoryview
    """Row-major bytes, whose memory is used again after the call."""

    scales: memoryview | None = None
    """``[num_rows]`` float32, whose memory is, too: what each row's values have to be
    multiplied by. None but for float8_e4m3."""

    @property
    def num_bytes(self) -> int:
        """Of the rows, with their scales."""
        return len(self.data) + len(self.scales or b"")


class Sink(ABC):
    """Takes one request's rows. No two calls are made at once, nor in a model's step.

    Rows of a request that was preempted come again, for the same positions. A call
    that raises ``OSError`` for a reason that may pass (``TRANSIENT``) is made again, a
    few times; after any other exception only ``withdraw`` is called.
    """

    @abstractmethod
    def write(self, span: RowSpan) -> None:
        """Take rows. None before them is missing."""

    @abstractmethod
    def finish(self, token_ids: np.ndarray) -> None:
        """All rows have come.

        Args:
            token_ids: ``[num_rows]`` int64, of all rows.
        """

    @abstractmethod
    def withdraw(self, cause: str | None, advice: str | None = None) -> None:
        """Take back what there is; after ``finish``, too. May be called twice.

        Args:
            cause: What went wrong, for whoever has been told the path. None where the
                request was aborted, and nobody has; or, after a call with a cause,
                where the response had it, and nobody will ask.
            advice: What an operator may do about it, where that is known.
        """


OpenSink = Callable[[SinkRequest], Sink]


def find_sink(name: str) -> OpenSink:
    """The function of an option ``sink``, such as ``"package.module:function"``.

    Raises:
        ValueError: naming the option and its value.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever the module does when it is imported
        raise ValueError(
            f"sink {name!r} cannot be imported ({error}); valid: "
            "'package.module:function'"
        ) from error
    if not callable(found):
        raise ValueError(f"sink {name!r} is no function of a request")
    open_sink: OpenSink = found
    return open_sink


class FileSink(Sink):
    """One ``.safetensors`` file; see ``hidden_states_file``.

    Args:
        request: Whose rows come.
        options: Of files.
        roots: Directories of which one has to hold the file, symbolic links followed;
            None where its path is the engine's own.

    Raises:
        OSError: if the file cannot be made; nothing is left behind.
    """

    def __init__(
        self,
        request: SinkRequest,
        options: FileOptions,
        roots: Sequence[str] | None = None,
    ):
        self._request = request
        self.file = HiddenStatesFile(
            request.path, request.request_id, options, is_chosen=roots is not None
        )
        # Small, and their place in the file is behind the last row.
        self._scales = Rows(4)
        if roots is not None:
            confine(request.path, roots)
        # With the scale and the token id of each row.
        num_bytes = request.bytes_per_row + (4 if request.dtype == FLOAT8 else 0) + 8
        self.file.open((request.num_rows or 0) * num_bytes)

    def write(self, span: RowSpan) -> None:
        self.file.write(span.position * self._request.bytes_per_row, span.data)
        if span.scales is not None:
            self._scales.put(span.position, span.scales)

    def finish(self, token_ids: np.ndarray) -> None:
        self.file.finish(
            token_ids,
            len(self._request.layer_ids),
            self._request.hidden_size,
            self._request.dtype,
            dict(self._request.metadata),
            self._scales.take(len(token_ids)),
        )

    def withdraw(self, cause: str | None, advice: str | None = None) -> None:
        if cause is None:
            self.file.remove()
        elif self.file.is_open:
            self.file.fail(cause, advice)


def confine(path: str, roots: Sequence[str]) -> None:
    """Refuse a path that a client chose and that leads elsewhere.

    Raises:
        PermissionError: if no root holds it.
        FileExistsError: if what stands there is nothing that we wrote, or was written
            for a client who had not named the path.
    """
    directory = os.path.realpath(os.path.dirname(path))
    for root in map(os.path.realpath, roots):
        if os.path.commonpath([root, directory]) == root:
            break
    else:
        raise PermissionError(f"{directory!r} is outside of {', '.join(roots)}")
    if is_anothers(path):
        raise FileExistsError(
            f"{path!r} is there, and no file of hidden states that a client has named"
        )


class Rows:
    """Rows in memory, by their positions; of a request that was preempted, again.

    Args:
        bytes_per_row: Of each.
    """

    def __init__(self, bytes_per_row: int):
        self._bytes_per_row = bytes_per_row
        self.data = bytearray()

    def put(self, position: int, data: bytes | memoryview) -> None:
        """Rows from ``position`` on, before which none is missing."""
        first = position * self._bytes_per_row
        self.data[first : first + len(data)] = data

    def take(self, num_rows: int) -> memoryview:
        """The first rows, of as many as there are."""
        return memoryview(self.data)[: num_rows * self._bytes_per_row]


class WholeTensorSink(Sink):
    """Calls a connector's ``_write_tensors`` with whole tensors, as stock vLLM does.

    For subclasses that write files of their own kind. All rows of a request are kept
    in memory until it is complete.

    Args:
        request, options, roots: See ``FileSink``.
        write_tensors: ``(tensors, event, filename, lock_fd)``.
    """

    def __init__(
        self,
        request: SinkRequest,
        options: FileOptions,
        write_tensors: Callable[[dict[str, torch.Tensor], Any, str, int | None], None],
        roots: Sequence[str] | None = None,
    ):
        self._request = request
        if roots is not None:
            confine(request.path, roots)
        self._write_tensors = write_tensors
        self._rows = Rows(request.bytes_per_row)
        self.file = HiddenStatesFile(
            request.path, request.request_id, options, is_chosen=roots is not None
        )
        self.file.open()

    def write(self, span: RowSpan) -> None:
        self._rows.put(span.position, span.data)

    def finish(self, token_ids: np.ndarray) -> None:
        request = self._request
        shape = (len(token_ids), len(request.layer_ids), request.hidden_size)
        data = self._rows.take(len(token_ids))
        rows = torch.frombuffer(data, dtype=torch.uint8)
        tensors = {
            "hidden_states": rows.view(request.dtype).view(shape),
            "token_ids": torch.from_numpy(token_ids.copy()),
        }
        self.file.finish_by(
            lambda path, lock_fd: self._write_tensors(tensors, _Done(), path, lock_fd)
        )
        self._rows = Rows(self._request.bytes_per_row)

    def withdraw(self, cause: str | None, advice: str | None = None) -> None:
        self._rows = Rows(self._request.bytes_per_row)
        if cause is None:
            self.file.remove()
        elif self.file.is_open:
            self.file.fail(cause, advice)


class _Done:
    """In place of a device's event: the tensors are on the host already."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Outbox:
    """What inline sinks of one worker have for the engine, until its next word."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._rows: list[InlineRows] = []

    def put(self, rows: InlineRows) -> None:
        """Rows of a request."""
        with self._mutex:
            self._rows.append(rows)

    def take(self) -> list[InlineRows]:
        """All that has come since the last time."""
        with self._mutex:
            rows, self._rows = self._rows, []
        return rows


class InlineSink(Sink):
    """Sends rows to the engine as they come, for the response; makes no file."""

    def __init__(self, request: SinkRequest, outbox: Outbox):
        self._request_id = request.request_id
        self._outbox = outbox

    def write(self, span: RowSpan) -> None:
        scales = b"" if span.scales is None else bytes(span.scales)
        self._outbox.put(
            InlineRows(self._request_id, span.position, bytes(span.data), scales)
        )

    def finish(self, token_ids: np.ndarray) -> None:
        """Nothing to do: the engine has all rows, and knows their number."""

    def withdraw(self, cause: str | None, advice: str | None = None) -> None:
        """Nothing to do: the engine drops what it has."""
