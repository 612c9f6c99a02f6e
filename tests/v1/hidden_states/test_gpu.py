# SPDX-License-Identifier: Apache-2.0
"""What only a CUDA device can show. Needs torch and Triton, not a vLLM:

python -m pytest --noconftest -m gpu tests/v1/hidden_states/test_gpu.py
"""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.v1.hidden_states.pack_cases import MODEL_DTYPES, compare, make_case
from vllm.v1.hidden_states.dtypes import FLOAT8, SCALES, dequantized
from vllm.v1.hidden_states.pack import DTYPES, _kernel
from vllm.v1.hidden_states.plan import Span
from vllm.v1.hidden_states.ring import Ring, Slot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

NUM_LAYERS, HIDDEN_SIZE, MAX_ROWS = 3, 512, 256


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_the_kernel_is_the_reference_bit_for_bit(dtype, out_dtype):
    from vllm.v1.hidden_states.pack_triton import pack_triton

    for seed, hidden_size in enumerate([1, 3, 64, 511, 2048, 2049, 5120, 7168]):
        for num_layers in (1, 2, 5):
            layers, runs = make_case(
                seed, dtype, num_layers, 37, hidden_size, device="cuda"
            )
            compare(pack_triton, layers, runs, out_dtype)


def test_the_kernel_is_what_a_ring_uses():
    layer = torch.zeros(4, 8, device="cuda")
    assert _kernel([layer], [(0, 4)], torch.zeros(4, 1, 8, device="cuda")).__name__ == (
        "pack_triton"
    )


@pytest.fixture
def no_synchronization() -> Iterator[None]:
    """An error where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Replayed:
    """A model in a CUDA graph, which writes its layers over in every replay.

    Layer ``l`` of token ``t`` is ``(l + 1) * (t + 1)``, in all of its values.
    """

    def __init__(self) -> None:
        self.tokens = torch.zeros(MAX_ROWS, device="cuda")
        self.layers: list[torch.Tensor] = []
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward()  # warm up
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.layers = self._forward()

    def _forward(self) -> list[torch.Tensor]:
        rows = (self.tokens + 1)[:, None].expand(MAX_ROWS, HIDDEN_SIZE)
        # Some work, so that a step takes the device longer than the host.
        busy = torch.ones(2048, 2048, device="cuda")
        for _ in range(4):
            busy = busy @ busy / 2048
        return [rows * (layer + 1) * busy[0, 0] for layer in range(NUM_LAYERS)]


@pytest.mark.parametrize("storage_dtype", [torch.float32, FLOAT8])
def test_replays_fill_the_ring_faster_than_it_drains(storage_dtype, no_synchronization):
    """No row is lost or another's, and no step waits for the device."""
    torch.cuda.set_sync_debug_mode("default")  # the capture may wait
    model = Replayed()
    ring = Ring(
        2,
        (MAX_ROWS, NUM_LAYERS, HIDDEN_SIZE),
        storage_dtype,
        torch.device("cuda"),
        True,
    )
    steps = 40
    tokens = [
        torch.arange(MAX_ROWS).float().pin_memory() + step * MAX_ROWS
        for step in range(steps)
    ]
    positions = torch.arange(MAX_ROWS, device="cuda")
    # Every other half of a request's rows.
    spans = [Span("a", 3, 3, 60), Span("b", 100, 100, 1), Span("c", 200, 200, 56)]
    rows = torch.cat([torch.arange(s.row, s.row + s.num_rows) for s in spans])
    ring.acquire().fill(model.layers, spans, positions)  # compiles the kernels
    torch.cuda.synchronize()
    ring = Ring(
        2,
        (MAX_ROWS, NUM_LAYERS, HIDDEN_SIZE),
        storage_dtype,
        torch.device("cuda"),
        True,
    )
    errors: list[str] = []
    threads = []

    def drain(slot: Slot, step: int) -> None:
        slot.wait()
        time.sleep(0.01)  # a slow disk
        found = {"hidden_states": slot.host_rows[: len(rows)].clone()}
        if slot._host_scales is not None:
            found[SCALES] = slot._host_scales[: len(rows), None, None].clone()
        expected = (rows + step * MAX_ROWS + 1.0)[:, None] * torch.arange(
            1.0, NUM_LAYERS + 1
        )
        loaded = dequantized(found, "float32")["hidden_states"]
        tolerance = 0 if storage_dtype == torch.float32 else 1 / 15
        if not torch.allclose(
            loaded, expected[..., None].expand_as(loaded), rtol=tolerance, atol=0
        ):
            errors.append(f"rows of step {step}")
        if [slot.position(row, -1) for row in range(len(rows))] != rows.tolist():
            errors.append(f"positions of step {step}")
        slot.release()

    torch.cuda.set_sync_debug_mode("error")
    for step in range(steps):
        model.tokens.copy_(tokens[step], non_blocking=True)
        model.graph.replay()
        slot = ring.acquire()  # may wait for a writer, as the design has it
        slot.fill(model.layers, spans, positions)
        threads.append(threading.Thread(target=drain, args=(slot, step)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert ring.num_free == 2
    assert ring.take_waited() > 0, "the ring was never full"
