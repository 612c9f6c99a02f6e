# SPDX-License-Identifier: Apache-2.0
"""Sinks, the writers that drive them, and what is counted on the way."""

import asyncio
import errno
import fcntl
import json
import logging
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from safetensors.torch import save, save_file

from vllm.distributed.kv_transfer.kv_connector.v1 import (
    hidden_states_stats as counted,
)
from vllm.distributed.kv_transfer.kv_connector.v1 import hidden_states_writer
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    MAX_PAUSE,
    MAX_SHARE,
    ExampleHiddenStatesConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_file import (
    ADVICE,
    FileOptions,
    HiddenStatesError,
    HiddenStatesTimeoutError,
    load_hidden_states,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_sink import (
    FileSink,
    InlineSink,
    Outbox,
    RowSpan,
    Sink,
    SinkRequest,
    WholeTensorSink,
    find_sink,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_stats import (
    HiddenStatesPromMetrics,
    HiddenStatesStats,
    StatsCollector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_writer import (
    RETRY_DELAYS,
    TRANSIENT,
    RequestWriter,
)
from vllm.v1.hidden_states.plan import Span
from vllm.v1.hidden_states.ring import Ring

L, H, MAX_ROWS = 3, 4, 8
CPU = torch.device("cpu")


def make_request(
    path="/nowhere/a.safetensors",
    num_tokens: int = 6,
    request_id: str = "request",
    num_layers: int = L,
    dtype=torch.float32,
    knows_rows: bool = True,
) -> SinkRequest:
    return SinkRequest(
        request_id,
        str(path),
        np.arange(num_tokens),
        num_tokens if knows_rows else None,
        tuple(range(num_layers)),
        H,
        dtype,
        {"layer_ids": str(list(range(num_layers)))},
    )


class MemorySink(Sink):
    """Keeps rows in memory, and notes how it was called."""

    def __init__(self, request: SinkRequest):
        self.request = request
        self.rows: dict[int, bytes] = {}
        self.spans: list[tuple[int, int]] = []
        self.token_ids: list[int] | None = None
        self.withdrawn: list[tuple[str | None, str | None]] = []
        self.calls: list[str] = []
        # Raised by the next calls of a name, one each.
        self.errors: dict[str, list[BaseException]] = {}
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self._mutex = threading.Lock()

    def _enter(self, name: str) -> None:
        assert self._mutex.acquire(blocking=False), "two calls at once"
        try:
            self.calls.append(name)
            self.entered.set()
            if self.gate is not None:
                assert self.gate.wait(10)
            if self.errors.get(name):
                raise self.errors[name].pop(0)
        finally:
            self._mutex.release()

    def write(self, span: RowSpan) -> None:
        self._enter("write")
        size = self.request.bytes_per_row
        assert len(span.data) == span.num_rows * size
        self.spans.append((span.position, span.num_rows))
        data = bytes(span.data)
        for row in range(span.num_rows):
            self.rows[span.position + row] = data[row * size : (row + 1) * size]

    def finish(self, token_ids: np.ndarray) -> None:
        self._enter("finish")
        self.token_ids = token_ids.tolist()

    def withdraw(self, cause: str | None, advice: str | None = None) -> None:
        self._enter("withdraw")
        self.withdrawn.append((cause, advice))

    def tensor(self) -> torch.Tensor:
        data = bytearray(b"".join(self.rows[place] for place in sorted(self.rows)))
        shape = (len(self.rows), len(self.request.layer_ids), H)
        return torch.frombuffer(data, dtype=self.request.dtype).view(shape)


class Engine:
    """A ring, a pool, and steps that give rows to writers, as the connector does."""

    def __init__(self, num_slots: int = 2, num_threads: int = 2, **settings):
        self.ring = Ring(num_slots, (MAX_ROWS, L, H), torch.float32, CPU, **settings)
        self.pool = ThreadPoolExecutor(num_threads)
        self.stats = StatsCollector()
        self.sinks: dict[str, MemorySink] = {}
        self.open_errors: list[BaseException] = []

    def open_sink(self, request: SinkRequest) -> MemorySink:
        if self.open_errors:
            raise self.open_errors.pop(0)
        self.sinks[request.request_id] = sink = MemorySink(request)
        return sink

    def open_sink_behind(self, gate: threading.Event):
        def open_sink(request: SinkRequest) -> MemorySink:
            assert gate.wait(10)
            return self.open_sink(request)

        return open_sink

    def writer(self, request=None, open_sink=None, columns=None) -> RequestWriter:
        writer = RequestWriter(
            self.pool,
            request or make_request(),
            open_sink or self.open_sink,
            columns,
            self.stats,
        )
        writer.open()
        return writer

    def step(self, *parts: tuple[RequestWriter, int, torch.Tensor], **told) -> None:
        """One step: for each part its writer, first position, and rows."""
        rows = torch.cat([rows for _, _, rows in parts])
        layers = [rows[:, layer].contiguous() for layer in range(L)]
        slot = self.ring.acquire()
        spans, row = [], 0
        for writer, position, part in parts:
            spans.append(Span(writer.request.request_id, row, position, len(part)))
            row += len(part)
        slot.fill(layers, spans, **told)
        slot.retain(len(spans))
        for (writer, _, _), span in zip(parts, spans, strict=True):
            writer.write(span, slot, span.row)
        slot.release()

    def all_slots_are_free(self) -> bool:
        return self.ring.num_free == self.ring.num_slots

    def counts(self) -> dict:
        taken = self.stats.take(0, 0.0)
        data = dict(taken.data) if taken is not None else {}
        data.pop("write_seconds", None)
        return data


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    assert engine.all_slots_are_free()
    engine.pool.shutdown()


@pytest.fixture(autouse=True)
def no_delays(monkeypatch):
    """As many attempts as ever, without the waits."""
    delays = (0.0,) * len(RETRY_DELAYS)
    monkeypatch.setattr(hidden_states_writer, "RETRY_DELAYS", delays)


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def log():
    """What vLLM logs. Not ``caplog``: vLLM decides whether its loggers propagate."""
    logger = logging.getLogger("vllm")
    records, level = Records(), logger.level
    logger.addHandler(records)
    yield records
    logger.removeHandler(records)
    logger.setLevel(level)


def make_rows(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, L, H)


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


# ---- Rows ----------------------------------------------------------------------


def chunks(data, total: int) -> list[tuple[int, int]]:
    """Steps of a request, in which some are undone: it was preempted."""
    steps: list[tuple[int, int]] = []
    for is_last in (*data.draw(st.lists(st.just(False), max_size=2)), True):
        end = total if is_last else data.draw(st.integers(1, total))
        cuts = data.draw(st.sets(st.integers(1, end)))
        edges = sorted(cuts | {0, end} | set(range(0, end, MAX_ROWS // 2)))
        steps += [(first, after - first) for first, after in pairwise(edges)]
    return steps


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    totals=st.lists(st.integers(1, 20), min_size=2, max_size=2),
    columns=st.sampled_from([None, (1,), (2, 0), (0, 1, 2)]),
)
def test_rows_are_right_whatever_the_steps(data, totals, columns):
    """Of two requests that share steps: the last time that a row came counts."""
    engine = Engine(num_threads=4)
    writers, plans, expected = [], [], []
    for number, total in enumerate(totals):
        num_layers = L if columns is None else len(columns)
        request = make_request(
            num_tokens=total, request_id=f"r{number}", num_layers=num_layers
        )
        writers.append(engine.writer(request, columns=columns))
        plans.append(chunks(data, total))
        expected.append(torch.full((total, L, H), torch.nan))
    told: list[list[tuple[int, int]]] = [list(plan) for plan in plans]
    while any(plans):
        unfinished = [number for number, plan in enumerate(plans) if plan]
        batches = [unfinished, unfinished[:1], unfinished[-1:], unfinished[::-1]]
        parts = []
        for number in data.draw(st.sampled_from(batches)):
            position, num_rows = plans[number].pop(0)
            rows = make_rows(num_rows)
            expected[number][position : position + num_rows] = rows
            parts.append((writers[number], position, rows))
        engine.step(*parts)
    for number, (writer, total) in enumerate(zip(writers, totals, strict=True)):
        writer.finish(np.arange(total) * 7)
        writer.drain()
        assert writer.failure is None
        sink = engine.sinks[f"r{number}"]
        wanted = expected[number]
        assert torch.equal(
            sink.tensor(), wanted if columns is None else wanted[:, list(columns)]
        )
        assert sink.spans == told[number]
        assert sink.calls == ["write"] * len(told[number]) + ["finish"]
        assert sink.token_ids == [7 * place for place in range(total)]
    assert engine.all_slots_are_free()
    engine.pool.shutdown()


def test_positions_are_the_slots_where_it_keeps_them(request):
    engine = Engine(with_positions=True)
    writer = engine.writer()
    rows = make_rows(6)
    # The plan was made before the step that came before it was known.
    engine.step((writer, 99, rows[:4]), positions=torch.arange(0, 4))
    engine.step((writer, 99, rows[4:]), positions=torch.arange(4, 6))
    writer.drain()
    assert writer.failure is None
    assert torch.equal(engine.sinks["request"].tensor(), rows)
    engine.pool.shutdown()


def test_a_slot_is_held_until_the_sink_has_its_rows(engine):
    writer = engine.writer()
    writer.drain()
    sink = engine.sinks["request"]
    sink.gate = threading.Event()
    engine.step((writer, 0, make_rows(6)))
    assert sink.entered.wait(10)
    assert engine.ring.num_free == 1
    assert not writer.is_idle
    sink.gate.set()
    writer.drain()
    assert engine.ring.num_free == 2
    wait_until(lambda: writer.is_idle)


def test_rows_that_nobody_computed_are_an_error(engine):
    writer = engine.writer()
    engine.step((writer, 0, make_rows(2)))
    engine.step((writer, 3, make_rows(2)))
    writer.drain()
    assert "rows 2 to 2 were not computed by this engine" in writer.failure
    sink = engine.sinks["request"]
    assert sink.calls == ["write", "withdraw"]
    assert engine.counts()["files_failed"] == {"ValueError": 1}


def test_rows_that_are_there_stay_there(engine):
    """Also where some of them come again, and not all."""
    writer = engine.writer()
    rows = make_rows(6)
    engine.step((writer, 0, rows))
    engine.step((writer, 0, rows[:2]))
    writer.finish(np.arange(6))
    writer.drain()
    assert writer.failure is None
    assert torch.equal(engine.sinks["request"].tensor(), rows)


def test_a_slow_sink_keeps_one_thread_from_the_others():
    engine = Engine(num_slots=8, num_threads=2)
    slow, quick = (
        engine.writer(make_request(request_id=name)) for name in ("slow", "quick")
    )
    slow.drain()
    engine.sinks["slow"].gate = threading.Event()
    for position in range(6):
        engine.step((slow, position, make_rows(1)))
    assert engine.sinks["slow"].entered.wait(10)
    engine.step((quick, 0, make_rows(6)))
    quick.finish(np.arange(6))
    wait_until(lambda: quick.is_idle)
    assert engine.sinks["quick"].calls == ["write", "finish"]
    assert engine.sinks["slow"].calls == ["write"]
    engine.sinks["slow"].gate.set()
    slow.drain()
    assert engine.sinks["slow"].calls == ["write"] * 6
    assert engine.all_slots_are_free()
    engine.pool.shutdown()


def test_too_few_rows_are_no_complete_file(engine):
    writer = engine.writer()
    engine.step((writer, 0, make_rows(5)))
    writer.finish(np.arange(6))
    writer.drain()
    assert "rows 5 to 5 were not computed" in writer.failure
    assert engine.sinks["request"].calls == ["write", "withdraw"]


def test_the_calls_return_at_once(engine):
    gate = threading.Event()
    writer = engine.writer(open_sink=engine.open_sink_behind(gate))
    rows = make_rows(6)
    engine.step((writer, 0, rows[:3]))
    engine.step((writer, 3, rows[3:]))
    writer.finish(np.arange(6))
    assert not writer.is_idle
    assert engine.ring.num_free == 0  # the next step waits: memory is bounded
    gate.set()
    writer.drain()
    assert torch.equal(engine.sinks["request"].tensor(), rows)
    assert engine.sinks["request"].token_ids == list(range(6))


def test_sinks_are_opened_before_the_rows_of_others_are_written():
    """The step waits for its sinks, and not for what they are given."""
    engine = Engine(num_slots=4, num_threads=1)
    order: list[str] = []
    gate = threading.Event()
    engine.pool.submit(gate.wait, 10)  # all is asked for before anything is done

    class Noting(MemorySink):
        def _enter(self, name: str) -> None:
            order.append(f"{name} {self.request.request_id}")
            super()._enter(name)

    def open_sink(request: SinkRequest) -> Sink:
        order.append(f"open {request.request_id}")
        return Noting(request)

    writers = [
        engine.writer(make_request(request_id=name), open_sink) for name in "abc"
    ]
    engine.step(*((writer, 0, make_rows(2)) for writer in writers))
    for writer in writers:
        engine.step((writer, 2, make_rows(4)))
        writer.finish(np.arange(6))
    gate.set()
    for writer in writers:
        writer.drain()
    assert order[:3] == ["open a", "open b", "open c"]
    rest = ["write", "write", "finish"]
    assert order[3:] == [f"{verb} {name}" for name in "abc" for verb in rest]
    assert engine.all_slots_are_free()
    engine.pool.shutdown()


def test_rows_of_a_sink_that_is_there_go_through_the_pool_once(engine):
    """It gave way to others when it was opened, and need not again."""
    writer = engine.writer()
    wait_until(lambda: writer.is_idle)
    submitted = []
    submit = engine.pool.submit
    engine.pool.submit = lambda task: (submitted.append(task), submit(task))
    engine.step((writer, 0, make_rows(6)))
    writer.drain()
    assert 1 <= len(submitted) <= 2  # the rows, and what waits for them


def test_writers_tell_when_they_have_something_to_do(engine):
    activity, gate = hidden_states_writer.Activity(), threading.Event()
    writers = [
        RequestWriter(
            engine.pool,
            make_request(request_id=name),
            engine.open_sink_behind(gate) if name == "slow" else engine.open_sink,
            activity=activity,
        )
        for name in ("slow", "quick")
    ]
    assert activity.wait_until_idle(0)
    for writer in writers:
        writer.open()
    wait_until(lambda: writers[1].is_idle)
    assert not activity.wait_until_idle(0.01)
    gate.set()
    assert activity.wait_until_idle(10)
    assert writers[0].is_idle
    engine.step(*((writer, 0, make_rows(3)) for writer in writers))
    assert activity.wait_until_idle(10)
    assert engine.all_slots_are_free()


def test_a_pool_that_does_later_what_it_had_refused(engine):
    """As where no thread can be started: the writer is counted once all the same."""
    activity = hidden_states_writer.Activity()
    writer = RequestWriter(
        engine.pool, make_request(), engine.open_sink, activity=activity
    )
    submit, refused = engine.pool.submit, []

    def refuse(task) -> None:
        refused.append(submit(task))
        raise RuntimeError("can't start new thread")

    engine.pool.submit = refuse
    writer.open()
    rows = make_rows(6)
    engine.step((writer, 0, rows))
    for future in refused:
        future.result(10)
    assert activity.wait_until_idle(10)
    assert torch.equal(engine.sinks["request"].tensor(), rows)


@pytest.mark.parametrize(
    ("since_last", "longest"), [(1000.0, MAX_PAUSE), (0.1, 0.1 * MAX_SHARE)]
)
def test_a_step_lets_writers_run_for_a_small_part_of_its_time(since_last, longest):
    """On a CPU, that they share with the model; whatever the disk does."""
    asked = []
    activity = SimpleNamespace(wait_until_idle=asked.append)
    state = SimpleNamespace(
        _activity=activity, _last_receive=time.monotonic() - since_last
    )
    ExampleHiddenStatesConnector._let_writers_run(state)
    assert longest <= asked[0] <= min(1.5 * longest, MAX_PAUSE)
    assert time.monotonic() - state._last_receive < 1


def test_a_pool_that_ends_while_a_sink_is_opened(engine):
    gate = threading.Event()
    writer = engine.writer(open_sink=engine.open_sink_behind(gate))
    rows = make_rows(6)
    engine.step((writer, 0, rows))
    writer.finish(np.arange(6))
    engine.pool.shutdown(wait=False)
    gate.set()
    wait_until(lambda: writer.is_idle)
    assert torch.equal(engine.sinks["request"].tensor(), rows)
    assert engine.sinks["request"].calls == ["write", "finish"]


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="there is one processor only"
)
def test_threads_of_a_worker_that_is_bound_to_a_processor():
    """vLLM binds a CPU worker's main thread, and its threads inherit that."""
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1, bind_to_one_processor) as worker:
        for spread, variable, is_spread in [
            (True, "OMP_PROC_BIND", True),
            (True, "GOMP_CPU_AFFINITY", True),
            (True, "KMP_AFFINITY", True),
            (True, "UNRELATED", False),  # bound by whoever started all this
            (False, "OMP_PROC_BIND", False),
        ]:
            found = worker.apply(processors_of_a_writer, (spread, variable))
            expected = len(os.sched_getaffinity(0)) if is_spread else 1
            assert len(found) == expected, (spread, variable)


def bind_to_one_processor() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def processors_of_a_writer(spread: bool, variable: str) -> set[int]:
    with pytest.MonkeyPatch.context() as environment:
        for name in hidden_states_writer.BINDINGS:
            environment.delenv(name, raising=False)
        environment.setenv(variable, "true")
        with hidden_states_writer.make_pool(2, spread) as pool:
            return pool.submit(os.sched_getaffinity, 0).result(10)


def test_an_engine_in_its_callers_process_is_bound_by_its_caller():
    bound = {min(os.sched_getaffinity(0))}
    found = []

    def run() -> None:
        os.sched_setaffinity(0, bound)  # this thread's alone
        found.append(processors_of_a_writer(True, "OMP_PROC_BIND"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [bound]


def test_a_pool_that_has_ended_leaves_the_work_to_the_caller():
    engine = Engine()
    engine.pool.shutdown()
    writer = engine.writer()
    rows = make_rows(6)
    engine.step((writer, 0, rows))
    writer.finish(np.arange(6))
    assert writer.is_idle
    assert torch.equal(engine.sinks["request"].tensor(), rows)
    assert engine.sinks["request"].calls == ["write", "finish"]


# ---- Failures ------------------------------------------------------------------


def errors_of(number: int, times: int) -> list[BaseException]:
    return [OSError(number, os.strerror(number)) for _ in range(times)]


def run(engine: Engine, writer: RequestWriter, steps: int = 3):
    """All of a request of six rows, in three steps."""
    rows = make_rows(6)
    for step in range(steps):
        engine.step((writer, 2 * step, rows[2 * step : 2 * step + 2]))
    writer.finish(np.arange(6))
    writer.drain()
    assert engine.all_slots_are_free()
    return engine.sinks.get("request")


def test_attempts_are_few_and_soon_over():
    """As the documentation says."""
    assert len(RETRY_DELAYS) == 3
    assert sum(RETRY_DELAYS) < 0.5


@pytest.mark.parametrize("number", sorted(TRANSIENT), ids=errno.errorcode.get)
@pytest.mark.parametrize("verb", ["create", "write", "complete"])
def test_what_may_pass_is_tried_again(engine, verb, number, log):
    errors = errors_of(number, len(RETRY_DELAYS))
    if verb == "create":
        engine.open_errors = errors
    writer = engine.writer()
    writer.drain()
    name = {"create": "", "write": "write", "complete": "finish"}[verb]
    engine.sinks["request"].errors[name] = errors
    sink = run(engine, writer)
    assert writer.failure is None
    assert not errors  # all of them were raised
    assert sink.spans == [(0, 2), (2, 2), (4, 2)]
    assert sink.token_ids == list(range(6))
    assert sink.withdrawn == []
    assert log.records == []
    # Counted once, for all that they were given more often.
    assert engine.counts() == {"rows": 6, "bytes": 6 * L * H * 4, "files_completed": 1}


@pytest.mark.parametrize("verb", ["create", "write", "complete"])
def test_what_does_not_pass_fails_with_its_cause(engine, verb, log):
    errors = errors_of(errno.EMFILE, len(RETRY_DELAYS) + 2)
    if verb == "create":
        engine.open_errors = errors
    writer = engine.writer()
    writer.drain()
    if verb != "create":
        name = {"write": "write", "complete": "finish"}[verb]
        engine.sinks["request"].errors[name] = errors
    sink = run(engine, writer)
    assert len(errors) == 1  # four attempts, and no fifth
    cause = f"cannot {verb} the file: [Errno 24] Too many open files"
    advice = ADVICE[errno.EMFILE]
    assert writer.failure == f"{cause} ({advice})"
    assert engine.counts()["files_failed"] == {"EMFILE": 1}
    if verb == "create":
        assert sink is None
    else:
        assert sink.withdrawn == [(cause, advice)]
        assert sink.calls[-1] == "withdraw"
    [record] = log.records
    assert record.levelno == logging.ERROR
    for part in ("request", "/nowhere/a.safetensors", cause, advice):
        assert part in record.getMessage()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "ENOSPC"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "EDQUOT"),
        (OSError(errno.EIO, "Input/output error"), "EIO"),
        (PermissionError("elsewhere"), "PermissionError"),
        (ValueError("odd"), "ValueError"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        # Not even an Exception: what a thread's task may not let through.
        (asyncio.CancelledError("gone"), "CancelledError"),
        (SystemExit(3), "SystemExit"),
    ],
    ids=[
        *("ENOSPC", "EDQUOT", "EIO", "PermissionError", "ValueError", "wordless"),
        *("gone", "exit"),
    ],
)
@pytest.mark.parametrize("verb", ["create", "write", "complete"])
def test_what_will_not_pass_fails_at_once(engine, verb, error, kind, log):
    errors = [error, AssertionError("it was tried again")]
    if verb == "create":
        engine.open_errors = errors
    writer = engine.writer()
    writer.drain()
    if verb != "create":
        name = {"write": "write", "complete": "finish"}[verb]
        engine.sinks["request"].errors[name] = errors
    sink = run(engine, writer)
    assert len(errors) == 1
    assert writer.failure.startswith(f"cannot {verb} the file: ")
    assert (str(error) or repr(error)) in writer.failure
    assert len(log.records) == 1
    failed = {"files_failed": {kind: 1}}
    row_bytes = L * H * 4
    assert (
        engine.counts()
        == {
            "create": failed,
            "write": failed,
            "complete": {"rows": 6, "bytes": 6 * row_bytes} | failed,
        }[verb]
    )
    if sink is not None:
        assert sink.calls.count("write") == {"write": 1, "complete": 3}[verb]
        assert len(sink.withdrawn) == 1
        assert sink.withdrawn[0][1] == ADVICE.get(getattr(error, "errno", None))


def test_nothing_is_written_after_a_failure(engine, log):
    writer = engine.writer()
    writer.drain()
    engine.sinks["request"].errors["write"] = errors_of(errno.ENOSPC, 1)
    for position in (0, 0, 2, 0):
        engine.step((writer, position, make_rows(2)))
    writer.finish(np.arange(2))
    writer.fail("another cause")
    writer.drain()
    sink = engine.sinks["request"]
    assert sink.calls == ["write", "withdraw"]
    assert "No space" in writer.failure
    assert len(log.records) == 1
    assert engine.counts() == {"files_failed": {"ENOSPC": 1}}


@pytest.mark.parametrize("is_inline", [False, True])
def test_what_is_no_sink_is_named(log, is_inline):
    with ThreadPoolExecutor(1) as pool:
        writer = RequestWriter(
            pool, make_request(), lambda request: None, is_inline=is_inline
        )
        writer.open().result()
    what = "rows" if is_inline else "file"
    assert writer.failure == f"cannot create the {what}: None is no Sink"
    assert len(log.records) == 1


def test_a_failure_of_one_request_is_not_anothers(engine):
    bad = engine.writer(make_request(request_id="bad"))
    good = engine.writer(make_request(request_id="good"))
    for writer in (bad, good):
        writer.drain()
    engine.sinks["bad"].errors["write"] = errors_of(errno.EIO, 1)
    rows = make_rows(6)
    for start in (0, 3):
        part = rows[start : start + 3]
        engine.step((bad, start, part), (good, start, part))
    for writer in (bad, good):
        writer.finish(np.arange(6))
        writer.drain()
    assert bad.failure is not None and good.failure is None
    assert torch.equal(engine.sinks["good"].tensor(), rows)
    counts = engine.counts()
    assert (counts["files_completed"], counts["files_failed"]) == (1, {"EIO": 1})


def test_a_slot_whose_copy_failed_is_released_too(engine, monkeypatch):
    writer = engine.writer()
    slot = engine.ring.acquire()

    def fail() -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(slot, "wait", fail)
    slot.retain(1)
    writer.write(Span("request", 0, 0, 2), slot, 0)
    slot.release()
    writer.drain()
    assert "the device is lost" in writer.failure
    assert engine.sinks["request"].calls == ["withdraw"]


def test_a_cause_that_is_the_engines(engine, log):
    writer = engine.writer()
    engine.step((writer, 0, make_rows(2)))
    writer.fail("the model fell over")
    writer.fail("and again")
    writer.drain()
    assert writer.failure == "the model fell over"
    sink = engine.sinks["request"]
    assert sink.withdrawn == [("the model fell over", None)]
    assert engine.counts()["files_failed"] == {"engine": 1}
    assert len(log.records) == 1


def test_a_sink_that_cannot_be_withdrawn(engine, log):
    """There are two causes then, and both are in the log; nothing else happens."""
    writer = engine.writer()
    writer.drain()
    sink = engine.sinks["request"]
    sink.errors = {"write": errors_of(errno.EIO, 1), "withdraw": [KeyError("odd")] * 2}
    engine.step((writer, 0, make_rows(2)))
    writer.remove()
    writer.drain()
    assert "Input/output error" in writer.failure
    messages = [record.getMessage() for record in log.records]
    assert len(messages) == 3
    assert "are lost" in messages[0]
    assert messages[1].startswith("Cannot leave a note at /nowhere/a.safetensors")
    assert messages[2].startswith("Cannot remove /nowhere/a.safetensors")


def test_a_success_leaves_no_line_in_the_log_but_for_debugging(engine, log):
    logger = logging.getLogger("vllm")
    logger.setLevel(logging.INFO)
    run(engine, engine.writer())
    assert log.records == []
    logger.setLevel(logging.DEBUG)
    writer = engine.writer()
    writer.drain()
    engine.step((writer, 0, make_rows(4)))
    engine.step((writer, 4, make_rows(2)))
    writer.finish(np.arange(6))
    writer.remove()  # its client has given up
    writer.drain()
    assert [record.getMessage().partition(": ")[2] for record in log.records] == [
        "opened /nowhere/a.safetensors",
        "rows 0 to 3",
        "rows 4 to 5",
        "complete, 6 rows",
        "removed",
    ]
    assert {record.levelno for record in log.records} == {logging.DEBUG}


# ---- Aborts, and the end -------------------------------------------------------


@pytest.mark.parametrize("moment", ["opened", "half", "failed", "complete"])
def test_an_aborted_request_is_withdrawn_without_a_cause(engine, moment, log):
    writer = engine.writer()
    if moment == "half":
        engine.step((writer, 0, make_rows(2)))
    elif moment == "failed":
        writer.fail("cause")
    elif moment == "complete":
        run(engine, writer)
    writer.remove()
    engine.step((writer, 0, make_rows(2)))  # a step that was under way
    writer.finish(np.arange(2))
    writer.drain()
    sink = engine.sinks["request"]
    assert sink.calls[-1] == "withdraw"
    assert sink.calls.count("write") == {"half": 1, "complete": 3}.get(moment, 0)
    assert sink.withdrawn == ([("cause", None)] if moment == "failed" else []) + [
        (None, None)
    ]
    counts = engine.counts()
    if moment == "failed":
        assert "files_aborted" not in counts
    else:
        assert counts["files_aborted"] == 1
        assert "files_failed" not in counts
    assert len(log.records) == (moment == "failed")


def test_an_aborted_request_without_a_sink(engine):
    engine.open_errors = [ValueError("odd")]
    writer = engine.writer()
    writer.remove()
    writer.drain()
    assert engine.sinks == {}
    assert engine.counts() == {"files_failed": {"ValueError": 1}}


def test_giving_up_withdraws_what_is_not_complete(engine, log):
    """At a shutdown: the call that is under way ends, and none follows it."""
    done = engine.writer(make_request(request_id="done"))
    engine.step((done, 0, make_rows(6)))
    done.finish(np.arange(6))
    done.drain()
    writer = engine.writer()
    writer.drain()
    sink = engine.sinks["request"]
    sink.gate = threading.Event()
    engine.step((writer, 0, make_rows(3)))
    engine.step((writer, 3, make_rows(3)))
    writer.finish(np.arange(6))
    assert sink.entered.wait(10)
    for each in (done, writer):
        each.give_up("the engine was shut down")
    sink.gate.set()
    for each in (done, writer):
        each.drain()
    assert done.failure is None
    assert engine.sinks["done"].withdrawn == []
    assert writer.failure == "the engine was shut down"
    assert sink.calls == ["write", "withdraw"]
    assert sink.withdrawn == [("the engine was shut down", None)]
    counts = engine.counts()
    assert (counts["files_completed"], counts["files_failed"]) == (1, {"shutdown": 1})
    assert len(log.records) == 1
    done.remove()  # an abort still counts
    done.drain()
    assert engine.sinks["done"].withdrawn == [(None, None)]


def test_a_writer_is_idle_when_all_is_done(engine):
    writer = RequestWriter(engine.pool, make_request(), engine.open_sink)
    assert writer.is_idle
    opened = writer.open()
    opened.result(10)
    wait_until(lambda: writer.is_idle)
    sink = engine.sinks["request"]
    sink.gate = threading.Event()
    writer.remove()
    assert sink.entered.wait(10)
    assert not writer.is_idle
    sink.gate.set()
    wait_until(lambda: writer.is_idle)
    assert sink.withdrawn == [(None, None)]


def test_the_future_of_opening_is_done_also_after_a_failure(engine):
    engine.open_errors = [ValueError("odd")]
    writer = RequestWriter(engine.pool, make_request(), engine.open_sink)
    writer.open().result(10)
    assert "cannot create the file: odd" in writer.failure


# ---- Files ---------------------------------------------------------------------


def span_of(rows: torch.Tensor, position: int = 0) -> RowSpan:
    data = rows.contiguous().view(-1).view(torch.uint8).numpy().data
    return RowSpan(position, len(rows), data)


def fill(sink: Sink, num_tokens: int = 6, dtype=torch.float32) -> torch.Tensor:
    rows = make_rows(num_tokens).to(dtype)
    for position in range(num_tokens):
        sink.write(span_of(rows[position : position + 1], position))
    sink.finish(np.arange(num_tokens))
    return rows


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("knows_rows", [True, False])
def test_a_file_sink_makes_a_file(tmp_path, dtype, knows_rows):
    path = tmp_path / "a.safetensors"
    request = make_request(path, dtype=dtype, knows_rows=knows_rows)
    sink = FileSink(request, FileOptions(checksum="xxh3"))
    with pytest.raises(HiddenStatesTimeoutError):
        load_hidden_states(path, timeout=0)
    rows = fill(sink, dtype=dtype)
    loaded = load_hidden_states(path, verify=True)
    assert torch.equal(loaded["hidden_states"], rows)
    header = json.loads(path.read_bytes()[8:4096])
    assert header["__metadata__"]["layer_ids"] == "[0, 1, 2]"
    sink.withdraw(None)
    assert os.listdir(tmp_path) == []


def test_a_file_sink_that_is_withdrawn(tmp_path):
    path = tmp_path / "a.safetensors"
    before = open_descriptors()
    sink = FileSink(make_request(path), FileOptions())
    sink.withdraw("cause", "advice")
    with pytest.raises(HiddenStatesError, match=r"cause \(advice\)"):
        load_hidden_states(path)
    sink.withdraw(None)
    assert os.listdir(tmp_path) == []
    FileSink(make_request(path), FileOptions()).withdraw(None)
    assert os.listdir(tmp_path) == []
    assert open_descriptors() == before


def test_a_full_disk_reaches_the_reader_through_the_writer(engine, small_disk, log):
    path = small_disk / "a.safetensors"
    with open(small_disk / "filler", "wb") as filler:
        filler.write(bytes(1_000_000))
    size = 8192 // (L * H * 4) * MAX_ROWS
    request = make_request(path, num_tokens=size, knows_rows=False)
    writer = engine.writer(
        request, partial(FileSink, options=FileOptions(), roots=None)
    )
    for position in range(0, size, MAX_ROWS):
        engine.step((writer, position, make_rows(MAX_ROWS)))
    writer.finish(np.arange(size))
    writer.drain()
    if writer.failure is None:
        pytest.fail("the disk was not full")
    with pytest.raises(HiddenStatesError, match="No space left.*free space") as caught:
        load_hidden_states(path)
    assert caught.value.request_id == "request"
    assert len(log.records) == 1
    assert files_in(small_disk) == ["a.safetensors.error", "filler"]


# ---- Paths that clients choose -------------------------------------------------


@pytest.fixture
def places(tmp_path):
    """A root, and a directory beside it with something precious in it."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "precious.safetensors").write_text("precious")
    yield root, outside
    assert os.listdir(outside) == ["precious.safetensors"]
    assert (outside / "precious.safetensors").read_text() == "precious"


def open_at(path, *roots) -> FileSink:
    return FileSink(make_request(path), FileOptions(), [str(root) for root in roots])


def test_paths_within_a_root(places, tmp_path):
    root, _ = places
    (tmp_path / "second").mkdir()
    (root / "real").mkdir()
    os.symlink(root / "real", root / "link")
    for path in (
        root / "a.safetensors",
        root / "deep" / "er" / "a.safetensors",
        root / "link" / "b.safetensors",  # leads to within
        tmp_path / "second" / "a.safetensors",
    ):
        rows = fill(open_at(path, root, tmp_path / "second"))
        assert torch.equal(load_hidden_states(path)["hidden_states"], rows)
    assert files_in(root / "real") == ["b.safetensors"]


def test_a_root_that_is_a_symbolic_link(places, tmp_path):
    root, _ = places
    os.symlink(root, tmp_path / "link")
    fill(open_at(tmp_path / "link" / "a.safetensors", tmp_path / "link"))
    assert files_in(root) == ["a.safetensors"]


@pytest.mark.parametrize(
    "path",
    [
        "{outside}/precious.safetensors",
        "{outside}/new.safetensors",
        "{root}/../outside/precious.safetensors",
        "{root}/link/precious.safetensors",
        "{root}/link/new.safetensors",
        "{root}/link/deeper/new.safetensors",
        "{root}/deep/link/new.safetensors",
        "{root}x/new.safetensors",
    ],
)
def test_paths_that_lead_out_of_the_roots(places, tmp_path, path):
    root, outside = places
    (root / "deep").mkdir()
    for folder in (root, root / "deep"):
        os.symlink(outside, folder / "link")
    before = open_descriptors()
    with pytest.raises(PermissionError, match="is outside of .*root"):
        open_at(path.format(root=root, outside=outside), root)
    assert open_descriptors() == before
    assert sorted(os.listdir(root)) == ["deep", "link"]
    assert not (tmp_path / "rootx").exists()


@pytest.mark.parametrize("suffix", ["", ".lock", ".partial"])
def test_a_symbolic_link_in_place_of_the_file(places, suffix):
    root, outside = places
    path = root / "a.safetensors"
    for target in (outside / "precious.safetensors", outside / "new.safetensors"):
        os.symlink(target, f"{path}{suffix}")
        with pytest.raises(OSError):
            open_at(path, root)
        assert os.listdir(root) == [f"a.safetensors{suffix}"]
        os.unlink(f"{path}{suffix}")


def test_a_link_to_one_of_our_files_is_none(places):
    """Of another client, perhaps."""
    root, _ = places
    fill(open_at(root / "theirs.safetensors", root))
    os.symlink(root / "theirs.safetensors", root / "a.safetensors")
    with pytest.raises(FileExistsError):
        open_at(root / "a.safetensors", root)
    load_hidden_states(root / "theirs.safetensors")


def test_a_file_of_somebody_else_is_not_overwritten(places):
    root, _ = places
    path = root / "model.safetensors"
    save_file({"weight": torch.ones(3)}, path)
    content = path.read_bytes()
    with pytest.raises(FileExistsError, match="no file of hidden states"):
        open_at(path, root)
    assert path.read_bytes() == content
    assert os.listdir(root) == ["model.safetensors"]


def test_one_of_our_files_is_replaced(places):
    root, _ = places
    path = root / "a.safetensors"
    fill(open_at(path, root))
    rows = fill(open_at(path, root))
    assert torch.equal(load_hidden_states(path)["hidden_states"], rows)


def test_a_refused_path_is_the_requests_failure(engine, places):
    root, outside = places
    request = make_request(outside / "new.safetensors")
    writer = engine.writer(
        request, partial(FileSink, options=FileOptions(), roots=[str(root)])
    )
    writer.drain()
    assert "is outside of" in writer.failure
    assert engine.counts() == {"files_failed": {"PermissionError": 1}}


# ---- Writers that want whole tensors -------------------------------------------


class StockWriter:
    """``_write_tensors`` as subclasses have it, which may stop before its end."""

    def __init__(self, error: BaseException | None = None, closes: bool = True):
        self.error = error
        self.closes = closes
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.gate.set()

    def __call__(self, tensors, event, filename: str, lock_fd: int | None) -> None:
        event.synchronize()
        assert event.query()
        self.lock_fd = lock_fd
        save_file(tensors, filename)
        self.entered.set()
        assert self.gate.wait(10)
        if lock_fd is not None:
            fcntl.flock(lock_fd, fcntl.LOCK_UN)  # some do
            if self.closes:
                os.close(lock_fd)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("use_lock", [True, False], ids=["lock", "no lock"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_tensors_are_those_of_the_rows(tmp_path, dtype, use_lock):
    path = tmp_path / "a.safetensors"
    write = StockWriter()
    before = open_descriptors()
    for knows_rows in (True, False):
        request = make_request(path, dtype=dtype, knows_rows=knows_rows)
        sink = WholeTensorSink(request, FileOptions(use_lock, mode=0o640), write)
        rows = fill(sink, dtype=dtype)
        assert (write.lock_fd is not None) == use_lock
        loaded = load_hidden_states(path, timeout=0)
        assert torch.equal(loaded["hidden_states"], rows)
        assert loaded["token_ids"].tolist() == list(range(6))
        assert files_in(tmp_path) == ["a.safetensors"]
        assert path.stat().st_mode & 0o777 == 0o640
        assert open_descriptors() == before
    sink.withdraw(None)
    assert os.listdir(tmp_path) == []


def test_whole_tensors_of_rows_that_came_twice_and_too_many(tmp_path):
    """A preempted request, which then ended at a stop string."""
    path = tmp_path / "a.safetensors"
    request = make_request(path, num_tokens=8)
    sink = WholeTensorSink(request, FileOptions(), StockWriter())
    rows = make_rows(8)
    sink.write(span_of(torch.zeros(4, L, H)))
    sink.write(span_of(rows[:3]))
    sink.write(span_of(rows[3:], 3))
    sink.finish(np.arange(6))
    loaded = load_hidden_states(path)
    assert torch.equal(loaded["hidden_states"], rows[:6])


@pytest.mark.parametrize("use_lock", [True, False], ids=["lock", "no lock"])
def test_readers_wait_for_whole_tensors(tmp_path, use_lock):
    path = str(tmp_path / "a.safetensors")
    write = StockWriter()
    write.gate.clear()
    sink = WholeTensorSink(make_request(path), FileOptions(use_lock), write)
    assert os.path.exists(path + ".lock") == use_lock
    results: list = []
    rows: list = []
    reader = threading.Thread(
        target=lambda: results.append(load_hidden_states(path)), daemon=True
    )
    reader.start()
    writer = threading.Thread(target=lambda: rows.append(fill(sink)), daemon=True)
    writer.start()
    assert write.entered.wait(10)
    # The writer has saved the tensors, but says that it is not done.
    assert not os.path.exists(path)
    with pytest.raises(HiddenStatesTimeoutError):
        load_hidden_states(path, timeout=0)
    assert reader.is_alive() and results == []
    write.gate.set()
    for thread in (writer, reader):
        thread.join(10)
    assert torch.equal(results[0]["hidden_states"], rows[0])


def test_whoever_takes_the_lock_finds_the_file(tmp_path, monkeypatch):
    """Also where the writer has let go of it before the file had its name."""
    path = str(tmp_path / "a.safetensors")
    seen: list = []
    rename = os.rename

    def look_and_rename(source: str, target: str) -> None:
        with open(path + ".lock", "r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                seen.append("held")
        rename(source, target)

    monkeypatch.setattr(os, "rename", look_and_rename)
    fill(WholeTensorSink(make_request(path), FileOptions(), StockWriter()))
    assert seen == ["held"]


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "leaves open"])
@pytest.mark.parametrize("use_lock", [True, False], ids=["lock", "no lock"])
def test_an_error_of_whole_tensors_is_noted(engine, tmp_path, use_lock, closes, log):
    path = tmp_path / "a.safetensors"
    write = StockWriter(ValueError("cannot quantize"), closes)
    engine.writer(make_request(request_id="warm")).drain()  # has its thread
    before = open_descriptors()
    writer = engine.writer(
        make_request(path),
        partial(WholeTensorSink, options=FileOptions(use_lock), write_tensors=write),
    )
    engine.step((writer, 0, make_rows(6)))
    writer.finish(np.arange(6))
    writer.drain()
    with pytest.raises(HiddenStatesError, match="cannot complete .* cannot quantize"):
        load_hidden_states(path)
    assert files_in(tmp_path) == ["a.safetensors.error"]
    assert open_descriptors() == before
    assert len(log.records) == 1
    writer.remove()
    writer.drain()
    assert os.listdir(tmp_path) == []


def test_whole_tensors_are_tried_again_too(engine, tmp_path):
    path = tmp_path / "a.safetensors"
    attempts: list = []

    def write(tensors, event, filename: str, lock_fd: int | None) -> None:
        attempts.append(lock_fd)
        if len(attempts) < 3:
            raise OSError(errno.EMFILE, "too many")
        StockWriter()(tensors, event, filename, lock_fd)

    writer = engine.writer(
        make_request(path),
        partial(WholeTensorSink, options=FileOptions(), write_tensors=write),
    )
    rows = make_rows(6)
    engine.step((writer, 0, rows))
    writer.finish(np.arange(6))
    writer.drain()
    assert writer.failure is None and len(attempts) == 3
    assert torch.equal(load_hidden_states(path)["hidden_states"], rows)
    assert files_in(tmp_path) == ["a.safetensors"]


def test_a_link_in_place_of_the_whole_tensors(tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    path = tmp_path / "a.safetensors"
    os.symlink(target, f"{path}.whole")

    def write(tensors, event, filename: str, lock_fd: int | None) -> None:
        with open(filename, "wb") as file:  # save_file itself would replace the link
            file.write(save(tensors))

    rows = fill(WholeTensorSink(make_request(path), FileOptions(), write))
    assert target.read_text() == "precious"
    assert not path.is_symlink()
    assert torch.equal(load_hidden_states(path)["hidden_states"], rows)


# ---- Responses -----------------------------------------------------------------


def test_inline_rows_are_in_the_outbox_once():
    outbox = Outbox()
    first = InlineSink(make_request(request_id="first"), outbox)
    second = InlineSink(make_request(request_id="second"), outbox)
    rows = make_rows(3)
    data = bytearray(span_of(rows).data)
    first.write(RowSpan(0, 3, memoryview(data)))
    second.write(RowSpan(5, 3, memoryview(data)))
    expected = bytes(data)
    data[:] = bytes(len(data))  # the slot is used again
    assert outbox.take() == [
        ("first", 0, expected, b""),
        ("second", 5, expected, b""),
    ]
    assert outbox.take() == []
    first.finish(np.arange(3))
    second.withdraw("cause")
    assert outbox.take() == []


def test_inline_rows_are_there_when_the_writer_is_drained(engine):
    outbox = Outbox()
    writer = engine.writer(open_sink=partial(InlineSink, outbox=outbox))
    rows = make_rows(6)
    engine.step((writer, 0, rows[:4]))
    engine.step((writer, 4, rows[4:]))
    writer.drain()
    taken = outbox.take()
    assert [(request_id, position) for request_id, position, *_ in taken] == [
        ("request", 0),
        ("request", 4),
    ]
    assert b"".join(data for _, _, data, _ in taken) == bytes(span_of(rows).data)


# ---- Sinks of third parties ----------------------------------------------------


def test_a_sink_is_found_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "sinks_of_others.py").write_text(
        "def open_sink(request):\n    return request.path\nNUMBER = 7\n"
    )
    (tmp_path / "sinks_that_fail.py").write_text("1 / 0\n")
    (tmp_path / "sinks_misspelt.py").write_text("def (\n")
    monkeypatch.syspath_prepend(tmp_path)
    open_sink = find_sink("sinks_of_others:open_sink")
    assert open_sink(make_request("/a")) == "/a"
    for name, reason in (
        ("sinks_of_others:nothing", "has no attribute 'nothing'"),
        ("sinks_of_others", "valid: 'package.module:function'"),
        ("sinks_of_others:", "valid: 'package.module:function'"),
        ("sinks_of_nobody:open_sink", "No module named 'sinks_of_nobody'"),
        (":open_sink", "valid: 'package.module:function'"),
        ("", "valid: 'package.module:function'"),
        (".relative:open_sink", "valid: 'package.module:function'"),
        ("sinks_that_fail:open_sink", "division by zero"),
        ("sinks_misspelt:open_sink", "invalid syntax"),
        ("sinks_of_others:NUMBER", "is no function of a request"),
    ):
        with pytest.raises(ValueError) as caught:
            find_sink(name)
        assert str(caught.value).startswith(f"sink {name!r} ")
        assert reason in str(caught.value)


# ---- What is counted -----------------------------------------------------------


def test_counts_of_a_step_are_taken_once():
    stats = StatsCollector()
    assert stats.take(0, 0.0) is None
    stats.began()
    stats.began()
    stats.wrote(3, 120, 0.5)
    stats.wrote(2, 80, 0.25)
    stats.completed()
    stats.failed("ENOSPC")
    stats.failed("EIO")
    stats.failed("ENOSPC")
    stats.aborted()
    taken = stats.take(slots_in_use=2, waited=1.5)
    assert taken.data == {
        "requests": 2,
        "rows": 5,
        "bytes": 200,
        "write_seconds": [0.5, 0.25],
        "files_completed": 1,
        "files_failed": {"ENOSPC": 2, "EIO": 1},
        "files_aborted": 1,
        "slot_wait_seconds": 1.5,
        "ring_slots_in_use": 2,
    }
    json.dumps(taken.to_dict())  # as it travels
    assert stats.take(2, 0.0) is None
    assert stats.take(0, 0.0).data == {"ring_slots_in_use": 0}
    assert stats.take(0, 0.0) is None


def test_counts_of_several_steps_are_one():
    """What they were before stays what it was: they may be told elsewhere."""
    first = HiddenStatesStats(
        {"rows": 3, "write_seconds": [0.5], "files_failed": {"EIO": 1}}
    )
    second = HiddenStatesStats(
        {
            "rows": 4,
            "requests": 1,
            "write_seconds": [0.25],
            "files_failed": {"EIO": 1, "ENOSPC": 2},
            "ring_slots_in_use": 3,
        }
    )
    third = HiddenStatesStats({"ring_slots_in_use": 1})
    total = HiddenStatesStats()
    assert total.is_empty()
    for each in (first, second, third):
        assert not each.is_empty()
        assert total.aggregate(each) is total
    assert total.data == {
        "rows": 7,
        "requests": 1,
        "write_seconds": [0.5, 0.25],
        "files_failed": {"EIO": 2, "ENOSPC": 2},
        "ring_slots_in_use": 1,
    }
    assert first.data == {
        "rows": 3,
        "write_seconds": [0.5],
        "files_failed": {"EIO": 1},
    }
    assert total.reduce() == {"rows": 7, "requests": 1, "files_failed": 4}
    total.reset()
    assert total.is_empty() and total.reduce() == {}
    assert second.data["files_failed"] == {"EIO": 1, "ENOSPC": 2}


def test_counting_from_many_threads_loses_nothing():
    stats = StatsCollector()
    taken: list = []

    def count() -> None:
        for _ in range(300):
            stats.wrote(1, 10, 0.0)
            stats.failed("EIO")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken.append(stats.take(0, 0.0))
    taken.append(stats.take(0, 0.0))
    total = HiddenStatesStats()
    for each in taken:
        if each is not None:
            total.aggregate(each)
    assert total.data["rows"] == 1200
    assert total.data["bytes"] == 12_000
    assert len(total.data["write_seconds"]) == 1200
    assert total.data["files_failed"] == {"EIO": 1200}


class NoConfig:
    """What the base class asks of a configuration."""

    kv_transfer_config = None


@pytest.fixture
def published():
    """Metrics of two engines, in a registry of this test's own."""
    registry = CollectorRegistry()
    types = {
        kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    labels: dict[int, list[object]] = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    metrics = HiddenStatesPromMetrics(
        NoConfig(), types, ["model_name", "engine"], labels
    )

    def value(name: str, engine: int = 0, **more: str) -> float | None:
        where = {"model_name": "tiny", "engine": str(engine), **more}
        return registry.get_sample_value(f"vllm:hidden_states_{name}", where)

    return metrics, value, registry


def test_metrics_are_there_from_the_start(published):
    _, value, registry = published
    for engine in (0, 1):
        for name in (
            "requests_total",
            "rows_total",
            "bytes_total",
            "files_completed_total",
            "files_aborted_total",
            "slot_wait_seconds_total",
            "write_seconds_count",
            "ring_slots_in_use",
        ):
            assert value(name, engine) == 0.0, name
    text = generate_latest(registry).decode()
    assert "# TYPE vllm:hidden_states_files_failed_total counter" in text


def test_metrics_are_what_was_counted(published):
    metrics, value, _ = published
    stats = StatsCollector()
    for _ in range(2):
        stats.began()
        stats.wrote(3, 120, 0.002)
        stats.wrote(2, 80, 20.0)
        stats.completed()
        stats.aborted()
        stats.failed("ENOSPC")
        taken = stats.take(slots_in_use=2, waited=1.5)
        sent = json.loads(json.dumps(taken.to_dict()))
        metrics.observe(sent, engine_idx=1)
    metrics.observe({"files_failed": {"EIO": 3}}, engine_idx=1)
    metrics.observe({}, engine_idx=1)
    assert value("requests_total", 1) == 2
    assert value("rows_total", 1) == 10
    assert value("bytes_total", 1) == 400
    assert value("files_completed_total", 1) == 2
    assert value("files_aborted_total", 1) == 2
    assert value("slot_wait_seconds_total", 1) == 3.0
    assert value("files_failed_total", 1, cause="ENOSPC") == 2
    assert value("files_failed_total", 1, cause="EIO") == 3
    assert value("write_seconds_count", 1) == 4
    assert value("write_seconds_sum", 1) == pytest.approx(40.004)
    assert value("write_seconds_bucket", 1, le="0.001") == 0
    assert value("write_seconds_bucket", 1, le="0.005") == 2
    assert value("write_seconds_bucket", 1, le="10.0") == 2
    assert value("ring_slots_in_use", 1) == 2  # as it is now, not a sum
    assert value("rows_total", 0) == 0  # the other engine's
    metrics.observe({"ring_slots_in_use": 0}, engine_idx=1)
    assert value("ring_slots_in_use", 1) == 0


def test_every_counter_is_published(published):
    """Whatever is added: what reduce() tells, and what observe() counts."""
    metrics, value, _ = published
    data = dict.fromkeys(counted.COUNTERS, 1)
    assert HiddenStatesStats(dict(data)).reduce() == data
    metrics.observe(data)
    for name in counted.COUNTERS:
        assert value(f"{name}_total") == 1
