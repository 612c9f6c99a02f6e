# SPDX-License-Identifier: Apache-2.0
"""Threads that give rows to sinks, in order within each request."""

import contextlib
import errno
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_file import (
    MAX_CAUSE,
    advice_about,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_sink import (
    OpenSink,
    RowSpan,
    Sink,
    SinkRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_stats import (
    StatsCollector,
)
from vllm.logger import init_logger
from vllm.v1.hidden_states.plan import Span
from vllm.v1.hidden_states.ring import Slot

logger = init_logger(__name__)

# What may pass by itself: somebody else's hold, a shortage of descriptors or memory.
TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.EEXIST,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ETIMEDOUT,
    }
)
# By which vLLM has OpenMP's runtimes bind a worker's threads.
BINDINGS = {"GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND"}
# Seconds between attempts: four in all, within less than half a second.
RETRY_DELAYS = (0.02, 0.08, 0.32)


def make_pool(num_threads: int, spread: bool) -> ThreadPoolExecutor:
    """Threads for writers.

    Args:
        num_threads: How many.
        spread: vLLM may have bound this process's threads to processors, as it does on
            a CPU. A thread inherits that, and all would share the one of the thread
            that runs the model: instead they run wherever the engine's process may.
    """
    return ThreadPoolExecutor(
        num_threads,
        thread_name_prefix="hidden-states-writer",
        initializer=_spread if spread else None,
    )


def _spread() -> None:
    engine = multiprocessing.parent_process()
    if engine is None or engine.pid is None or not BINDINGS & os.environ.keys():
        return  # bound by nobody, or by whoever started the engine
    # Where that cannot be, they are as slow as they would have been.
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(engine.pid))


class Activity:
    """How many writers have something to do."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_busy = 0

    def add(self, number: int) -> None:
        """So many more are busy, or fewer."""
        with self._changed:
            self._num_busy += number
            if self._num_busy == 0:
                self._changed.notify_all()

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait, for so many seconds at the most; whether no writer is busy."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_busy == 0, timeout)


class RequestWriter:
    """Gives one request's rows to its sink; the calls return at once.

    What is asked for is done in order, by one thread of the pool at a time: a row
    computed again must not be overtaken by its older self. After a failure nothing
    more is written; ``failure`` says what it was.

    Args:
        pool: Threads shared by all requests.
        request: Whose rows come.
        open_sink: Makes its sink, in a thread of the pool.
        columns: Which of a slot's layers are wanted, by their place; None for all.
        stats: What is counted.
        is_inline: The rows are for the engine, which waits for them.
        activity: Hears when the writer has something to do, and when no more.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        request: SinkRequest,
        open_sink: OpenSink,
        columns: tuple[int, ...] | None = None,
        stats: StatsCollector | None = None,
        is_inline: bool = False,
        activity: Activity | None = None,
    ):
        self.request = request
        self.is_inline = is_inline
        self.failure: str | None = None
        self._pool = pool
        self._open_sink = open_sink
        self._sink: Sink | None = None
        self._columns = columns
        self._stats = stats or StatsCollector()
        self._activity = activity or Activity()
        # Leading rows that the sink has.
        self._num_rows = 0
        self._tasks: deque[Callable[[], None]] = deque()
        self._mutex = threading.Lock()
        self._is_running = False
        self._gives_way = False
        self._turn = threading.Lock()
        self._given_up = ""
        self._is_complete = False

    def open(self) -> "Future[None]":
        """Make the sink. The future is done when it is there or has failed.

        The step waits for that, and for no row: others' sinks come before these rows.
        """
        done: Future[None] = Future()

        def open_sink() -> None:
            sink = self._open_sink(self.request)
            if not isinstance(sink, Sink):  # a third party's function
                raise TypeError(f"{sink!r} is no Sink")
            self._sink = sink
            logger.debug(
                "Hidden states of %s: opened %s",
                self.request.request_id,
                self.request.path,
            )

        def task() -> None:
            try:
                self._try("create", open_sink)
            finally:
                self._gives_way = True
                done.set_result(None)

        self._submit(task)
        return done

    def write(self, span: Span, slot: Slot, slot_row: int) -> None:
        """Give the span's rows, from ``slot_row`` on; releases the slot once."""

        def write_rows() -> None:
            slot.wait()
            position = slot.position(slot_row, span.position)
            self._refuse_gap(position)
            rows = RowSpan(
                position,
                span.num_rows,
                slot.row_bytes(slot_row, span.num_rows, self._columns),
                slot.row_scales(slot_row, span.num_rows),
            )
            if self.request.is_narrower:
                _refuse_out_of_range(rows)
            assert self._sink is not None
            start = time.monotonic()
            self._sink.write(rows)
            seconds = time.monotonic() - start
            self._stats.wrote(span.num_rows, rows.num_bytes, seconds)
            end = position + span.num_rows
            # A preempted request starts over: rows again, to the same places.
            self._num_rows = max(self._num_rows, end)
            logger.debug(
                "Hidden states of %s: rows %d to %d",
                self.request.request_id,
                position,
                end - 1,
            )

        def task() -> None:
            try:
                self._try("write", write_rows)
            finally:
                slot.release()

        self._submit(task)

    def finish(self, token_ids: np.ndarray) -> None:
        """All rows have been given, as many as token ids."""

        def finish() -> None:
            self._refuse_gap(len(token_ids))
            assert self._sink is not None
            self._sink.finish(token_ids)
            self._is_complete = True
            self._stats.completed()
            logger.debug(
                "Hidden states of %s: complete, %d rows",
                self.request.request_id,
                len(token_ids),
            )

        self._submit(lambda: self._try("complete", finish))

    def fail(self, cause: str) -> None:
        """No more rows will come, for a reason that is not the sink's."""
        self._submit(lambda: self._fail(cause, "engine"))

    def remove(self) -> None:
        """Take back whatever there is, complete or not: the request was aborted."""
        self._submit(self._remove)

    def give_up(self, cause: str) -> None:
        """Do nothing more of what was asked for, but withdraw what is not complete."""
        self._given_up = cause

    @property
    def is_idle(self) -> bool:
        """Whether all that was asked for is done."""
        with self._mutex:
            return not self._is_running

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
        if self.failure is None:
            self.failure = "the request was aborted"
            self._stats.aborted()
        logger.debug("Hidden states of %s: removed", self.request.request_id)
        if self._sink is None:
            return
        try:
            self._sink.withdraw(None)
        except BaseException as error:
            logger.error("Cannot remove %s: %s", self.request.path, error)

    def _try(self, verb: str, action: Callable[[], None]) -> None:
        if self.failure is not None:
            return None
        if self._given_up and not self._is_complete:
            return self._fail(self._given_up, "shutdown")
        delays = iter(RETRY_DELAYS)
        while True:
            try:
                return action()
            except BaseException as error:  # whatever it is, the reader must be told
                number = error.errno if isinstance(error, OSError) else None
                delay = next(delays, None) if number in TRANSIENT else None
                if delay is None:
                    what = "rows" if self.is_inline else "file"
                    cause = f"cannot {verb} the {what}: {_sentence(error)}"
                    kind = errno.errorcode.get(number or 0, type(error).__name__)
                    return self._fail(cause, kind, advice_about(error))
            time.sleep(delay)

    def _fail(self, cause: str, kind: str, advice: str | None = None) -> None:
        if self.failure is not None:
            return
        # A client gets it, through processes that exchange UTF-8.
        cause = cause[:MAX_CAUSE].encode(errors="replace").decode()
        self.failure = f"{cause} ({advice})" if advice else cause
        self._stats.failed(kind)
        logger.error(
            "Hidden states of request %s are lost, %s: %s",
            self.request.request_id,
            self.request.path,
            self.failure,
        )
        if self._sink is None:
            return
        try:
            self._sink.withdraw(cause, advice)
        except BaseException as error:
            logger.error("Cannot leave a note at %s: %s", self.request.path, error)

    def _submit(self, task: Callable[[], None]) -> None:
        with self._mutex:
            self._tasks.append(task)
            if self._is_running:
                return
            self._is_running = True
        self._activity.add(1)
        if not self._queue():
            self._run()

    def _queue(self) -> bool:
        """Have the tasks run by the pool, after what it has to do already."""
        try:
            self._pool.submit(self._run)
        except RuntimeError:  # no more threads, as when the interpreter exits
            return False
        return True

    def _run(self) -> None:
        with self._turn:  # a pool that cannot start a thread may still run it later
            while True:
                gives_way, self._gives_way = self._gives_way, False
                with self._mutex:
                    is_done, was_running = not self._tasks, self._is_running
                    if is_done:
                        self._is_running = False
                if is_done:
                    self._activity.add(-was_running)
                    return
                if gives_way and self._queue():
                    return
                with self._mutex:
                    task = self._tasks.popleft()
                try:
                    task()
                except BaseException as error:  # a sink's; the next task must run
                    self.failure = self.failure or f"ended by {type(error).__name__}"
                    logger.exception("Hidden states of %s", self.request.request_id)


def _refuse_out_of_range(rows: RowSpan) -> None:
    """Raise where a value has been lost by a storage type of a smaller range."""
    if rows.scales is not None:
        is_lost = not np.isfinite(np.frombuffer(rows.scales, np.float32)).all()
        valid = "'float32' or 'auto'"
    else:  # float16, whose exponent has all bits set where it is not finite
        bits = np.frombuffer(rows.data, np.uint16) & 0x7FFF
        is_lost = bool(bits.max(initial=0) >= 0x7C00)
        valid = "'bfloat16', 'float32' or 'auto'"
    if is_lost:
        raise ValueError(
            f"a value of rows {rows.position} to {rows.position + rows.num_rows - 1} "
            f"is out of the range of storage_dtype, or not finite; valid: {valid}"
        )


def _sentence(error: BaseException) -> str:
    """What an exception says, which may be of a third party's making."""
    try:
        return str(error) or repr(error)
    except Exception:
        return type(error).__name__
