# SPDX-License-Identifier: Apache-2.0
"""The planner: no row is lost, doubled or misplaced."""

from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.hidden_states.plan import Span, plan_spans


def test_spans_of_a_mixed_batch():
    spans = plan_spans(
        ["decodes", "plain", "starts", "ends", "goes on"],
        [1, 3, 4, 5, 2],
        [9, 0, 0, 10, 30],
        {"decodes": 9, "starts": 20, "ends": 13, "goes on": 40},
    )
    assert spans == [
        Span("starts", 4, 0, 4),
        Span("ends", 8, 10, 3),
        Span("goes on", 13, 30, 2),
    ]
    assert [span.end for span in spans] == [4, 13, 32]


def test_nothing_is_wanted():
    assert plan_spans(["a"], [5], [0], {}) == []
    assert plan_spans([], [], [], {"a": 5}) == []
    assert plan_spans(["a"], [0], [0], {"a": 5}) == []


def test_computed_tokens_may_be_longer_than_the_batch():
    """A runner hands over its whole array, with room for more requests."""
    assert plan_spans(["a"], [2], [0, 7, 7], {"a": 5}) == [Span("a", 0, 0, 2)]


@st.composite
def schedules(draw):
    """Requests of random lengths, in random chunks, some preempted on their way."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    num_outputs = draw(st.integers(0, 4))
    computed = [0] * len(lengths)
    steps = []
    for _ in range(draw(st.integers(1, 40))):
        step = []
        for index in draw(st.permutations(range(len(lengths)))):
            if draw(st.integers(0, 9)) == 0:
                computed[index] = 0  # preempted: all over again
            left = lengths[index] + num_outputs - computed[index]
            count = min(draw(st.integers(0, 8)), left)
            if count:
                step.append((index, count, computed[index]))
                computed[index] += count
        steps.append(step)
    return lengths, steps


@given(schedules(), st.sets(st.integers(0, 5)))
def test_every_wanted_row_once_a_step_and_nothing_else(schedule, extracting):
    lengths, steps = schedule
    wanted = {
        str(index): length
        for index, length in enumerate(lengths)
        if index in extracting
    }
    for step in steps:
        spans = plan_spans(
            [str(index) for index, _, _ in step],
            [count for _, count, _ in step],
            [position for _, _, position in step],
            wanted,
        )
        rows = [
            (str(index), position + offset)
            for index, count, position in step
            for offset in range(count)
        ]
        planned = {
            span.row + offset: (span.request_id, span.position + offset)
            for span in spans
            for offset in range(span.num_rows)
        }
        assert planned == {
            row: (request_id, position)
            for row, (request_id, position) in enumerate(rows)
            if request_id in wanted and position < wanted[request_id]
        }
        assert len(planned) == sum(span.num_rows for span in spans)
