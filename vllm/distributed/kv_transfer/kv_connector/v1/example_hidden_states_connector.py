# SPDX-License-Identifier: Apache-2.0
"""Hidden states of every extracting request, streamed into one file each.

Unlike other KV connectors this one transfers no KV cache. The scheduler side names
the files and tells the worker side which requests extract; the worker side takes
their rows from the model runner's ``HiddenStateCapture``, in the step that computes
them, and hands them to its writer threads. See ``docs/design/hidden_states.md``.

The scheduler side:
    on_new_request() - the request will compute all its tokens, also cached ones
    build_connector_meta() - files of newly scheduled requests, and unwanted ones
    take_failures() - what the workers could not do, before requests finish
    ends_by_text() - whether a stop string ends the request, as the front end will find
    request_finished() - the path, or the error, for the request's output

The worker side:
    bind_connector_metadata() - opens the new requests' files
    wanted, receive(), fail_wanted() - the RowReceiver of HiddenStateCapture
    build_connector_worker_meta() - reports failures
    get_finished() - lets go of finished requests, removes what nobody will fetch
    shutdown() - completes what can be completed, withdraws the rest
"""

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_file import (
    HiddenStatesError,
    HiddenStatesFile,
    HiddenStatesTimeoutError,
    cleanup_hidden_states,
    load_hidden_states,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_metadata import (
    HiddenStatesConnectorMetadata,
    HiddenStatesWorkerMetadata,
    NewFile,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_writer import (
    FileWriter,
)
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.hidden_states.factory import is_writer, model_dtype
from vllm.v1.hidden_states.plan import Span
from vllm.v1.hidden_states.request import (
    HiddenStatesRequest,
    RequestError,
    is_left_out,
    parse_request,
)
from vllm.v1.hidden_states.ring import Slot
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = [
    "ExampleHiddenStatesConnector",
    "HiddenStatesError",
    "HiddenStatesTimeoutError",
    "cleanup_hidden_states",
    "extract_from_kv_cache",
    "load_hidden_states",
]

logger = init_logger(__name__)

# Bytes of a request id that stand in its file's name as they are; most file systems
# allow 255 for the whole name.
MAX_NAME = 150

WITH_OUTPUT = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


@dataclass
class _Extraction:
    """What the scheduler side keeps of a request."""

    asked: HiddenStatesRequest | None
    """None where the request's options are not valid."""
    path: str
    prompt_token_ids: np.ndarray
    failure: str | None = None
    stop: IncrementalDetokenizer | None = None


def extract_from_kv_cache(
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Rows of a paged cache, for connectors that read the stock KV group.

    Not used by the connector below.

    Args:
        kv_cache: ``[blocks, layers, block size, hidden size]``.
        slot_mapping: Slot of each token; only the first ``num_tokens`` count.
        num_tokens: How many rows to take.

    Returns:
        ``[num_tokens, layers, hidden size]``.
    """
    slots = slot_mapping[:num_tokens]
    size = kv_cache.size(2)
    return kv_cache[torch.div(slots, size, rounding_mode="floor"), :, slots % size]


def file_name(request_id: str) -> str:
    """The name of a request's file, whatever its id holds (it may be a client's)."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", request_id) and (
        len(request_id) <= MAX_NAME
    ):
        return f"{request_id}.safetensors"
    digest = hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", request_id)[: MAX_NAME - len(digest)]
    return f"{readable}-{digest}.safetensors"


class ExampleHiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Writes each request's hidden states to ``shared_storage_path``.

    Configured by ``VllmConfig.hidden_states_config``.
    """

    takes_hidden_states_rows: ClassVar[bool] = True
    """Tells the configuration that rows are streamed, not kept as KV cache."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        config = vllm_config.hidden_states_config
        if config is None:
            raise ValueError(
                f"{type(self).__name__} needs VllmConfig.hidden_states_config, which "
                "EngineArgs.create_engine_config() makes from the speculative config "
                "or the connector's layer_ids"
            )
        if hasattr(self, "_write_tensors"):
            raise ValueError(
                f"{type(self).__name__} overrides _write_tensors, which is never "
                "called: rows are streamed to the file. Valid: a connector without it"
            )
        self.config = config
        self._storage_path = os.path.abspath(config.shared_storage_path)
        if role == KVConnectorRole.SCHEDULER:
            _check_storage_path(self._storage_path)
            self._init_scheduler_side()
        else:
            self._init_worker_side()
            if self.is_writer:
                _check_storage_path(self._storage_path)

    @property
    def requires_kv_delivery(self) -> bool:
        """A preempted request owes nobody its KV cache."""
        return False

    # ==============================
    # Scheduler side
    # ==============================

    def _init_scheduler_side(self) -> None:
        # Now, as it may take seconds; it is None with skip_tokenizer_init.
        self._tokenizer = cached_tokenizer_from_config(self._vllm_config.model_config)
        self._extractions: dict[str, _Extraction] = {}
        # Those that no worker knows of yet: most steps have none.
        self._unannounced: set[str] = set()
        self._unwanted: set[str] = set()
        self._finished: dict[str, np.ndarray] = {}

    def on_new_request(self, request: "Request") -> None:
        request_id = request.request_id
        failure = None
        try:
            asked = parse_request(request.kv_transfer_params, self.config)
        except RequestError as error:  # of a front end that does not check
            asked, failure = None, str(error)
        if failure is None and (asked is None or is_left_out(request)):
            return
        if asked is not None:
            # A row that the prefix cache spares us is a row that is not computed. The
            # request still fills the cache for others.
            request.skip_reading_prefix_cache = True
        self._extractions[request_id] = _Extraction(
            asked,
            os.path.join(self._storage_path, file_name(request_id)),
            _prompt_token_ids(request),
            failure=failure,
            stop=self._make_stop(request) if asked is not None else None,
        )
        if asked is not None:
            self._unannounced.add(request_id)

    def _make_stop(self, request: "Request") -> IncrementalDetokenizer | None:
        """Finds the request's stop strings; None where it has none.

        Without this the front end alone would find them, some steps later, and abort
        the request: as a client does that gives up, whose file is removed.
        """
        params = request.sampling_params
        if params is None or not params.stop or not params.detokenize:
            return None
        try:
            # It looks at the parameters and the prompt alone, which both kinds have.
            return IncrementalDetokenizer.from_new_request(
                self._tokenizer, cast(Any, request)
            )
        except Exception:  # what a client sends must not end the engine
            logger.exception("No stop strings for %s", request.request_id)
            return None

    def ends_by_text(self, request: "Request") -> bool:
        """Whether the newest output token completes a stop string.

        The request then ends as by its length: the front end finds the string, too,
        and says so.
        """
        extraction = self._extractions.get(request.request_id)
        if extraction is None or extraction.stop is None:
            return False
        try:
            stop_string = extraction.stop.update([request.output_token_ids[-1]], False)
        except Exception:  # as above; the front end still finds the string
            logger.exception("No stop strings for %s", request.request_id)
            extraction.stop = stop_string = None
        if stop_string is None:
            return False
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False  # nothing is ever loaded

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Nothing to do: no KV block is ours."""

    def build_connector_meta(
        self, scheduler_output: "SchedulerOutput"
    ) -> KVConnectorMetadata:
        metadata = HiddenStatesConnectorMetadata(
            unwanted=self._unwanted, finished=self._finished
        )
        self._unwanted = set()
        self._finished = {}
        if self._unannounced:
            for request_id in scheduler_output.num_scheduled_tokens:
                if request_id not in self._unannounced:
                    continue
                self._unannounced.remove(request_id)
                extraction = self._extractions[request_id]
                assert extraction.asked is not None
                metadata.new_files.append(
                    NewFile(
                        request_id,
                        extraction.path,
                        extraction.prompt_token_ids,
                        extraction.asked.columns,
                        extraction.asked.include_output_tokens,
                    )
                )
        return metadata

    def take_failures(self, metadata: HiddenStatesWorkerMetadata) -> None:
        """Remember failures of requests that are still alive."""
        for request_id, cause in metadata.failures.items():
            if request_id in self._extractions:
                self._extractions[request_id].failure = cause

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        extraction = self._extractions.pop(request_id, None)
        if extraction is None:
            return False, None
        has_output = request.status in WITH_OUTPUT
        if extraction.asked is None or request_id in self._unannounced:
            self._unannounced.discard(request_id)
            failure = extraction.failure if has_output else None
            return False, {"hidden_states_error": failure} if failure else None
        if not has_output:
            self._unwanted.add(request_id)
            return False, None
        if extraction.failure is not None:
            # The client has the cause, and no path by which to remove the note.
            self._unwanted.add(request_id)
            return False, {"hidden_states_error": extraction.failure}
        if extraction.asked.include_output_tokens:
            # The last token never was an input.
            self._finished[request_id] = np.concatenate(
                [
                    extraction.prompt_token_ids,
                    np.asarray(request.output_token_ids[:-1], np.int64),
                ]
            )
        return False, {"hidden_states_path": extraction.path}

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # ==============================
    # Worker side
    # ==============================

    def _init_worker_side(self) -> None:
        model_config = self._vllm_config.model_config
        self._dtype = model_dtype(self._vllm_config)
        self._metadata = {
            "model": str(model_config.model),
            "dtype": str(self._dtype).removeprefix("torch."),
            # True of every layer: the last id is the last layer's output before it.
            "final_norm": "not applied",
        }
        self.is_writer = is_writer()
        self._pool = ThreadPoolExecutor(
            self.config.num_writer_threads, thread_name_prefix="hidden-states-writer"
        )
        self.is_registered = False
        # All of live requests, complete or not: an abort removes complete ones too.
        self._writers: dict[str, FileWriter] = {}
        self._new_files: dict[str, NewFile] = {}
        self._opening: list[Future[None]] = []
        # Ids of finished requests that others have by now.
        self._replaced: set[str] = set()
        self.wanted: dict[str, int] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # vLLM keeps one worker connector per process, and hands a second engine the
        # first one's.
        if self.is_registered:
            raise RuntimeError(
                "two engines of one process cannot both extract hidden states: vLLM "
                "keeps one KV connector per process. Give each engine a process of "
                "its own (VLLM_ENABLE_V1_MULTIPROCESSING=1, the default)"
            )
        self.is_registered = True

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, HiddenStatesConnectorMetadata)
        if not self.is_writer:
            return
        for new in connector_metadata.new_files:
            if new.request_id in self._writers:
                # An id used again at once: first the end of what had it before.
                self._let_go(new.request_id, connector_metadata).drain()
                self._replaced.add(new.request_id)
            writer = FileWriter(
                self._pool,
                HiddenStatesFile(
                    new.path, new.request_id, self.config.use_synchronization_lock
                ),
                (len(self._layer_ids(new)), self._hidden_size),
                self._dtype,
                new.columns,
            )
            # Runs beside the forward; build_connector_worker_meta waits for it.
            self._opening.append(writer.open())
            self._writers[new.request_id] = writer
            self._new_files[new.request_id] = new
            self.wanted[new.request_id] = (
                sys.maxsize if new.include_output_tokens else len(new.token_ids)
            )

    def _layer_ids(self, new: NewFile) -> list[int]:
        """The layers of a file, in the order of its columns."""
        if new.columns is None:
            return list(self.config.layer_ids)
        return [self.config.layer_ids[column] for column in new.columns]

    @property
    def _hidden_size(self) -> int:
        return self._vllm_config.model_config.get_hidden_size()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """No KV cache is saved."""

    def wait_for_save(self) -> None:
        """No KV cache is saved."""

    def receive(self, spans: Sequence[Span], slot: Slot) -> None:
        """Hand the spans' rows to the writers (see ``RowReceiver``)."""
        slot.retain(len(spans))
        slot_row = 0
        for span in spans:
            request_id = span.request_id
            self._writers[request_id].write(span, slot, slot_row)
            slot_row += span.num_rows
            if span.end == self.wanted[request_id]:
                self._complete(request_id, self._new_files[request_id].token_ids)

    def _complete(self, request_id: str, token_ids: np.ndarray) -> None:
        """All rows of a file have been handed to its writer."""
        new = self._stop_wanting(request_id)
        self._writers[request_id].finish(
            token_ids,
            self._metadata
            | {
                "layer_ids": str(self._layer_ids(new)),
                "num_prompt_tokens": str(len(new.token_ids)),
            },
        )

    def fail_wanted(self, cause: str) -> None:
        """No rows will come for the requests in ``wanted``."""
        for request_id in list(self.wanted):
            self._stop_wanting(request_id)
            self._writers[request_id].fail(cause)

    def _stop_wanting(self, request_id: str) -> NewFile:
        """No more rows are wanted of this request."""
        del self.wanted[request_id]
        return self._new_files.pop(request_id)

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        metadata = self._connector_metadata
        if not isinstance(metadata, HiddenStatesConnectorMetadata):
            metadata = HiddenStatesConnectorMetadata()  # outside of any step
        for request_id in finished_req_ids - self._replaced:
            if request_id in self._writers:
                self._let_go(request_id, metadata)
        self._replaced.clear()
        return None, None

    def _let_go(
        self, request_id: str, metadata: HiddenStatesConnectorMetadata
    ) -> FileWriter:
        """A request has finished: its file's end is known."""
        writer = self._writers[request_id]
        if request_id in self.wanted:
            if request_id in metadata.finished:
                self._complete(request_id, metadata.finished[request_id])
            else:
                self._stop_wanting(request_id)
                if request_id not in metadata.unwanted:
                    writer.fail(
                        "the request ended before its prompt was computed in full"
                    )
        if request_id in metadata.unwanted:
            writer.remove()
        del self._writers[request_id]
        return writer

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        # The path may leave with this step's output: the lock has to be there.
        for opening in self._opening:
            opening.result()
        self._opening.clear()
        failures = {
            request_id: writer.failure
            for request_id, writer in self._writers.items()
            if writer.failure is not None
        }
        return HiddenStatesWorkerMetadata(failures) if failures else None

    def shutdown(self) -> None:
        if self._role != KVConnectorRole.WORKER:
            return
        self.fail_wanted("the engine was shut down before the prompt was computed")
        self._pool.shutdown(wait=True)


def _prompt_token_ids(request: "Request") -> np.ndarray:
    """``[num_prompt_tokens]`` int64; -1 where the prompt has embeddings."""
    if request.prompt_token_ids is None:
        return np.full(request.num_prompt_tokens, -1, np.int64)
    token_ids = np.asarray(request.prompt_token_ids, np.int64)
    if request.prompt_is_token_ids is not None:
        token_ids[~np.asarray(request.prompt_is_token_ids, bool)] = -1
    return token_ids


def _check_storage_path(path: str) -> None:
    """Fail at start-up where no file can be made.

    Raises:
        ValueError: naming the option and its value.
    """
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"shared_storage_path {path!r}: no file can be made there "
            f"({error.strerror}); valid: a directory that the engine may write to"
        ) from error
