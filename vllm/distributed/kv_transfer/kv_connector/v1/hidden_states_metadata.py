# SPDX-License-Identifier: Apache-2.0
"""What the two sides of the hidden-states connector tell each other, once a step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


@dataclass
class NewFile:
    """One file that a worker is to open."""

    request_id: str
    path: str
    token_ids: np.ndarray
    """``[num_prompt_tokens]`` int64; -1 where the prompt has embeddings only."""
    columns: tuple[int, ...] | None = None
    """Which of the engine's layers, by their place; None for all of them."""
    include_output_tokens: bool = False
    """Rows go on after the prompt, until the request ends."""
    is_custom_path: bool = False
    """The client has chosen the path."""
    is_inline: bool = False
    """The rows go back to the scheduler, and there is no file."""


@dataclass
class HiddenStatesConnectorMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step."""

    new_files: list[NewFile] = field(default_factory=list)
    unwanted: set[str] = field(default_factory=set)
    """Finished requests of whose file, or note, no client has been told."""
    finished: dict[str, np.ndarray] = field(default_factory=dict)
    """Finished requests with output: the token ids of all rows of their files."""
    abandoned: dict[str, str] = field(default_factory=dict)
    """Requests that ended before, and whose answer nobody has read: their paths."""


class InlineRows(NamedTuple):
    """Rows of one step that go into a response."""

    request_id: str
    position: int
    """Of the first row's token."""
    data: bytes
    scales: bytes
    """``[num_rows]`` float32; empty where the rows have none."""


@dataclass
class HiddenStatesWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, once a step.

    Made before the step's rows are there. Read, or pickled, later: that waits for
    those that go to the scheduler.
    """

    failures: dict[str, str] = field(default_factory=dict)
    """Cause by request id."""
    rows: list[InlineRows] = field(default_factory=list)
    """For responses."""
    collect: Callable[[], tuple[dict[str, str], list[InlineRows]]] | None = None
    """Waits, and has more of both."""

    def settle(self) -> None:
        """Wait for what is to come of this step."""
        if self.collect is not None:
            failures, rows = self.collect()
            self.collect = None
            self.failures = self.failures | failures
            self.rows = self.rows + rows

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return self.__dict__

    def aggregate(
        self, other: KVConnectorWorkerMetadata
    ) -> "HiddenStatesWorkerMetadata":
        assert isinstance(other, HiddenStatesWorkerMetadata)
        for each in (self, other):
            each.settle()
        return HiddenStatesWorkerMetadata(
            self.failures | other.failures, self.rows + other.rows
        )


def hear_workers(connector: Any, output: "KVConnectorOutput | None") -> None:
    """Tell the connector what its workers say before this step's requests finish.

    The scheduler's own ``update_connector_output`` comes after: too late for a
    request whose first step is its last.
    """
    if output is None or output.kv_connector_worker_meta is None:
        return
    pairs = [(connector, output.kv_connector_worker_meta)]
    children = getattr(connector, "sub_connectors", None)
    if children is not None:
        metadatas = output.kv_connector_worker_meta.metadata  # type: ignore[attr-defined]
        pairs = list(zip(children, metadatas, strict=True))
    for child, metadata in pairs:
        if isinstance(metadata, HiddenStatesWorkerMetadata):
            child.hear_workers(metadata)


def ends_by_text(connector: Any, request: Any) -> bool:
    """Whether a stop string ends a request that extracts, with its newest token.

    See ``ExampleHiddenStatesConnector.ends_by_text``.
    """
    params = request.sampling_params
    if params is None or not params.stop:
        return False  # nearly all, and this is asked for each token
    return any(child.ends_by_text(request) for child in _row_takers(connector))


def abandon(connector: Any, request_ids: Iterable[str]) -> None:
    """Tell the connector which requests are aborted, also ones that have finished.

    A client may give up while its answer is on the way.
    """
    for child in _row_takers(connector):
        child.abandon(request_ids)


def refusal(connector: Any, request: Any) -> tuple[str, int] | None:
    """Why a request cannot be taken, and the HTTP status that says so."""
    for child in _row_takers(connector):
        if refused := child.refusal(request):
            reason: tuple[str, int] = refused
            return reason
    return None


def _row_takers(connector: Any) -> Iterable[Any]:
    for child in getattr(connector, "sub_connectors", [connector]):
        if getattr(child, "takes_hidden_states_rows", False):
            yield child
