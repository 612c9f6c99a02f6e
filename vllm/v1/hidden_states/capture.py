# SPDX-License-Identifier: Apache-2.0
"""What a model runner calls: set up once, then one call after each forward.

The model is asked for the union of the layers that are extracted and those that a
drafter needs. After the forward, ``capture`` takes the extracted rows and gives the
runner the output that it would have seen without extraction.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from vllm.v1.hidden_states.plan import Span, plan_spans
from vllm.v1.hidden_states.ring import Ring, Slot

# Of 32 MiB at most is what glibc learns from; a block has some bytes of its own.
LARGEST_BLOCK = (32 << 20) - (64 << 10)


class RowReceiver(Protocol):
    """Takes the rows of the requests that extract: the worker's connector."""

    wanted: Mapping[str, int]
    """For each request with rows to come, how many leading positions it wants."""

    def receive(self, spans: Sequence[Span], slot: Slot) -> None:
        """Take the spans' rows, which lie in ``slot`` in this order.

        The caller holds the slot until this returns; the receiver holds it further
        by ``slot.retain``, and releases it as often.
        """

    def fail_wanted(self, cause: str) -> None:
        """No rows will come for any request in ``wanted``."""


class MissingLayersError(RuntimeError):
    """A model returned other layers than it was asked for."""

    def __init__(self, message: str, hidden_states: Any):
        super().__init__(message)
        self.hidden_states = hidden_states


def asked_layers(model: torch.nn.Module) -> tuple[int, ...]:
    """The layers that a model was asked for last, sorted.

    Raises:
        ValueError: if no module of it says so.
    """
    for module in model.modules():
        layers = getattr(module, "aux_hidden_state_layers", None)
        if isinstance(layers, tuple):
            return tuple(sorted(set(layers)))
    raise ValueError(f"{type(model).__name__} does not say which layers it hands over")


class HiddenStateCapture:
    """Captures hidden states in one worker.

    Args:
        layer_ids: Layers to extract, in the order of the columns.
        hidden_size: H, of each layer's ``[N, H]``.
        dtype: Of the rows as they are stored.
        max_rows: The most rows that one step can have.
        num_slots: Slots of the ring.
        device: Where the model runs.
        is_last_stage: Whether this worker's model returns the layers; earlier
            pipeline stages hand theirs on within the model.
        find_receiver: Called at the first capture. None where this worker's rows
            are not wanted (another tensor-parallel rank writes them).
        positions_on_device: The numbers of computed tokens are upper bounds: the host
            does not know yet how many drafted tokens were accepted. The rows'
            positions go with them.
        is_writer: Whether there will be a receiver: no memory is taken otherwise.
        connect_stages: Called with the model and the layers that it was asked for.
    """

    def __init__(
        self,
        layer_ids: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
        max_rows: int,
        num_slots: int,
        device: torch.device,
        is_last_stage: bool,
        find_receiver: Callable[[], RowReceiver | None],
        positions_on_device: bool = False,
        is_writer: bool = True,
        connect_stages: Callable[[Any, Sequence[int]], None] | None = None,
    ):
        self.layer_ids = tuple(layer_ids)
        self.hidden_size = hidden_size
        self.is_last_stage = is_last_stage
        self.is_writer = is_writer
        self._device = device
        self._find_receiver = find_receiver
        self._connect_stages = connect_stages
        self._receiver: RowReceiver | None = None
        self._make_ring: Callable[[], Ring] = lambda: Ring(
            num_slots,
            (max_rows, len(self.layer_ids), hidden_size),
            dtype,
            device,
            positions_on_device,
        )
        self._ring: Ring | None = None
        self._requested: tuple[int, ...] = ()
        # Of the layers, and of a drafter's, among those that the model returns.
        self._places: list[int] = []
        self._drafter_places: list[int] = []

    def attach(self, model: Any, keep_layers: bool = False) -> None:
        """Ask the model for the layers.

        Args:
            model: Has ``set_aux_hidden_state_layers`` (``SupportsEagle3``).
            keep_layers: The model was asked for layers before, by a drafter: those
                stay in the output that the runner sees.
        """
        drafter_layers = asked_layers(model) if keep_layers else ()
        # Models hand their layers over sorted, whatever the order of the request.
        self._requested = tuple(sorted({*self.layer_ids, *drafter_layers}))
        self._places = [self._requested.index(each) for each in self.layer_ids]
        self._drafter_places = [self._requested.index(each) for each in drafter_layers]
        try:
            model.set_aux_hidden_state_layers(self._requested)
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot hand over layers "
                f"{list(self._requested)} ({error!r}); some classes lack the first "
                "(layer id 0, the embeddings) or the last"
            ) from error
        if self._connect_stages is not None:
            self._connect_stages(model, self._requested)
        if self._device.type == "cpu":
            _keep_freed_memory()
        if self.is_last_stage and self.is_writer and self._ring is None:
            self._ring = self._make_ring()

    def strip(self, model_output: Any) -> Any:
        """The model's output as the runner would see it without extraction.

        Raises:
            MissingLayersError: if the model returned other layers than those that it
                was asked for.
        """
        return self._split(model_output)[0]

    def capture(
        self,
        model_output: Any,
        request_ids: Sequence[str],
        num_scheduled_tokens: Sequence[int],
        num_computed_tokens: Sequence[int],
        positions: torch.Tensor | None = None,
        is_dummy: bool = False,
    ) -> Any:
        """Take this step's wanted rows; returns the output without them.

        Never waits for the device. Waits for a slot when the writers lag behind.

        Args:
            model_output: As the model returned it.
            request_ids, num_scheduled_tokens, num_computed_tokens: See ``plan_spans``.
            positions: ``[N]`` of the step's tokens, on the device.
            is_dummy: The forward was a warm-up's: the same as ``strip``.
        """
        if not self.is_last_stage:
            return model_output
        if is_dummy:
            return self.strip(model_output)
        receiver = self._receiver
        if receiver is None:
            receiver = self._receiver = self._find_receiver()
        try:
            stripped, layers = self._split(model_output)
        except MissingLayersError as error:
            # Start-up sees this first (strip), but where nothing is warmed up.
            if self._drafter_places:
                raise
            if receiver is not None:
                receiver.fail_wanted(str(error))
            return error.hidden_states
        if receiver is None or not receiver.wanted:
            return stripped
        spans = plan_spans(
            request_ids, num_scheduled_tokens, num_computed_tokens, receiver.wanted
        )
        if spans:
            assert self._ring is not None, "attach() comes before capture()"
            slot = self._ring.acquire()
            try:
                slot.fill(layers, spans, positions)
                receiver.receive(spans, slot)
            finally:
                slot.release()
        return stripped

    def _split(self, model_output: Any) -> tuple[Any, list[torch.Tensor]]:
        if not self.is_last_stage:
            return model_output, []
        hidden_states, returned = (
            model_output if isinstance(model_output, tuple) else (model_output, [])
        )
        shape = (len(hidden_states), self.hidden_size)
        if len(returned) != len(self._requested) or any(
            layer.shape != shape for layer in returned
        ):
            raise self._missing(hidden_states, returned)
        layers = [returned[place] for place in self._places]
        if self._drafter_places:
            drafters = [returned[place] for place in self._drafter_places]
            return (hidden_states, drafters), layers
        return hidden_states, layers

    def _missing(
        self, hidden_states: torch.Tensor, returned: Sequence[torch.Tensor]
    ) -> MissingLayersError:
        """What is wrong with what a model returned."""
        shapes = {tuple(layer.shape[1:]) for layer in returned}
        if len(returned) != len(self._requested) or shapes != {(self.hidden_size,)}:
            return MissingLayersError(
                f"the model was asked for layers {list(self._requested)} of "
                f"{self.hidden_size} values a token, and returned {len(returned)} of "
                f"{sorted(shapes)}: its family does not expose them as it promises",
                hidden_states,
            )
        return MissingLayersError(
            f"the model returned {[len(layer) for layer in returned]} rows of its "
            f"layers for {len(hidden_states)} rows of its output: each "
            "tensor-parallel rank has some only (sequence parallelism)",
            hidden_states,
        )


def _keep_freed_memory() -> None:
    """Have the C library keep the memory of a small model's layers for the next step.

    All of them are freed at once, and glibc gives what is free at the heap's end back
    to the system when it is more than twice the largest block that has been freed
    (mallopt(3), M_TRIM_THRESHOLD): each page of each step was a page fault, also of
    steps in which nothing is wanted. To free one of the largest size that counts sets
    the bound to 64 MiB, and touches no memory. Where a step frees more, or blocks of
    more than 32 MiB, it is as before: those steps take seconds. Who has set bounds of
    their own, or has another C library or allocator, keeps what they have.
    """
    torch.empty(LARGEST_BLOCK, dtype=torch.uint8)
