# SPDX-License-Identifier: Apache-2.0
"""Hidden states of every extracting request, streamed into one file each.

Unlike other KV connectors this one transfers no KV cache. The scheduler side names
the files and tells the worker side which requests extract; the worker side takes
their rows from the model runner's ``HiddenStateCapture``, in the step that computes
them, and hands them to its writer threads. See ``docs/design/hidden_states.md``.

The scheduler side:
    refusal() - whether there is room for what the request will store
    on_new_request() - the request will compute all its tokens, also cached ones
    build_connector_meta() - files of newly scheduled requests, and unwanted ones
    hear_workers() - failures, and rows for responses, before requests finish
    ends_by_text() - whether a stop string ends the request, as the front end will find
    request_finished() - the path, the rows, or the error, for the request's output
    abandon() - a client has given up, perhaps while its answer is on the way

The worker side:
    bind_connector_metadata() - hears of new requests
    wanted, receive(), fail_wanted() - the RowReceiver of HiddenStateCapture, which
        open the new requests' files
    build_connector_worker_meta() - reports failures, and rows for responses
    get_kv_connector_stats() - what has been counted
    get_finished() - lets go of finished requests, removes what nobody will fetch
    shutdown() - completes what can be completed, withdraws the rest
"""

import base64
import fcntl
import hashlib
import os
import re
import sys
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
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
    HEADER_ROOM,
    FileOptions,
    HiddenStatesError,
    HiddenStatesTimeoutError,
    cleanup_hidden_states,
    load_hidden_states,
    make_directories,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_metadata import (
    HiddenStatesConnectorMetadata,
    HiddenStatesWorkerMetadata,
    InlineRows,
    NewFile,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_sink import (
    FileSink,
    InlineSink,
    OpenSink,
    Outbox,
    Rows,
    Sink,
    SinkRequest,
    WholeTensorSink,
    confine,
    find_sink,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_stats import (
    HiddenStatesPromMetrics,
    HiddenStatesStats,
    StatsCollector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_storage import (
    StorageKeeper,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_writer import (
    Activity,
    RequestWriter,
    make_pool,
)
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.hidden_states.dtypes import FLOAT8, name_of
from vllm.v1.hidden_states.factory import is_writer, model_dtype, stored_dtype
from vllm.v1.hidden_states.plan import Span
from vllm.v1.hidden_states.request import (
    HiddenStatesRequest,
    RequestError,
    is_left_out,
    parse_request,
    refuse_beyond_inline,
)
from vllm.v1.hidden_states.ring import Ring, Slot
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

# How many ended requests are remembered whose client may yet turn out to be gone.
MAX_RECENT = 4096
# Where the writers share the model's processors, a step waits for them this part of the
# time since the last one, and no more than so many seconds.
MAX_SHARE = 0.05
MAX_PAUSE = 0.02
# Seconds for leaving notes, at a shutdown, about what is not complete.
GIVE_UP_TIMEOUT = 0.5
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
    num_bytes: int = 0
    """What it will store."""
    has_room: bool = False
    failure: str | None = None
    stop: IncrementalDetokenizer | None = None
    rows: Rows | None = None
    """For the response."""
    scales: Rows | None = None
    """Of these rows."""


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
        for option, valid in (("checksum", None), ("storage_dtype", "auto")):
            value = getattr(config, option)
            if value != valid and hasattr(self, "_write_tensors"):
                raise ValueError(
                    f"{option} {value!r}: {type(self).__name__} overrides "
                    f"_write_tensors, and its files are its own; valid: {valid!r}"
                )
        self.config = config
        self._storage_path = os.path.abspath(config.shared_storage_path)
        if role == KVConnectorRole.SCHEDULER:
            self._check_storage_path()
            self._init_scheduler_side()
        else:
            self._init_worker_side()
            if self.is_writer:
                self._check_storage_path()

    def _check_storage_path(self) -> None:
        """Fail at start-up where no file can be made.

        Raises:
            ValueError: naming the option and its value.
        """
        path = self._storage_path
        mode = FileOptions(mode=int(self.config.file_mode, 8)).directory_mode
        try:
            list(make_directories(path, mode))
            with tempfile.TemporaryFile(dir=path) as file:
                # Some network file systems are mounted without.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"shared_storage_path {path!r}: no file can be made and locked there "
                f"({error.strerror}); valid: a directory that the engine may write "
                "to, of a file system that has flock"
            ) from error

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """None for rows that are streamed, which are in no KV cache.

        Connectors that read the stock KV group ask this class for its layout: there
        all layers of a token lie together.
        """
        return None if vllm_config.hidden_states_config is not None else "LBNHC"

    def _layer_ids(self, columns: tuple[int, ...] | None) -> tuple[int, ...]:
        """The layers of a request's columns, in their order."""
        if columns is None:
            return self.config.layer_ids
        return tuple(self.config.layer_ids[column] for column in columns)

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
        self._dtype = stored_dtype(self._vllm_config)
        self._keeper = StorageKeeper(
            self.config.save_roots,
            is_deep=self.config.allow_custom_save_path,
            max_stored_bytes=self.config.max_stored_bytes,
            max_age_s=self.config.max_age_s,
            keep_locks=self.config.keep_lock_files,
        )
        if self.config.sink is None:
            self._keeper.start()
        self._recent: OrderedDict[str, str] = OrderedDict()
        self._abandoned: dict[str, str] = {}
        # For room within max_stored_bytes, in the order in which they came.
        self._waiting: dict[str, Request] = {}
        # Those that no worker knows of yet: most steps have none.
        self._unannounced: set[str] = set()
        self._unwanted: set[str] = set()
        self._finished: dict[str, np.ndarray] = {}

    def refusal(self, request: "Request") -> tuple[str, int] | None:
        """Why a request cannot be taken, and the HTTP status that says so."""
        try:
            asked = parse_request(request.kv_transfer_params, self.config)
            if asked is None or is_left_out(request):
                return None
        except RequestError:
            return None  # its response will say so
        try:
            return self._lacks_room(asked, request)
        except RequestError as error:
            return str(error), HTTPStatus.BAD_REQUEST

    def _lacks_room(
        self, asked: HiddenStatesRequest, request: "Request"
    ) -> tuple[str, int] | None:
        if asked.path is not None and any(
            live.path == asked.path for live in self._extractions.values()
        ):
            cause = f"{asked.path!r} is another request's that still runs"
            return cause, HTTPStatus.CONFLICT
        num_rows = self._max_rows(asked, request)
        bytes_per_row = self._bytes_per_row(asked)
        if asked.is_inline:
            limit = self.config.max_inline_bytes
            bytes_per_row += self._bytes_per_scale
            refuse_beyond_inline(asked, num_rows, bytes_per_row, limit)
            return None
        num_bytes = self._stored_bytes(asked, request)
        full = self._keeper.cannot_hold(num_bytes)
        if full is None:
            return None
        if num_bytes > (self.config.max_stored_bytes or 0):
            return full, HTTPStatus.BAD_REQUEST  # clients repeat what 503 says
        if self.config.when_full == "wait":
            return None
        return full, HTTPStatus.SERVICE_UNAVAILABLE

    def _max_rows(self, asked: HiddenStatesRequest, request: "Request") -> int:
        if not asked.include_output_tokens:
            return request.num_prompt_tokens
        limit = self._vllm_config.model_config.max_model_len
        return min(request.num_prompt_tokens + request.max_tokens - 1, limit)

    def _bytes_per_row(self, asked: HiddenStatesRequest) -> int:
        layers = self._layer_ids(asked.columns)
        hidden_size = self._vllm_config.model_config.get_hidden_size()
        return len(layers) * hidden_size * self._dtype.itemsize

    @property
    def _bytes_per_scale(self) -> int:
        """Of each row's scale, where there is one."""
        return 4 if self._dtype == FLOAT8 else 0

    def _stored_bytes(self, asked: HiddenStatesRequest, request: "Request") -> int:
        if asked.is_inline or self.config.sink is not None:
            return 0
        # And the token id.
        bytes_per_row = self._bytes_per_row(asked) + self._bytes_per_scale + 8
        return HEADER_ROOM + self._max_rows(asked, request) * bytes_per_row

    def on_new_request(self, request: "Request") -> None:
        request_id = request.request_id
        # An id used again is not that of an older request, whose client has its path.
        self._recent.pop(request_id, None)
        failure = None
        try:
            asked = parse_request(request.kv_transfer_params, self.config)
            if asked is not None and not is_left_out(request):
                # Of an engine in its caller's process, that has nobody to refuse it.
                failure, _ = self._lacks_room(asked, request) or (None, 0)
        except RequestError as error:  # of a front end that does not check
            asked, failure = None, str(error)
        if failure is not None:
            asked = None
        elif asked is None or is_left_out(request):
            return
        extraction = _Extraction(
            asked,
            os.path.join(self._storage_path, file_name(request_id)),
            _prompt_token_ids(request),
            failure=failure,
        )
        self._extractions[request_id] = extraction
        if asked is None:
            return
        extraction.stop = self._make_stop(request)
        extraction.path = asked.path or extraction.path
        if asked.is_inline:
            extraction.rows = Rows(self._bytes_per_row(asked))
            extraction.scales = Rows(4)
        extraction.num_bytes = self._stored_bytes(asked, request)
        # What needs no room waits for none.
        must_wait = bool(self._waiting) and extraction.num_bytes > 0
        if must_wait or not self._take_room(extraction, request):
            self._waiting[request_id] = request
            # A request that skips the prefix cache cannot be held back by us.
            request.skip_reading_prefix_cache = False
        self._unannounced.add(request_id)

    def _take_room(self, extraction: _Extraction, request: "Request") -> bool:
        if extraction.num_bytes:
            if self._keeper.cannot_hold(extraction.num_bytes) is not None:
                return False
            self._keeper.reserve(extraction.path, extraction.num_bytes)
        extraction.has_room = True
        # A row that the prefix cache spares us is a row that is not computed. The
        # request still fills the cache for others.
        request.skip_reading_prefix_cache = True
        return True

    def _give_room(self) -> None:
        """Let the request that waits longest have what room there is.

        Between two looks of the scheduler: it must not have looked into the prefix
        cache for a request already when that turns out to have room.
        """
        while self._waiting:
            request_id, request = next(iter(self._waiting.items()))
            if not self._take_room(self._extractions[request_id], request):
                return
            del self._waiting[request_id]

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
        if request.request_id in self._waiting:
            return None, False  # the scheduler asks again
        return 0, False  # nothing is ever loaded

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Nothing to do: no KV block is ours."""

    def build_connector_meta(
        self, scheduler_output: "SchedulerOutput"
    ) -> KVConnectorMetadata:
        self._give_room()
        metadata = HiddenStatesConnectorMetadata(
            unwanted=self._unwanted,
            finished=self._finished,
            abandoned=self._abandoned,
        )
        self._unwanted = set()
        self._finished = {}
        self._abandoned = {}
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
                        extraction.asked.path is not None,
                        extraction.asked.is_inline,
                    )
                )
        return metadata

    def hear_workers(self, metadata: HiddenStatesWorkerMetadata) -> None:
        """Remember failures, and rows, of requests that are still alive."""
        metadata.settle()
        for request_id, cause in metadata.failures.items():
            if request_id in self._extractions:
                self._extractions[request_id].failure = cause
        for rows in metadata.rows:
            extraction = self._extractions.get(rows.request_id)
            if extraction is not None and extraction.rows is not None:
                assert extraction.scales is not None
                extraction.rows.put(rows.position, rows.data)
                extraction.scales.put(rows.position, rows.scales)

    def abandon(self, request_ids: Iterable[str]) -> None:
        """These are aborted; some may have ended, and nobody has read their answer."""
        for request_id in request_ids:
            path = self._recent.pop(request_id, None)
            # A path that a client chose may be another request's by now.
            if path is not None and not self._is_taken(path):
                self._abandoned[request_id] = path

    def _is_taken(self, path: str) -> bool:
        live = (extraction.path for extraction in self._extractions.values())
        return path in live or path in self._recent.values()

    def has_pending_push_work(self) -> bool:
        """Whether workers have to be told something, in a step without tokens."""
        return bool(self._abandoned)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        extraction = self._extractions.pop(request_id, None)
        if extraction is None:
            return False, None
        self._waiting.pop(request_id, None)
        if extraction.has_room:
            self._keeper.settle(extraction.path)
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
        token_ids = extraction.prompt_token_ids
        if extraction.asked.include_output_tokens:
            # The last token never was an input.
            output = np.asarray(request.output_token_ids[:-1], np.int64)
            token_ids = np.concatenate([token_ids, output])
            self._finished[request_id] = token_ids
        if extraction.rows is not None:
            return False, self._inline(extraction, token_ids)
        self._recent[request_id] = extraction.path
        if len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)
        return False, {"hidden_states_path": extraction.path}

    def _inline(self, extraction: _Extraction, token_ids: np.ndarray) -> dict[str, Any]:
        """What a response has in place of a path."""
        asked, rows, scales = extraction.asked, extraction.rows, extraction.scales
        assert asked is not None and rows is not None and scales is not None
        num_rows = len(token_ids)
        data = rows.take(num_rows)
        num_bytes = num_rows * self._bytes_per_row(asked)
        if len(data) < num_bytes:
            cause = f"{len(data)} bytes of {num_bytes} have come from the worker"
            return {"hidden_states_error": cause}
        layer_ids = self._layer_ids(asked.columns)
        hidden_size = self._vllm_config.model_config.get_hidden_size()
        told = {
            "data": base64.b64encode(data).decode("ascii"),
            "encoding_format": "base64",
            "dtype": name_of(self._dtype),
            "model_dtype": name_of(model_dtype(self._vllm_config)),
            "shape": [num_rows, len(layer_ids), hidden_size],
            "layer_ids": list(layer_ids),
            "token_ids": token_ids.tolist(),
        }
        if self._bytes_per_scale:
            # float32, one a row.
            told["scales"] = base64.b64encode(scales.take(num_rows)).decode("ascii")
        return {"hidden_states": told}

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # ==============================
    # Worker side
    # ==============================

    def _init_worker_side(self) -> None:
        model_config = self._vllm_config.model_config
        self._dtype = stored_dtype(self._vllm_config)
        self._metadata = {
            "model": str(model_config.model),
            "dtype": name_of(model_dtype(self._vllm_config)),
            "storage_dtype": name_of(self._dtype),
            # True of every layer: the last id is the last layer's output before it.
            "final_norm": "not applied",
        }
        self.is_writer = is_writer()
        self._shares_processors = self._vllm_config.device_config.device_type == "cpu"
        self._last_receive = 0.0
        self._activity = Activity()
        self._pool = make_pool(
            self.config.num_writer_threads, spread=self._shares_processors
        )
        self.is_registered = False
        self._file_options = FileOptions(
            use_lock=self.config.use_synchronization_lock,
            fsync=self.config.fsync,
            checksum=self.config.checksum,
            mode=int(self.config.file_mode, 8),
        )
        self._third_party_sink: OpenSink | None = (
            None if self.config.sink is None else find_sink(self.config.sink)
        )
        self._outbox = Outbox()
        self._stats = StatsCollector()
        self._ring: Ring | None = None
        # All of live requests, complete or not: an abort removes complete ones too.
        self._writers: dict[str, RequestWriter] = {}
        # Of requests that have ended, until they are done.
        self._ending: dict[str, RequestWriter] = {}
        self._new_files: dict[str, NewFile] = {}
        self._unopened: deque[RequestWriter] = deque()
        self._opening: list[Future[None]] = []
        # Ids of finished requests whose end this step knows; others may have them now.
        self._gone: set[str] = set()
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
        for request_id in connector_metadata.unwanted:
            # Before others are made: one may have a path that such a one still holds.
            if request_id in self._writers:
                self._let_go(request_id, connector_metadata)
        for new in connector_metadata.new_files:
            if new.request_id in self._writers:
                # An id used again at once: first the end of what had it before.
                self._let_go(new.request_id, connector_metadata).drain()
            self._stats.began()
            writer = RequestWriter(
                self._pool,
                self._sink_request(new),
                self._open_sink_of(new),
                new.columns,
                self._stats,
                new.is_inline,
                self._activity,
            )
            self._unopened.append(writer)
            self._writers[new.request_id] = writer
            self._new_files[new.request_id] = new
            self.wanted[new.request_id] = (
                sys.maxsize if new.include_output_tokens else len(new.token_ids)
            )

    def _sink_request(self, new: NewFile) -> SinkRequest:
        layer_ids = self._layer_ids(new.columns)
        return SinkRequest(
            new.request_id,
            new.path,
            new.token_ids,
            None if new.include_output_tokens else len(new.token_ids),
            layer_ids,
            self._vllm_config.model_config.get_hidden_size(),
            self._dtype,
            self._metadata
            | {
                "layer_ids": str(list(layer_ids)),
                "num_prompt_tokens": str(len(new.token_ids)),
            },
            model_dtype(self._vllm_config),
        )

    def _open_sink_of(self, new: NewFile) -> OpenSink:
        """What makes a request's sink, in a writer's thread."""
        write_tensors = getattr(self, "_write_tensors", None)

        def open_sink(request: SinkRequest) -> Sink:
            if new.is_inline:
                return InlineSink(request, self._outbox)
            roots = self.config.save_roots if new.is_custom_path else None
            if write_tensors is not None:
                return WholeTensorSink(
                    request, self._file_options, write_tensors, roots
                )
            return FileSink(request, self._file_options, roots)

        third_party = self._third_party_sink
        if new.is_inline or third_party is None:
            return open_sink

        def open_third_party(request: SinkRequest) -> Sink:
            if new.is_custom_path:
                confine(request.path, self.config.save_roots)
            return third_party(request)

        return open_third_party

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
        self._open_files()
        self._ring = slot.ring
        slot.retain(len(spans))
        slot_row = 0
        for span in spans:
            request_id = span.request_id
            self._writers[request_id].write(span, slot, slot_row)
            slot_row += span.num_rows
            if span.end == self.wanted[request_id]:
                self._complete(request_id, self._new_files[request_id].token_ids)
        if self._shares_processors:
            self._let_writers_run()

    def _let_writers_run(self) -> None:
        """Wait until the writers are done, for a small part of the step's time.

        On a CPU they would run beside the next forward, on its processors: each time
        that one of them takes Python's lock, or a processor, all of the model's threads
        wait for the one that lost it. It costs several times what it takes now.
        """
        start = time.monotonic()
        allowed = min(MAX_SHARE * (start - self._last_receive), MAX_PAUSE)
        self._activity.wait_until_idle(allowed)
        self._last_receive = time.monotonic()

    def _open_files(self) -> None:
        """Have the new requests' files opened; build_connector_worker_meta waits.

        After the forward is launched, not before it: threads that make files beside it
        take Python's lock from it again and again, and what makes them wait for each
        other costs more than the files do.
        """
        while self._unopened:  # a signal may end this anywhere: none is opened twice
            self._opening.append(self._unopened.popleft().open())

    def _complete(self, request_id: str, token_ids: np.ndarray) -> None:
        """All rows of a request have been handed to its writer."""
        self._stop_wanting(request_id)
        self._writers[request_id].finish(token_ids)

    def fail_wanted(self, cause: str) -> None:
        """No rows will come for the requests in ``wanted``."""
        self._open_files()
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
        self._open_files()
        metadata = self._connector_metadata
        if not isinstance(metadata, HiddenStatesConnectorMetadata):
            metadata = HiddenStatesConnectorMetadata()  # outside of any step
        for request_id in finished_req_ids - self._gone:
            if request_id in self._writers:
                self._let_go(request_id, metadata)
        self._gone.clear()
        for request_id, path in metadata.abandoned.items():
            self._abandon(request_id, path)
        if self._ending:
            self._ending = {
                request_id: writer
                for request_id, writer in self._ending.items()
                if not writer.is_idle
            }
        return None, None

    def _abandon(self, request_id: str, path: str) -> None:
        """Nobody has read a request's answer: take back what was told in it."""
        if not self.is_writer or self._third_party_sink is not None:
            return  # a sink of others is theirs once it is finished
        if request_id in self._ending:
            self._ending[request_id].remove()
            return
        writers = [*self._writers.values(), *self._ending.values()]
        if any(writer.request.path == path for writer in writers):
            return  # a path that a client chose, and has chosen again
        self._stats.aborted()
        try:
            self._pool.submit(_clean_up, path)
        except RuntimeError:  # no more threads
            _clean_up(path)

    def _let_go(
        self, request_id: str, metadata: HiddenStatesConnectorMetadata
    ) -> RequestWriter:
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
        self._ending[request_id] = self._writers.pop(request_id)
        self._gone.add(request_id)
        return writer

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        self._open_files()
        # The path may leave with this step's output: the lock has to be there.
        # The last one first: each that is waited for wakes this thread up once.
        for opening in reversed(self._opening):
            opening.result()
        self._opening.clear()
        if not self._writers:
            return None
        failures = _failures(self._writers)
        inline = {
            request_id: writer
            for request_id, writer in self._writers.items()
            if writer.is_inline
        }
        if not inline:
            return HiddenStatesWorkerMetadata(failures) if failures else None

        def collect() -> tuple[dict[str, str], list[InlineRows]]:
            for writer in inline.values():
                writer.drain()
            return _failures(inline), self._outbox.take()

        return HiddenStatesWorkerMetadata(failures, collect=collect)

    def get_kv_connector_stats(self) -> HiddenStatesStats | None:
        """What has been counted since the last time, in the worker that writes."""
        if self._role != KVConnectorRole.WORKER or not self.is_writer:
            return None
        if self._ring is None:
            return self._stats.take(0, 0.0)
        in_use = self._ring.num_slots - self._ring.num_free
        return self._stats.take(in_use, self._ring.take_waited())

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> HiddenStatesStats | None:
        return HiddenStatesStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HiddenStatesPromMetrics:
        return HiddenStatesPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    def shutdown(self) -> None:
        if self._role != KVConnectorRole.WORKER:
            self._keeper.stop()
            return
        cause = "the engine was shut down before the prompt was computed"
        self.fail_wanted(cause)
        writers = [*self._writers.values(), *self._ending.values()]
        if not self._activity.wait_until_idle(self.config.shutdown_timeout_s):
            for writer in writers:
                writer.give_up("the engine was shut down before all rows were written")
            self._activity.wait_until_idle(GIVE_UP_TIMEOUT)
        self._pool.shutdown(wait=False)


def _clean_up(path: str) -> None:
    try:
        cleanup_hidden_states(path)
    except Exception as error:
        logger.error("Cannot remove %s: %s", path, error)


def _failures(writers: dict[str, RequestWriter]) -> dict[str, str]:
    return {
        request_id: writer.failure
        for request_id, writer in writers.items()
        if writer.failure is not None
    }


def _prompt_token_ids(request: "Request") -> np.ndarray:
    """``[num_prompt_tokens]`` int64; -1 where the prompt has embeddings."""
    if request.prompt_token_ids is None:
        return np.full(request.num_prompt_tokens, -1, np.int64)
    token_ids = np.asarray(request.prompt_token_ids, np.int64)
    if request.prompt_is_token_ids is not None:
        token_ids[~np.asarray(request.prompt_is_token_ids, bool)] = -1
    return token_ids
