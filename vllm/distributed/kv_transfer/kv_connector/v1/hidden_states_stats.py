# SPDX-License-Identifier: Apache-2.0
"""What the extraction of hidden states counts, on its way to ``/metrics``.

The worker collects what its threads do, and hands it over with a step's output; vLLM
takes it to the servers that publish it, each event once.
"""

import threading
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

REQUESTS = "requests"
ROWS = "rows"
BYTES = "bytes"
COMPLETED = "files_completed"
ABORTED = "files_aborted"
WAITED = "slot_wait_seconds"
COUNTERS = {
    REQUESTS: "Requests whose hidden states are extracted.",
    ROWS: "Rows given to sinks, also those computed again after a preemption.",
    BYTES: "Bytes of the rows given to sinks.",
    COMPLETED: "Requests whose rows were delivered: complete files.",
    ABORTED: "Requests that were aborted, with their files, complete or not.",
    WAITED: "Seconds for which steps waited for a slot, the writers being behind.",
}
FAILED = "files_failed"
WRITES = "write_seconds"
IN_USE = "ring_slots_in_use"
PREFIX = "vllm:hidden_states_"
WRITE_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10)


class HiddenStatesStats(KVConnectorStats):
    """Events since the last step: ``data`` has what JSON has."""

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "HiddenStatesStats":
        for name, value in other.data.items():
            if name == IN_USE:
                self.data[name] = value
            elif name == FAILED:
                causes = self.data.setdefault(name, {})
                for cause, number in value.items():
                    causes[cause] = causes.get(cause, 0) + number
            else:  # numbers, and a list
                self.data[name] = (
                    self.data[name] + value if name in self.data else value
                )
        return self

    def reduce(self) -> dict[str, int | float]:
        told: dict[str, int | float] = {
            name: self.data[name] for name in COUNTERS if name in self.data
        }
        if failed := sum(self.data.get(FAILED, {}).values()):
            told[FAILED] = failed
        return told


class StatsCollector:
    """Counts in the worker, from any thread."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._stats = HiddenStatesStats()
        self._slots_in_use = 0

    def _add(self, **data: Any) -> None:
        with self._mutex:
            self._stats.aggregate(HiddenStatesStats(data))

    def began(self) -> None:
        """A request is extracted."""
        self._add(**{REQUESTS: 1})

    def wrote(self, num_rows: int, num_bytes: int, seconds: float) -> None:
        """A sink has taken rows."""
        self._add(**{ROWS: num_rows, BYTES: num_bytes, WRITES: [seconds]})

    def completed(self) -> None:
        """A request's rows are delivered."""
        self._add(**{COMPLETED: 1})

    def aborted(self) -> None:
        """A request was aborted, and what it had taken back, complete or not."""
        self._add(**{ABORTED: 1})

    def failed(self, cause: str) -> None:
        """A request's rows are lost.

        Args:
            cause: The name of an error number, such as ``ENOSPC``, or of an exception.
        """
        self._add(**{FAILED: {cause: 1}})

    def take(self, slots_in_use: int, waited: float) -> HiddenStatesStats | None:
        """All since the last time; None where nothing was.

        Args:
            slots_in_use: Of the ring, now.
            waited: Seconds for which steps waited for a slot, since the last time.
        """
        if waited:
            self._add(**{WAITED: waited})
        if slots_in_use != self._slots_in_use:
            self._slots_in_use = slots_in_use
            self._add(**{IN_USE: slots_in_use})
        with self._mutex:
            if self._stats.is_empty():
                return None
            stats, self._stats = self._stats, HiddenStatesStats()
        return stats


class HiddenStatesPromMetrics(KVConnectorPromMetrics):
    """Publishes ``HiddenStatesStats``; arguments as of the base class."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make_counter = metric_types[Counter]
        self._counters = {
            name: make_counter(
                name=PREFIX + name, documentation=text, labelnames=labelnames
            )
            for name, text in COUNTERS.items()
        }
        self._failed = make_counter(
            name=PREFIX + FAILED,
            documentation="Requests whose hidden states were lost, by cause.",
            labelnames=[*labelnames, "cause"],
        )
        self._writes = metric_types[Histogram](
            name=PREFIX + WRITES,
            documentation="Seconds in which a sink took one step's rows of a request.",
            buckets=WRITE_BUCKETS,
            labelnames=labelnames,
        )
        self._in_use = metric_types[Gauge](
            name=PREFIX + IN_USE,
            documentation="Slots of the ring that a step or a writer holds.",
            multiprocess_mode="mostrecent",
            labelnames=labelnames,
        )
        # From the start, so that a rate can be taken of the first event.
        for labels in per_engine_labelvalues.values():
            for metric in (*self._counters.values(), self._writes, self._in_use):
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        data = transfer_stats_data
        for name, counter in self._counters.items():
            if name in data:
                counter.labels(*labels).inc(data[name])
        for cause, number in data.get(FAILED, {}).items():
            self._failed.labels(*labels, cause).inc(number)
        for seconds in data.get(WRITES, ()):
            self._writes.labels(*labels).observe(seconds)
        if IN_USE in data:
            self._in_use.labels(*labels).set(data[IN_USE])
