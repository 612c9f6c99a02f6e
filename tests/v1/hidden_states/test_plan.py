# SPDX-License-Identifier: Apache-2.0
"""The planner: no row is lost, doubled or misplaced."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.v1.hidden_states.plan import Span, plan_spans

# A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


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


@unhurried
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


@st.composite
def drafting_schedules(draw):
    """Requests that draft and are rejected, asynchronously: per step and request, how
    many tokens are scheduled, their first position as the host and as the device has
    it, and the tokens themselves. With each request's tokens in the end."""
    num_requests = draw(st.integers(1, 4))
    prompts = [draw(st.integers(1, 12)) for _ in range(num_requests)]
    accepted = [list(range(1000, 1000 + length)) for length in prompts]
    computed = [0] * num_requests
    # What the host believes: drafts in flight are counted as if they were accepted.
    too_many = [0] * num_requests
    new_token = 0
    steps = []
    for _ in range(draw(st.integers(1, 25))):
        step = []
        for index in draw(st.permutations(range(num_requests))):
            if draw(st.integers(0, 11)) == 0:
                computed[index] = too_many[index] = 0  # preempted
            left = len(accepted[index]) - computed[index]
            count = min(draw(st.integers(0, 6)), left)
            if count == 0:
                continue
            first = computed[index]
            tokens = accepted[index][first : first + count]
            host = first + (too_many[index] if first >= prompts[index] else 0)
            computed[index] += count
            if computed[index] == len(accepted[index]):  # it samples, behind drafts
                num_drafts = draw(st.integers(0, 3))
                num_right = draw(st.integers(0, num_drafts))
                drafts = [new_token + n for n in range(num_drafts)]
                new_token += num_drafts + 1
                tokens = tokens + drafts
                accepted[index] += [*drafts[:num_right], new_token - 1]
                computed[index] += num_right
                too_many[index] = num_drafts - num_right
            step.append((index, host, first, tokens))
        steps.append(step)
    return prompts, steps, accepted, computed


@unhurried
@given(drafting_schedules())
def test_rows_of_rejected_drafts_do_not_last(schedule):
    """Written to the device's positions in the order of steps, every row in the end is
    that of the token that is there, whatever was drafted, rejected or preempted."""
    prompts, steps, accepted, computed = schedule
    files: list[dict[int, int]] = [{} for _ in prompts]
    for step in steps:
        rows = [
            (index, first + offset, token)
            for index, _, first, tokens in step
            for offset, token in enumerate(tokens)
        ]
        spans = plan_spans(
            [str(index) for index, _, _, _ in step],
            [len(tokens) for _, _, _, tokens in step],
            [host for _, host, _, _ in step],
            {str(index): 2**63 - 1 for index in range(len(prompts))},
        )
        assert sum(span.num_rows for span in spans) == len(rows)
        for span in spans:
            for offset in range(span.num_rows):
                index, position, token = rows[span.row + offset]
                assert span.request_id == str(index)
                files[index][position] = token
    for index, file in enumerate(files):
        # Rows of all tokens that have been an input, but for those to be done again.
        known = range(min(computed[index], len(accepted[index]) - 1))
        assert [file[position] for position in known] == [
            accepted[index][position] for position in known
        ]
