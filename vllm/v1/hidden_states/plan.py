# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step's batch are wanted, and where in their request they stand."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Adjacent rows of one request within one step."""

    request_id: str
    row: int
    """First row in the step's batch."""
    position: int
    """Position, within the request, of the first row's token."""
    num_rows: int

    @property
    def end(self) -> int:
        """The position after the last row's."""
        return self.position + self.num_rows


def plan_spans(
    request_ids: Sequence[str],
    num_scheduled_tokens: Sequence[int],
    num_computed_tokens: Sequence[int],
    wanted: Mapping[str, int],
) -> list[Span]:
    """The wanted rows of one step, in the order of the batch.

    Args:
        request_ids: The batch's requests, in the order of their rows.
        num_scheduled_tokens: Rows of each request in this step.
        num_computed_tokens: Tokens of each request computed before this step,
            which is the position of its first row. May be longer than the batch.
        wanted: For each request that extracts, how many of its leading positions
            are wanted. Requests that are not in it are passed over.
    """
    spans = []
    row = 0
    for request_id, num_rows, position in zip(
        request_ids, num_scheduled_tokens, num_computed_tokens, strict=False
    ):
        end = wanted.get(request_id)
        if end is not None and position < end:
            first, count = int(position), int(num_rows)  # not NumPy's, that overflow
            spans.append(Span(request_id, row, first, min(count, end - first)))
        row += int(num_rows)
    return [span for span in spans if span.num_rows > 0]
