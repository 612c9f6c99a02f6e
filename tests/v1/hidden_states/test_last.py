# SPDX-License-Identifier: Apache-2.0
"""The last hidden state in a worker and in an engine's output, without an engine."""

import doctest
import importlib
import pickle
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.v1.hidden_states.admission import refuses
from vllm.v1.hidden_states.client import last_hidden_state
from vllm.v1.hidden_states.last import LastHiddenStateCapture, StepVectors
from vllm.v1.hidden_states.last_output import add_last_hidden_state
from vllm.v1.hidden_states.last_request import LastHiddenStateRequest
from vllm.v1.hidden_states.runner import RunnerCapture

H = 4
LAYER = 6

# A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def make_capture(device: str = "cpu", max_requests: int = 8) -> LastHiddenStateCapture:
    return LastHiddenStateCapture(
        is_wanted=lambda params: params == "wanted",
        hidden_size=H,
        layer=LAYER,
        max_requests=max_requests,
        device=torch.device(device),
    )


def new(request_id: str, length: int, params: str = "wanted") -> SimpleNamespace:
    """A request as the scheduler tells it to its workers."""
    return SimpleNamespace(
        req_id=request_id,
        prompt_token_ids=[0] * length,
        prompt_embeds=None,
        sampling_params=params,
    )


def rows_of(step: list[tuple[str, int, int]], num_padding: int = 0) -> torch.Tensor:
    """``[N, H]``: request and position stand in every row; padding is -1."""
    rows = [
        [float(hash_of(request_id)), float(first + i), 0.5, -1.0]
        for request_id, count, first in step
        for i in range(count)
    ]
    return torch.tensor(rows + [[-1.0] * H] * num_padding).reshape(-1, H)


def hash_of(request_id: str) -> int:
    return sum(map(ord, request_id))


def run(capture, step, num_padding: int = 0, dtype=torch.float32) -> StepVectors | None:
    """One step of (request, rows, first position)."""
    capture.capture(
        rows_of(step, num_padding).to(capture.device, dtype),
        [request_id for request_id, _, _ in step],
        [count for _, count, _ in step],
        [first for _, _, first in step],
    )
    return capture.take()


def test_the_row_of_the_prompts_last_position():
    capture = make_capture()
    capture.begin_step(set(), [new("a", 5), new("b", 3), new("c", 3, "ordinary")])
    vectors = run(capture, [("a", 2, 0), ("b", 3, 0), ("c", 3, 0)], num_padding=4)
    assert "b" in vectors and "a" not in vectors and "c" not in vectors
    assert vectors.get("b").tolist() == [hash_of("b"), 2, 0.5, -1]
    assert vectors.get("b").dtype == np.float32
    assert vectors.get("a") is None
    capture.begin_step({"b"}, [])
    vectors = run(capture, [("c", 1, 3), ("a", 3, 2)])
    assert vectors.get("a").tolist() == [hash_of("a"), 4, 0.5, -1]
    assert vectors.layer == LAYER


def test_a_prompt_of_embeddings_has_their_length():
    capture = make_capture()
    request = new("a", 0)
    request.prompt_token_ids, request.prompt_embeds = None, torch.zeros(3, H)
    capture.begin_step(set(), [request])
    assert run(capture, [("a", 3, 0)]).get("a")[1] == 2


def test_a_step_without_such_requests_has_nothing():
    capture = make_capture()
    capture.begin_step(set(), [new("a", 3, "ordinary")])
    assert run(capture, [("a", 3, 0)]) is None
    capture.begin_step(set(), [new("b", 3)])
    assert run(capture, [("a", 1, 3), ("b", 2, 0)]) is None
    capture.begin_step({"b"}, [])  # aborted
    assert run(capture, [("a", 1, 4)]) is None
    assert capture._lengths == {}


def test_nothing_is_taken_into_the_next_step():
    """Its output may never be asked for."""
    capture = make_capture()
    capture.begin_step(set(), [new("a", 3)])
    capture.capture(rows_of([("a", 3, 0)]), ["a"], [3], [0])
    capture.begin_step({"a"}, [])
    assert capture.take() is None


def test_an_id_that_comes_again_at_once():
    capture = make_capture()
    capture.begin_step(set(), [new("a", 3)])
    run(capture, [("a", 3, 0)])
    capture.begin_step({"a"}, [new("a", 5)])
    assert run(capture, [("a", 3, 0)]) is None
    capture.begin_step(set(), [])
    assert run(capture, [("a", 2, 3)]).get("a")[1] == 4
    capture.begin_step({"a"}, [new("a", 5, "ordinary")])
    assert run(capture, [("a", 5, 0)]) is None


@st.composite
def schedules(draw):
    """Steps of chunks, as a scheduler makes them; preempted requests begin again."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    computed = [0] * len(lengths)
    steps = []
    for _ in range(draw(st.integers(1, 30))):
        step = []
        for index in draw(st.permutations(range(len(lengths)))):
            if draw(st.integers(0, 9)) == 0:
                computed[index] = draw(st.integers(0, computed[index]))  # a prefix hit
            left = lengths[index] + 3 - computed[index]
            count = min(draw(st.integers(0, 12)), left)
            if count:
                step.append((str(index), count, computed[index]))
                computed[index] += count
        steps.append((step, draw(st.integers(0, 5))))
    return lengths, steps


@unhurried
@given(schedules(), st.sets(st.integers(0, 5)))
def test_under_any_schedule(schedule, wanted):
    """Each time that the last position is computed, and at no other."""
    lengths, steps = schedule
    capture = make_capture()
    capture.begin_step(
        set(),
        [
            new(str(index), length, "wanted" if index in wanted else "ordinary")
            for index, length in enumerate(lengths)
        ],
    )
    for step, num_padding in steps:
        vectors = run(capture, step, num_padding)
        expected = {
            request_id
            for request_id, count, first in step
            if int(request_id) in wanted
            and first < lengths[int(request_id)] <= first + count
        }
        assert (vectors is not None) == bool(expected)
        for request_id in expected:
            last = lengths[int(request_id)] - 1
            assert vectors.get(request_id)[:2].tolist() == [hash_of(request_id), last]
        for request_id in {request_id for request_id, _, _ in step} - expected:
            assert vectors is None or request_id not in vectors
        capture.begin_step(set(), [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vectors_are_float32(dtype):
    capture = make_capture()
    capture.begin_step(set(), [new("a", 3)])
    vector = run(capture, [("a", 3, 0)], dtype=dtype).get("a")
    assert vector.dtype == np.float32
    assert vector.tolist() == [hash_of("a"), 2, 0.5, -1]


def test_the_next_step_may_write_over_the_models_output():
    capture = make_capture()
    capture.begin_step(set(), [new("a", 3)])
    output = rows_of([("a", 3, 0)])
    capture.capture(output, ["a"], [3], [0])
    output.fill_(7)
    assert capture.take().get("a")[1] == 2


def test_reading_and_pickling_wait_for_the_copy():
    waited = []
    rows = torch.arange(2.0 * H).reshape(2, H)

    def vectors():
        return StepVectors(["a", "b"], rows, LAYER, lambda: waited.append(1))

    assert vectors().get("c") is None and not waited
    assert vectors().get("b").tolist() == [4, 5, 6, 7] and len(waited) == 1
    copied = pickle.loads(pickle.dumps(vectors()))
    assert len(waited) == 2
    assert copied.get("a").tolist() == [0, 1, 2, 3]
    assert len(waited) == 2
    assert copied.layer == LAYER


@pytest.mark.parametrize("shape", [(3, H + 1), (3, 2, H), (3,)])
def test_a_family_without_one_vector_a_token(shape):
    """Hyper-connections, say: the request is told, the engine goes on."""
    capture = make_capture()
    capture.begin_step(set(), [new("a", 3)])
    capture.capture(torch.zeros(shape), ["a"], [3], [0])
    vectors = capture.take()
    params = add_last_hidden_state(asking("a", 3), vectors, None)
    assert list(params) == ["last_hidden_state_error"]
    assert str(list(shape)) in params["last_hidden_state_error"]


def test_no_memory_is_an_error_of_the_requests(monkeypatch):
    def fail(self, rows):
        raise torch.OutOfMemoryError("17 GiB")

    monkeypatch.setattr(LastHiddenStateCapture, "_copy", fail)
    capture = make_capture()
    capture.begin_step(set(), [new("a", 3)])
    params = add_last_hidden_state(asking("a", 3), run(capture, [("a", 3, 0)]), None)
    assert "17 GiB" in params["last_hidden_state_error"]


def test_a_runner_hands_over_what_is_beside_the_layers():
    """The model's output is that which a drafter, or nobody, sees beside it."""
    last = make_capture()
    runner = RunnerCapture(None, last)
    step = SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[new("a", 3)])
    batch = (["a"], [3], [0])
    for output in (rows_of([("a", 3, 0)]), (rows_of([("a", 3, 0)]), ["layers"])):
        runner.begin_step(step)
        assert runner.capture(output, *batch) is output
        assert runner.take_last().get("a")[1] == 2
        assert runner.take_last() is None
    runner.begin_step(step)
    runner.capture(rows_of([("a", 3, 0)]), *batch, is_dummy=True)
    assert runner.take_last() is None
    nothing = RunnerCapture(None, None)
    nothing.begin_step(step)
    assert nothing.capture(output, *batch) is output
    assert nothing.strip(output) is output
    assert nothing.take_last() is None


# ---------------------------------------------------------------------------
# What the head is given.


class LogitsProcessor(torch.nn.Module):
    """Named as vLLM's."""

    def forward(self, head, hidden_states):
        raise AssertionError("the head itself is not wanted")


class Family(torch.nn.Module):
    """Norms on the way to the head, or did before, or goes a way of its own."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        if way != "other":
            self.logits_processor = LogitsProcessor()

    def compute_logits(self, hidden_states):
        if self.way == "normed":
            return self.logits_processor(None, hidden_states)
        if self.way == "norms":
            return self.logits_processor(None, hidden_states=hidden_states * 2)
        if self.way == "widens":
            return self.logits_processor(None, hidden_states.repeat(1, 2))
        if self.way == "fails":
            raise ZeroDivisionError("of its own")
        return hidden_states


@pytest.mark.parametrize(("way", "factor"), [("normed", 1), ("norms", 2), ("other", 1)])
def test_the_vector_is_what_the_head_is_given(way, factor):
    capture = make_capture()
    capture.attach(Family(way))
    capture.begin_step(set(), [new("a", 3)])
    expected = [hash_of("a") * factor, 2 * factor, 0.5 * factor, -1 * factor]
    assert run(capture, [("a", 3, 0)]).get("a").tolist() == expected


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("fails", "ZeroDivision"),
        ("avoids", "without vLLM's Logits"),
        ("widens", "[1, 8]"),
    ],
)
def test_an_unknown_head_is_an_error_of_the_requests(way, cause):
    """An engine starts with any model."""
    capture = make_capture()
    capture.attach(Family(way))
    capture.begin_step(set(), [new("a", 3)])
    params = add_last_hidden_state(asking("a", 3), run(capture, [("a", 3, 0)]), None)
    assert "of Family it is not known" in params["last_hidden_state_error"]
    assert cause in params["last_hidden_state_error"]


def test_other_ranks_take_nothing():
    capture = make_capture()
    capture.is_writer = False
    capture.begin_step(set(), [new("a", 3)])
    assert run(capture, [("a", 3, 0)]) is None


# ---------------------------------------------------------------------------
# In the engine's output.


def asking(request_id: str, length: int, **asked) -> SimpleNamespace:
    """An engine's request."""
    return SimpleNamespace(
        request_id=request_id,
        num_prompt_tokens=length,
        last_hidden_state=LastHiddenStateRequest(**asked),
    )


def vectors_of(request_id: str, values) -> StepVectors:
    return StepVectors([request_id], torch.tensor([values]), LAYER)


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
@pytest.mark.parametrize("normalize", [False, True])
def test_what_stands_in_the_output(encoding_format, normalize):
    values = [3.0, -4.0, 1e-30, 0.1]
    request = asking("a", 5, encoding_format=encoding_format, normalize=normalize)
    params = add_last_hidden_state(
        request, vectors_of("a", values), {"hidden_states_path": "/a"}
    )
    assert params["hidden_states_path"] == "/a"
    assert params["last_hidden_state_metadata"] == {
        "position": 4,
        "layer": LAYER,
        "representation": "post_norm",
        "normalized": normalize,
        "dtype": "float32",
        "encoding_format": encoding_format,
        "hidden_size": 4,
    }
    kind = list if encoding_format == "float" else str
    assert isinstance(params["last_hidden_state"], kind)
    expected = np.array(values, np.float32)
    if normalize:
        expected = expected / np.linalg.norm(expected)
        assert np.linalg.norm(last_hidden_state({"kv_transfer_params": params})) == (
            pytest.approx(1, abs=1e-6)
        )
    found = last_hidden_state({"kv_transfer_params": params})
    np.testing.assert_array_equal(found, expected)
    found += 1  # its own memory


def test_ordinary_requests_are_untouched():
    request = SimpleNamespace(request_id="a")
    params = {"other": 1}
    assert add_last_hidden_state(request, vectors_of("a", [1.0]), params) is params
    assert add_last_hidden_state(request, None, None) is None


@pytest.mark.parametrize(
    ("vectors", "asked", "cause"),
    [
        (None, {}, "no vector came with the first token, from position 4"),
        (vectors_of("b", [1.0, 2.0]), {}, "no vector came"),
        (vectors_of("a", [1.0, float("nan")]), {}, "1 non-finite values of 2"),
        (vectors_of("a", [float("inf"), -float("inf")]), {}, "2 non-finite"),
        (vectors_of("a", [0.0, 0.0]), {"normalize": True}, "normalize: .* is zero"),
    ],
)
def test_no_vector_is_an_error_with_its_cause(vectors, asked, cause):
    params = add_last_hidden_state(asking("a", 5, **asked), vectors, {"other": 1})
    assert list(params) == ["other", "last_hidden_state_error"]
    with pytest.raises(LookupError, match=cause):
        last_hidden_state({"kv_transfer_params": params})


def test_large_values_are_normalized():
    """Their squares are beyond float32."""
    params = add_last_hidden_state(
        asking("a", 1, normalize=True), vectors_of("a", [3e30, 4e30]), None
    )
    assert params["last_hidden_state"] == pytest.approx([0.6, 0.8])


def queued(options, **fields) -> SimpleNamespace:
    """A request as it comes to the engine."""
    return SimpleNamespace(
        **{
            "request_id": "a",
            "client_index": 3,
            "kv_transfer_params": options,
            "sampling_params": SimpleNamespace(max_tokens=1, n=1),
            "abort_immediately": False,
            **fields,
        }
    )


@pytest.mark.parametrize("other", [{}, {"do_remote_decode": True}])
def test_options_are_kept_apart_from_a_connectors(other):
    ours = {
        "return_last_hidden_state": True,
        "encoding_format": "base64",
        "normalize": True,
    }
    request = queued(ours | other)
    assert not refuses(SimpleNamespace(), request)
    assert request.last_hidden_state == LastHiddenStateRequest("base64", True)
    assert request.kv_transfer_params == (other or None)
    request = queued({"return_last_hidden_state": False} | other)
    assert not refuses(SimpleNamespace(), request)
    assert request.last_hidden_state is None
    assert request.kv_transfer_params == (other or None)
    # Another's options of the same names.
    request = queued({"normalize": 7, "encoding_format": "x"})
    assert not refuses(SimpleNamespace(), request)
    assert request.kv_transfer_params == {"normalize": 7, "encoding_format": "x"}
    for nothing in (None, "x"):
        assert not refuses(SimpleNamespace(), queued(nothing))


def test_the_engine_ends_what_no_front_end_has_refused():
    core = SimpleNamespace(output_queue=queue.Queue())
    request = queued({"return_last_hidden_state": "yes"})
    assert refuses(core, request)
    client, outputs = core.output_queue.get_nowait()
    assert client == 3
    assert outputs.finished_requests == {"a"}
    (output,) = outputs.outputs
    assert output.finished and output.new_token_ids == []
    reason = output.kv_transfer_params["last_hidden_state_error"]
    assert reason.startswith("kv_transfer_params.return_last_hidden_state 'yes': not")
    with pytest.raises(ValueError, match="'yes': not a boolean"):
        refuses(SimpleNamespace(), queued({"return_last_hidden_state": "yes"}))


def test_a_connector_hears_of_what_a_front_end_has_refused():
    """Such a request comes to be aborted, so that a connector lets go of blocks."""
    core = SimpleNamespace(output_queue=queue.Queue())
    remote = {"do_remote_prefill": True}
    request = queued(
        {"return_last_hidden_state": "yes"} | remote, abort_immediately=True
    )
    assert not refuses(core, request)
    assert request.kv_transfer_params == remote
    assert core.output_queue.empty()


# ---------------------------------------------------------------------------
# In a client.


@pytest.mark.parametrize(
    "response",
    [
        {},
        {"kv_transfer_params": None},
        SimpleNamespace(kv_transfer_params={"hidden_states_path": "/a"}),
        SimpleNamespace(),
    ],
)
def test_a_response_without_vector(response):
    with pytest.raises(LookupError, match="no 'last_hidden_state'"):
        last_hidden_state(response)


def test_the_clients_example_runs():
    module = importlib.import_module("vllm.v1.hidden_states.client")
    assert doctest.testmod(module).attempted == 2
    assert doctest.testmod(module).failed == 0


# ---------------------------------------------------------------------------
# On a GPU.


@pytest.mark.gpu
def test_steps_on_a_gpu_never_wait():
    """Behind graph replays, faster than they are read; no synchronization inside."""
    capture = make_capture("cuda", max_requests=4)
    output = torch.zeros((64, H), device="cuda", dtype=torch.bfloat16)
    counter = torch.zeros((), device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
        output.copy_(torch.arange(64, device="cuda")[:, None] * counter)
    counter.zero_()
    capture.begin_step(set(), [new(name, 16) for name in "abcd"])
    warm = capture.capture(output, ["a"], [16], [0])  # takes its memory
    assert warm is None
    torch.cuda.synchronize()
    taken = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            graph.replay()
            capture.capture(output, list("abcd"), [16] * 4, [0] * 4)
            taken.append(capture.take())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step, vectors in enumerate(taken, 1):
        for place, name in enumerate("abcd"):
            row = torch.tensor((place * 16 + 15) * step, dtype=torch.bfloat16).item()
            assert vectors.get(name).tolist() == [row] * H


@pytest.mark.gpu
def test_a_reader_in_another_thread_waits_on_a_gpu():
    capture = make_capture("cuda")
    capture.begin_step(set(), [new("a", 2)])
    capture.capture(torch.ones((2, H), device="cuda"), ["a"], [2], [0])
    found = []
    reader = threading.Thread(
        target=lambda vectors: found.append(vectors.get("a").tolist()),
        args=[capture.take()],
    )
    reader.start()
    reader.join(30)
    assert found == [[1.0] * H]
