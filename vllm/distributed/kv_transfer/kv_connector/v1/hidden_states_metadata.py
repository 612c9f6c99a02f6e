# SPDX-License-Identifier: Apache-2.0
"""What the two sides of the hidden-states connector tell each other, once a step."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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


@dataclass
class HiddenStatesConnectorMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step."""

    new_files: list[NewFile] = field(default_factory=list)
    unwanted: set[str] = field(default_factory=set)
    """Finished requests of whose file, or note, no client has been told."""
    finished: dict[str, np.ndarray] = field(default_factory=dict)
    """Finished requests with output: the token ids of all rows of their files."""


@dataclass
class HiddenStatesWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: cause of failure by request id."""

    failures: dict[str, str]

    def aggregate(
        self, other: KVConnectorWorkerMetadata
    ) -> "HiddenStatesWorkerMetadata":
        assert isinstance(other, HiddenStatesWorkerMetadata)
        return HiddenStatesWorkerMetadata(self.failures | other.failures)


def take_failures(connector: Any, output: "KVConnectorOutput | None") -> None:
    """Tell the connector of the workers' failures before this step's requests finish.

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
            child.take_failures(metadata)


def ends_by_text(connector: Any, request: Any) -> bool:
    """Whether a stop string ends a request that extracts, with its newest token.

    See ``ExampleHiddenStatesConnector.ends_by_text``.
    """
    return any(
        child.ends_by_text(request)
        for child in getattr(connector, "sub_connectors", [connector])
        if getattr(child, "takes_hidden_states_rows", False)
    )
