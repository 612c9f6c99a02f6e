# SPDX-License-Identifier: Apache-2.0
"""The ring's bounds, and the pack into its slots."""

import ast
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.hidden_states.pack import pack_rows
from vllm.v1.hidden_states.plan import Span
from vllm.v1.hidden_states.ring import Ring

L, H = 3, 4
CPU = torch.device("cpu")


def make_ring(num_slots: int = 2, max_rows: int = 8, dtype=torch.float32) -> Ring:
    return Ring(num_slots, (max_rows, L, H), dtype, CPU)


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 50),
    cuts=st.sets(st.integers(0, 50)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_pack_is_a_gather(num_rows, cuts, dtype):
    layers = [torch.randn(50, H) for _ in range(L)]
    edges = sorted({edge for edge in cuts if edge <= num_rows} | {0, num_rows})
    spans = [Span("a", row, 0, end - row) for row, end in pairwise(edges)][
        :: 2 if len(edges) > 3 else 1
    ]
    out = torch.full((60, L, H), -1.0, dtype=dtype)
    packed = pack_rows(layers, spans, out)
    wanted = [
        row for span in spans for row in range(span.row, span.row + span.num_rows)
    ]
    assert packed == len(wanted)
    expected = torch.stack(layers, dim=1)[wanted].to(dtype)
    assert torch.equal(out[:packed], expected)
    assert (out[packed:] == -1).all()


def test_slot_bytes_are_the_rows():
    ring = make_ring(dtype=torch.bfloat16)
    slot = ring.acquire()
    layers = [torch.randn(8, H) for _ in range(L)]
    slot.fill(layers, [Span("a", 2, 0, 5)])
    slot.wait()
    expected = torch.stack(layers, dim=1)[2:7].to(torch.bfloat16)
    assert bytes(slot.row_bytes(0, 5)) == bytes(
        expected.contiguous().view(-1).view(torch.uint8).numpy()
    )
    assert bytes(slot.row_bytes(3, 1)) == bytes(
        expected[3].contiguous().view(-1).view(torch.uint8).numpy()
    )
    slot.release()


def test_a_slot_is_free_after_its_last_user():
    ring = make_ring(num_slots=1)
    slot = ring.acquire()
    slot.retain(2)
    for _ in range(3):
        assert ring.num_free == 0
        slot.release()
    assert ring.num_free == 1
    with pytest.raises(RuntimeError, match="released more often"):
        slot.release()


def test_acquire_waits_for_a_slot():
    ring = make_ring(num_slots=2)
    held = [ring.acquire(), ring.acquire()]
    got: list = []
    thread = threading.Thread(target=lambda: got.append(ring.acquire()), daemon=True)
    thread.start()
    time.sleep(0.1)
    assert not got
    held[0].release()
    thread.join(5)
    assert got == [held[0]]


def test_memory_is_allocated_once():
    ring = make_ring(num_slots=3)
    addresses = set()
    for _ in range(20):
        slot = ring.acquire()
        addresses.add(slot.host_rows.data_ptr())
        slot.release()
    assert len(addresses) <= 3


def test_the_capture_path_needs_torch_alone():
    """So that it can be tested where there is no vLLM; the factory imports it late."""
    import vllm.v1.hidden_states as package

    for path in Path(package.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert not name.startswith("vllm") or name.startswith(
                    "vllm.v1.hidden_states"
                ), f"{path.name} imports {name}"


@pytest.mark.gpu
def test_ring_on_a_gpu():
    """The copy runs on its own stream; the host sees the rows after ``wait``."""
    device = torch.device("cuda")
    ring = Ring(2, (512, L, 4096), torch.bfloat16, device)
    for step in range(50):
        layers = [
            torch.full((512, 4096), 1.0 + step * L + layer, device=device)
            for layer in range(L)
        ]
        slot = ring.acquire()
        slot.fill(layers, [Span("a", 7, 0, 400)])
        for layer in layers:
            layer.zero_()  # what a replayed graph does to its outputs
        slot.wait()
        expected = torch.tensor([1.0 + step * L + layer for layer in range(L)])
        assert torch.equal(
            slot.host_rows[:400].float(),
            expected.bfloat16().float()[None, :, None].expand(400, L, 4096),
        )
        slot.release()


def test_some_columns_of_some_rows():
    ring = Ring(1, (6, 3, 2), torch.bfloat16, torch.device("cpu"))
    slot = ring.acquire()
    rows = torch.arange(36).reshape(6, 3, 2).bfloat16()
    slot.device_rows.copy_(rows)
    for columns in (None, (2,), (2, 0), (0, 1, 2)):
        expected = rows[1:5] if columns is None else rows[1:5, list(columns)]
        found = slot.row_bytes(1, 4, columns)
        assert bytes(found) == expected.contiguous().view(torch.uint8).numpy().tobytes()
