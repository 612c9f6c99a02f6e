# SPDX-License-Identifier: Apache-2.0
"""The capture, with a model and a receiver of the test's own: no engine."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm.v1.hidden_states.capture import HiddenStateCapture, MissingLayersError

H = 4


class Model(torch.nn.Module):
    """Returns the layers that it was asked for, sorted, as vLLM's models do."""

    aux_hidden_state_layers: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, layers):
        self.aux_hidden_state_layers = tuple(sorted(set(layers)))

    def forward(self, num_rows: int):
        final = torch.full((num_rows, H), 99.0)
        if not self.aux_hidden_state_layers:
            return final
        row = torch.arange(num_rows)[:, None]
        return final, [
            (layer * 1000 + row).float().expand(num_rows, H)
            for layer in self.aux_hidden_state_layers
        ]


class Receiver:
    def __init__(self, wanted):
        self.wanted = wanted
        self.received = []
        self.failures = []

    def receive(self, spans, slot):
        slot.wait()
        first = 0
        for span in spans:
            rows = slot.host_rows[first : first + span.num_rows].clone()
            self.received.append((span, rows))
            first += span.num_rows

    def fail_wanted(self, cause):
        self.failures.append((list(self.wanted), cause))
        self.wanted.clear()


def make_capture(layer_ids, receiver, **settings):
    settings = {
        "hidden_size": H,
        "dtype": torch.float32,
        "max_rows": 16,
        "num_slots": 1,
        "device": torch.device("cpu"),
        "is_last_stage": True,
        "find_receiver": lambda: receiver,
    } | settings
    return HiddenStateCapture(layer_ids, **settings)


def test_columns_come_in_the_order_of_the_ids():
    receiver = Receiver({"a": 3})
    capture = make_capture([4, 0, 2], receiver)
    model = Model()
    capture.attach(model)
    output = capture.capture(model(16), ["x", "a"], [5, 7], [0, 0])
    assert torch.equal(output, torch.full((16, H), 99.0))
    ((span, rows),) = receiver.received
    assert (span.row, span.position, span.num_rows) == (5, 0, 3)
    expected = torch.tensor([[4005, 5, 2005], [4006, 6, 2006], [4007, 7, 2007]])
    assert torch.equal(rows, expected[:, :, None].expand(3, 3, H).float())


def test_a_drafter_gets_its_own_layers_in_its_own_order():
    receiver = Receiver({"a": 2})
    capture = make_capture([4, 1], receiver)
    model = Model()
    model.set_aux_hidden_state_layers((3, 1))
    capture.attach(model, keep_layers=True)
    hidden_states, drafters = capture.capture(model(2), ["a"], [2], [0])
    assert [layer[0, 0].item() for layer in drafters] == [1000, 3000]
    assert receiver.received[0][1][0, :, 0].tolist() == [4000, 1000]
    assert torch.equal(hidden_states, torch.full((2, H), 99.0))


def test_a_step_without_wanted_rows_takes_no_slot():
    receiver = Receiver({"b": 5})
    capture = make_capture([1], receiver)
    model = Model()
    capture.attach(model)
    ring = capture._ring
    ring.acquire()  # the only one: a step that wanted one would wait for ever
    assert capture.capture(model(2), ["a"], [2], [0]).shape == (2, H)
    receiver.wanted = {}
    assert capture.capture(model(2), ["a"], [2], [0]).shape == (2, H)


def test_a_warm_up_takes_nothing():
    receiver = Receiver({"a": 2})
    capture = make_capture([1], receiver)
    model = Model()
    capture.attach(model)
    assert capture.capture(model(2), ["a"], [2], [0], is_dummy=True).shape == (2, H)
    assert receiver.received == []


def test_ranks_without_a_receiver_take_nothing():
    capture = make_capture([1], None, is_writer=False)
    model = Model()
    capture.attach(model)
    assert capture.capture(model(2), ["a"], [2], [0]).shape == (2, H)
    assert capture._ring is None


def test_rows_scattered_over_ranks_are_found_at_start_up():
    """As sequence parallelism would leave them: no row may be another's."""
    capture = make_capture([1], None)
    model = Model()
    capture.attach(model)
    hidden_states, layers = model(8)
    with pytest.raises(MissingLayersError, match=r"\[4\] rows .* for 8 rows"):
        capture.strip((hidden_states, [layer[:4] for layer in layers]))


def test_the_stages_are_connected_with_what_the_model_was_asked_for():
    connected = []
    capture = make_capture(
        [4, 1], None, connect_stages=lambda *call: connected.append(call)
    )
    model = Model()
    model.set_aux_hidden_state_layers((3, 1))
    capture.attach(model, keep_layers=True)
    assert connected == [(model, (1, 3, 4))]


def test_earlier_pipeline_stages_hand_their_output_on():
    capture = make_capture([1], None, is_last_stage=False)
    capture.attach(Model())
    output = object()
    assert capture.capture(output, ["a"], [2], [0]) is output
    assert capture.strip(output) is output
    assert capture._ring is None


def test_the_slot_is_free_again_when_the_receiver_fails():
    receiver = Receiver({"a": 2})
    receiver.receive = lambda spans, slot: 1 / 0
    capture = make_capture([1], receiver)
    model = Model()
    capture.attach(model)
    with pytest.raises(ZeroDivisionError):
        capture.capture(model(2), ["a"], [2], [0])
    assert capture._ring.num_free == 1


@pytest.mark.parametrize("family", ["drops a layer", "returns none", "other width"])
def test_a_family_that_breaks_its_promise(family):
    """An error at start-up; where nothing is warmed up, an error of each request."""
    receiver = Receiver({"a": 2})
    capture = make_capture([1, 6], receiver)
    model = Model()
    capture.attach(model)
    hidden_states, layers = model(2)
    output = {
        "drops a layer": (hidden_states, layers[:1]),
        "returns none": hidden_states,
        "other width": (hidden_states, [layer[:, :2] for layer in layers]),
    }[family]
    with pytest.raises(MissingLayersError, match=r"asked for layers \[1, 6\]"):
        capture.strip(output)
    for _ in range(2):
        assert capture.capture(output, ["a"], [2], [0]) is hidden_states
    (wanted, cause), second = receiver.failures
    assert wanted == ["a"] and "asked for layers [1, 6]" in cause
    assert second[0] == []
    assert receiver.received == []


def test_positions_go_with_the_rows():
    """Where the host's numbers are upper bounds: drafts in flight may be rejected."""
    receiver = Receiver({"a": 100, "b": 100})
    found = []

    def receive(spans, slot):
        row = 0
        for span in spans:
            found.append((span.request_id, slot.position(row, span.position)))
            row += span.num_rows

    receiver.receive = receive
    for on_device, expected in (
        (True, [("a", 5), ("b", 9)]),
        (False, [("a", 7), ("b", 12)]),
    ):
        found.clear()
        model = Model()
        capture = make_capture([2], receiver, positions_on_device=on_device)
        capture.attach(model)
        positions = torch.tensor([5, 6, 0, 9, 10, 11, 0, 0])  # with padding at the end
        capture.capture(model(8), ["a", "plain", "b"], [2, 1, 3], [7, 0, 12], positions)
        assert found == expected


# Steps that free eight blocks of 4 MiB at once, and how many pages each of them had to
# be given by the system. Of 4 KiB, not of 2 MiB (prctl(2), PR_SET_THP_DISABLE).
STEPS = """
import ctypes, resource, torch
from tests.v1.hidden_states.test_capture import Model, make_capture

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
make_capture([1], None).attach(Model())
faults = []
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    layers = [torch.zeros(1 << 20) for _ in range(8)]
    del layers
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults)[5])
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or "malloc" in os.environ.get("LD_PRELOAD", ""),
    reason="another C library's memory, or another allocator's",
)
def test_a_step_finds_the_memory_of_the_one_before():
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_"))  # settings of one's own
    }
    output = subprocess.run(
        [sys.executable, "-c", STEPS],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert int(output) < 800  # of 8192 pages
