# SPDX-License-Identifier: Apache-2.0
"""A few slots of fixed memory between the model and the writers.

A slot is filled by the step, copied to the host, and free again when its last
writer is done. When none is free the step waits: the disk sets the pace, memory
stays bounded, and nothing is dropped.
"""

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch

from vllm.v1.hidden_states.dtypes import FLOAT8
from vllm.v1.hidden_states.pack import pack_rows
from vllm.v1.hidden_states.plan import Span


class Slot:
    """Rows ``[max_rows, L, H]`` of one step, on the device and on the host.

    On a CPU the two are the same memory. Beside them, where there are any: a scale of
    each row, and the position of its token.
    """

    def __init__(self, ring: "Ring", shape: tuple[int, int, int], dtype: torch.dtype):
        self.ring = ring
        on_host = ring.device.type == "cpu"
        # Pairs of the same shape, on the device and on the host.
        self._twins: list[tuple[torch.Tensor, torch.Tensor]] = []

        def twins(
            shape: tuple[int, ...], dtype: torch.dtype
        ) -> tuple[torch.Tensor, torch.Tensor]:
            device = torch.empty(shape, dtype=dtype, device=ring.device)
            if on_host:
                return device, device
            host = torch.empty(shape, dtype=dtype, pin_memory=True)
            self._twins.append((device, host))
            return device, host

        self.device_rows, self.host_rows = twins(shape, dtype)
        # [max_rows, L, H * bytes of a value]
        self._bytes = self.host_rows.view(torch.uint8).numpy()
        self._device_scales = self._host_scales = None
        if dtype == FLOAT8:
            self._device_scales, self._host_scales = twins(shape[:1], torch.float32)
        self._device_positions = self._host_positions = None
        if ring.with_positions:
            self._device_positions, self._host_positions = twins(shape[:1], torch.int64)
        self._copied = None if on_host else ring.device_module.Event()
        self.num_users = 0

    def fill(
        self,
        layers: Sequence[torch.Tensor],
        spans: Sequence[Span],
        positions: torch.Tensor | None = None,
    ) -> None:
        """Pack the rows and start their copy to the host, without waiting for it.

        Args:
            layers, spans: See ``pack_rows``.
            positions: ``[N]`` of the step's tokens, on the device, for a ring that
                keeps them.
        """
        num_rows = pack_rows(layers, spans, self.device_rows, self._device_scales)
        if self._device_positions is not None:
            assert positions is not None, "this ring keeps the rows' positions"
            pack_rows([positions], spans, self._device_positions[:, None])
        if self._copied is None:
            return
        copy_stream = self.ring.copy_stream
        # The copy starts when the pack is done; the next pack into this slot comes
        # after its release, so after the copy.
        copy_stream.wait_stream(self.ring.device_module.current_stream())
        with self.ring.device_module.stream(copy_stream):
            for device, host in self._twins:
                host[:num_rows].copy_(device[:num_rows], non_blocking=True)
            self._copied.record(copy_stream)

    def wait(self) -> None:
        """Block until the rows are on the host. For the writers' threads."""
        if self._copied is not None:
            self._copied.synchronize()

    def row_bytes(
        self, first: int, num_rows: int, columns: Sequence[int] | None = None
    ) -> memoryview:
        """The bytes of ``num_rows`` rows from ``first``, row-major.

        Args:
            first, num_rows: Which rows of the slot.
            columns: Which layers of them, by their place; a copy. None for all.
        """
        rows = self._bytes[first : first + num_rows]
        if columns is not None:
            rows = np.ascontiguousarray(rows[:, list(columns)])
        return rows.reshape(-1).data

    def row_scales(self, first: int, num_rows: int) -> memoryview | None:
        """The bytes of the scales, float32, of such rows; None where they have none."""
        if self._host_scales is None:
            return None
        return self._host_scales[first : first + num_rows].numpy().data.cast("B")

    def position(self, row: int, planned: int) -> int:
        """The position of a row's token, once the rows are on the host.

        Args:
            row: Of the slot.
            planned: What the step's plan has, for a ring that keeps no positions.
        """
        if self._host_positions is None:
            return planned
        return int(self._host_positions[row])

    def retain(self, num_users: int) -> None:
        """Add users to a slot that has at least one."""
        self.ring.retain(self, num_users)

    def release(self) -> None:
        """One user is done; after the last, the slot is free."""
        self.ring.release(self)


class Ring:
    """The slots, allocated once.

    Args:
        num_slots: How many.
        shape: ``(rows, layers, hidden size)`` of each.
        dtype: Of the rows as they are stored.
        device: Where the model runs.
        with_positions: Whether slots keep the positions of their rows, too.
    """

    def __init__(
        self,
        num_slots: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        with_positions: bool = False,
    ):
        self.device = device
        self.with_positions = with_positions
        if device.type != "cpu":
            self.device_module = torch.get_device_module(device)
            self.copy_stream = self.device_module.Stream()
        self.num_slots = num_slots
        self._free = [Slot(self, shape, dtype) for _ in range(num_slots)]
        self._changed = threading.Condition()
        self._waited = 0.0

    @property
    def num_free(self) -> int:
        """Slots that no step and no writer holds."""
        with self._changed:
            return len(self._free)

    def acquire(self) -> Slot:
        """A free slot with one user; waits until there is one."""
        with self._changed:
            if not self._free:
                start = time.monotonic()
                self._changed.wait_for(lambda: self._free)
                self._waited += time.monotonic() - start
            slot = self._free.pop()
            slot.num_users = 1
            return slot

    def take_waited(self) -> float:
        """Seconds for which steps have waited for a slot, since the last time."""
        with self._changed:
            waited, self._waited = self._waited, 0.0
        return waited

    def retain(self, slot: Slot, num_users: int) -> None:
        """Add users to a slot that has at least one."""
        with self._changed:
            slot.num_users += num_users

    def release(self, slot: Slot) -> None:
        """Take one user from the slot; the last one frees it."""
        with self._changed:
            if slot.num_users <= 0:
                raise RuntimeError("a slot was released more often than it was held")
            slot.num_users -= 1
            if slot.num_users == 0:
                self._free.append(slot)
                self._changed.notify()
