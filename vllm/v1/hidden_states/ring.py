# SPDX-License-Identifier: Apache-2.0
"""A few slots of fixed memory between the model and the writers.

A slot is filled by the step, copied to the host, and free again when its last
writer is done. When none is free the step waits: the disk sets the pace, memory
stays bounded, and nothing is dropped.
"""

import threading
from collections.abc import Sequence

import torch

from vllm.v1.hidden_states.pack import pack_rows
from vllm.v1.hidden_states.plan import Span


class Slot:
    """Rows ``[max_rows, L, H]`` of one step, on the device and on the host.

    On a CPU the two are the same memory.
    """

    def __init__(self, ring: "Ring", shape: tuple[int, int, int], dtype: torch.dtype):
        self._ring = ring
        on_host = ring.device.type == "cpu"
        self.device_rows = torch.empty(shape, dtype=dtype, device=ring.device)
        self.host_rows = (
            self.device_rows
            if on_host
            else torch.empty(shape, dtype=dtype, pin_memory=True)
        )
        self._bytes = self.host_rows.view(-1).view(torch.uint8).numpy().data
        self._copied = None if on_host else ring.device_module.Event()
        self.num_users = 0

    def fill(self, layers: Sequence[torch.Tensor], spans: Sequence[Span]) -> None:
        """Pack the rows and start their copy to the host, without waiting for it."""
        num_rows = pack_rows(layers, spans, self.device_rows)
        if self._copied is None:
            return
        copy_stream = self._ring.copy_stream
        # The copy starts when the pack is done; the next pack into this slot comes
        # after its release, so after the copy.
        copy_stream.wait_stream(self._ring.device_module.current_stream())
        with self._ring.device_module.stream(copy_stream):
            self.host_rows[:num_rows].copy_(
                self.device_rows[:num_rows], non_blocking=True
            )
            self._copied.record(copy_stream)

    def wait(self) -> None:
        """Block until the rows are on the host. For the writers' threads."""
        if self._copied is not None:
            self._copied.synchronize()

    def row_bytes(self, first: int, num_rows: int) -> memoryview:
        """The bytes of ``num_rows`` rows from ``first``: no copy, row-major."""
        size = self._ring.bytes_per_row
        return self._bytes[first * size : (first + num_rows) * size]

    def retain(self, num_users: int) -> None:
        """Add users to a slot that has at least one."""
        self._ring.retain(self, num_users)

    def release(self) -> None:
        """One user is done; after the last, the slot is free."""
        self._ring.release(self)


class Ring:
    """The slots, allocated once.

    Args:
        num_slots: How many.
        shape: ``(rows, layers, hidden size)`` of each.
        dtype: Of the rows as they are stored.
        device: Where the model runs.
    """

    def __init__(
        self,
        num_slots: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.device = device
        self.bytes_per_row = shape[1] * shape[2] * dtype.itemsize
        if device.type != "cpu":
            self.device_module = torch.get_device_module(device)
            self.copy_stream = self.device_module.Stream()
        self.num_slots = num_slots
        self._free = [Slot(self, shape, dtype) for _ in range(num_slots)]
        self._changed = threading.Condition()

    @property
    def num_free(self) -> int:
        """Slots that no step and no writer holds."""
        with self._changed:
            return len(self._free)

    def acquire(self) -> Slot:
        """A free slot with one user; waits until there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            slot = self._free.pop()
            slot.num_users = 1
            return slot

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
