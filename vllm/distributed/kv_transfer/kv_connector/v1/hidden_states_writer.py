# SPDX-License-Identifier: Apache-2.0
"""Threads that write rows to files, in order within each file."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_file import (
    HiddenStatesFile,
)
from vllm.logger import init_logger
from vllm.v1.hidden_states.plan import Span
from vllm.v1.hidden_states.ring import Slot

logger = init_logger(__name__)


class FileWriter:
    """Writes one request's file; the calls return at once.

    What is asked for is done in order, by one thread of the pool at a time: a row
    computed again must not be overtaken by its older self. After a failure nothing
    more is written; ``failure`` says what it was.

    Args:
        pool: Threads shared by all files.
        file: Not yet open.
        shape: ``(layers, hidden size)`` of a row in the file.
        dtype: Of the rows.
        columns: Which of a slot's layers are in the file, by their place; None for
            all.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        file: HiddenStatesFile,
        shape: tuple[int, int],
        dtype: torch.dtype,
        columns: tuple[int, ...] | None = None,
    ):
        self.file = file
        self.failure: str | None = None
        self._pool = pool
        self._num_layers, self._hidden_size = shape
        self._dtype = dtype
        self._columns = columns
        # Leading rows that stand in the file.
        self._num_rows = 0
        self._bytes_per_row = shape[0] * shape[1] * dtype.itemsize
        self._tasks: deque[Callable[[], None]] = deque()
        self._mutex = threading.Lock()
        self._is_running = False
        self._turn = threading.Lock()

    def open(self) -> "Future[None]":
        """Make the file. The future is done when it is there or has failed."""
        done: Future[None] = Future()

        def task() -> None:
            self._try("create", self.file.open)
            done.set_result(None)

        self._submit(task)
        return done

    def write(self, span: Span, slot: Slot, slot_row: int) -> None:
        """Write the span's rows, from ``slot_row`` on; releases the slot once."""

        def write_rows() -> None:
            slot.wait()
            position = slot.position(slot_row, span.position)
            self._refuse_gap(position)
            self.file.write(
                position * self._bytes_per_row,
                slot.row_bytes(slot_row, span.num_rows, self._columns),
            )
            # A preempted request starts over: rows again, to the same places.
            self._num_rows = max(self._num_rows, position + span.num_rows)

        def task() -> None:
            try:
                self._try("write", write_rows)
            finally:
                slot.release()

        self._submit(task)

    def finish(self, token_ids: np.ndarray, metadata: dict[str, str]) -> None:
        """All rows have been given: complete the file, with as many as token ids."""

        def finish_file() -> None:
            self._refuse_gap(len(token_ids))
            self.file.finish(
                token_ids, self._num_layers, self._hidden_size, self._dtype, metadata
            )

        self._submit(lambda: self._try("complete", finish_file))

    def fail(self, cause: str) -> None:
        """No file will come, for a reason that is not the disk's."""
        self._submit(lambda: self._fail(cause))

    def remove(self) -> None:
        """Take back whatever there is, complete or not: the request was aborted."""
        self._submit(self._remove)

    def drain(self) -> None:
        """Wait until all that was asked for is done."""
        done: Future[None] = Future()
        self._submit(lambda: done.set_result(None))
        done.result()

    def _refuse_gap(self, position: int) -> None:
        if position > self._num_rows:
            raise ValueError(
                f"rows {self._num_rows} to {position - 1} were not computed by this "
                "engine"
            )

    def _remove(self) -> None:
        self.failure = self.failure or "the request was aborted"
        try:
            self.file.remove()
        except Exception as error:
            logger.error("Cannot remove %s: %s", self.file.path, error)

    def _try(self, verb: str, action: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            action()
        except Exception as error:  # whatever it is, the reader must be told
            self._fail(f"cannot {verb} the file: {error or repr(error)}")

    def _fail(self, cause: str) -> None:
        if self.failure is not None:
            return
        self.failure = cause
        logger.error(
            "Hidden states of request %s are lost, %s: %s",
            self.file.request_id,
            self.file.path,
            cause,
        )
        if not self.file.is_open:
            return
        try:
            self.file.fail(cause)
        except Exception as error:
            logger.error("Cannot leave a note at %s: %s", self.file.path, error)

    def _submit(self, task: Callable[[], None]) -> None:
        with self._mutex:
            self._tasks.append(task)
            if self._is_running:
                return
            self._is_running = True
        try:
            self._pool.submit(self._run)
        except RuntimeError:  # no more threads, as when the interpreter exits
            self._run()

    def _run(self) -> None:
        with self._turn:  # a pool that cannot start a thread may still run it later
            while True:
                with self._mutex:
                    if not self._tasks:
                        self._is_running = False
                        return
                    task = self._tasks.popleft()
                task()
