# SPDX-License-Identifier: Apache-2.0
"""The last hidden state: rows of the requests that ask for one, on their way out.

The vector behind a request's first token is the row of its prompt's last position, as
the model hands it to its language-model head: after the final norm. It is taken in
the step that computes this position, copied to the host behind the step, and travels
to the engine within the step's output. Nothing of it is kept in a worker: a request
that is computed again after a preemption has its vector in the later step's output.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from vllm.v1.hidden_states.head import Head, UnknownHeadError, find_head
from vllm.v1.hidden_states.pack import gather_rows
from vllm.v1.hidden_states.plan import plan_spans


class StepVectors:
    """The last hidden states of one step's requests.

    Made before the device has computed them. Read, or pickled, later: that waits.
    """

    def __init__(
        self,
        request_ids: Sequence[str],
        rows: torch.Tensor | None,
        layer: int,
        wait: Callable[[], None] | None = None,
        cause: str = "",
    ):
        """
        Args:
            request_ids: In the order of the rows.
            rows: ``[requests, H]`` float32 on the host; None where there are none.
            layer: The id of the layer whose output the rows are.
            wait: Blocks until the rows are there.
            cause: Why there are no rows.
        """
        self.layer = layer
        self.cause = cause
        self._index = {request_id: i for i, request_id in enumerate(request_ids)}
        self._rows = None if rows is None else rows.numpy()
        self._wait = wait
        self._num_not_finite: np.ndarray | None = None

    def get(self, request_id: str) -> np.ndarray | None:
        """The vector ``[H]`` of a request; None if this step has none of it."""
        index = self._index.get(request_id)
        if index is None or self._rows is None:
            return None
        self._settle()
        vector: np.ndarray = self._rows[index]
        return vector

    def num_not_finite(self, request_id: str) -> int:
        """How many values of a request's vector are none; all rows looked at once."""
        self._settle()
        if self._num_not_finite is None:
            assert self._rows is not None
            self._num_not_finite = np.count_nonzero(~np.isfinite(self._rows), axis=1)
        return int(self._num_not_finite[self._index[request_id]])

    def __contains__(self, request_id: str) -> bool:
        """Whether this step computed the request's last position."""
        return request_id in self._index

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return self.__dict__

    def _settle(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None


class LastHiddenStateCapture:
    """Takes last hidden states in the worker whose output the engine reads.

    Args:
        is_wanted: Whether a request's sampling parameters ask for one.
        hidden_size: H.
        layer: The id of the layer whose output they are: the number of layers.
        max_requests: The most requests of one step.
        device: Where the model runs.
        dtype: Of the model's output.
        is_writer: Whether the engine reads this worker's output. Others only help to
            find the head.
    """

    def __init__(
        self,
        is_wanted: Callable[[Any], bool],
        hidden_size: int,
        layer: int,
        max_requests: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        is_writer: bool = True,
    ):
        self.hidden_size = hidden_size
        self.layer = layer
        self.device = device
        self.dtype = dtype
        self.is_writer = is_writer
        self._is_wanted = is_wanted
        self._max_requests = max_requests
        # Requests that ask for one, until they end, by the length of their prompts.
        self._lengths: dict[str, int] = {}
        self._taken: StepVectors | None = None
        # [max_requests, H] float32 on the device, from the first request on.
        self._buffer: torch.Tensor | None = None
        self._head: Head | None = None
        self._no_head = ""

    def attach(self, model: Any) -> None:
        """Find out what of the model's output its head is given.

        An engine starts with any model; of one that does not let itself be looked
        into, requests are told so.
        """
        rows = torch.zeros((1, self.hidden_size), dtype=self.dtype, device=self.device)
        try:
            self._head, self._no_head = find_head(model, rows), ""
        except UnknownHeadError as error:
            self._no_head = (
                f"of {type(model).__name__} it is not known what its head is given: "
                f"{error}"
            )

    def begin_step(self, finished: Iterable[str], new: Iterable[Any]) -> None:
        """Hear which requests have ended and which are new.

        Args:
            finished: Ids.
            new: Of each the id, the prompt and the sampling parameters, as a
                scheduler tells them to its workers.
        """
        self._taken = None
        if not self.is_writer:
            return
        if self._lengths:
            for request_id in finished:
                self._lengths.pop(request_id, None)
        for request in new:
            if self._is_wanted(request.sampling_params):
                ids, embeds = request.prompt_token_ids, request.prompt_embeds
                self._lengths[request.req_id] = len(embeds if ids is None else ids)

    def capture(
        self,
        hidden_states: Any,
        request_ids: Sequence[str],
        num_scheduled_tokens: Sequence[int],
        num_computed_tokens: Sequence[int],
    ) -> None:
        """Take the rows of the prompts that end in this step; never waits.

        Args:
            hidden_states: ``[N, H]``, what the language-model head is given.
            request_ids, num_scheduled_tokens, num_computed_tokens: See
                ``plan_spans``.
        """
        if not self._lengths:
            return
        spans = plan_spans(
            request_ids, num_scheduled_tokens, num_computed_tokens, self._lengths
        )
        last_rows = {
            span.request_id: span.row + span.num_rows - 1
            for span in spans
            if span.end == self._lengths[span.request_id]
        }
        if last_rows:
            self._taken = self._take(hidden_states, last_rows)

    def take(self) -> StepVectors | None:
        """What this step has, for its output."""
        taken, self._taken = self._taken, None
        return taken

    def _take(self, hidden_states: Any, last_rows: dict[str, int]) -> StepVectors:
        shape = tuple(getattr(hidden_states, "shape", ()))
        cause = self._no_head
        if len(shape) != 2 or shape[1] != self.hidden_size:
            cause = (
                f"the model's output has shape {list(shape)}, and not "
                f"[tokens, {self.hidden_size}]: this family has no one vector"
            )
        if cause:
            return StepVectors(list(last_rows), None, self.layer, cause=cause)
        try:
            rows = gather_rows(hidden_states, list(last_rows.values()))  # [n, H]
            if self._head is not None:
                rows = self._head(rows)
            host, wait = self._copy(rows)
        except torch.OutOfMemoryError as error:
            cause = f"no memory for the vectors: {error}"
            return StepVectors(list(last_rows), None, self.layer, cause=cause)
        return StepVectors(list(last_rows), host, self.layer, wait)

    def _copy(
        self, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Callable[[], None] | None]:
        if self.device.type == "cpu":
            return rows.float(), None
        module = torch.get_device_module(self.device)
        if self._buffer is None:
            shape = (self._max_requests, self.hidden_size)
            self._buffer = torch.empty(shape, dtype=torch.float32, device=self.device)
            self._copy_stream = module.Stream()
        copied = module.Event()
        # The copy starts when the rows are there; the next step's rows come after it.
        stream, copy_stream = module.current_stream(), self._copy_stream
        stream.wait_stream(copy_stream)
        packed = self._buffer[: len(rows)].copy_(rows)
        copy_stream.wait_stream(stream)
        with module.stream(copy_stream):
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            copied.record(copy_stream)
        return host, copied.synchronize
