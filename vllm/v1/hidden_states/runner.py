# SPDX-License-Identifier: Apache-2.0
"""What both model runners call: the extraction and the last hidden state, as one."""

from collections.abc import Sequence
from typing import Any

import torch

from vllm.v1.hidden_states.capture import HiddenStateCapture
from vllm.v1.hidden_states.last import LastHiddenStateCapture, StepVectors


class RunnerCapture:
    """The captures of one worker; a runner that needs neither pays nothing.

    Args:
        extraction: Where the engine extracts hidden states.
        last: In the last pipeline stage of a model that generates.
    """

    def __init__(
        self,
        extraction: HiddenStateCapture | None,
        last: LastHiddenStateCapture | None,
    ):
        self.extraction = extraction
        self.last = last

    def attach(self, model: Any, keep_layers: bool = False) -> None:
        """See ``HiddenStateCapture.attach``."""
        if self.extraction is not None:
            self.extraction.attach(model, keep_layers)
        if self.last is not None:
            self.last.attach(model)

    def begin_step(self, scheduler_output: Any) -> None:
        """Hear which requests come and go; for every step, also one without tokens."""
        if self.last is not None:
            self.last.begin_step(
                scheduler_output.finished_req_ids, scheduler_output.scheduled_new_reqs
            )

    def strip(self, model_output: Any) -> Any:
        """See ``HiddenStateCapture.strip``."""
        if self.extraction is None:
            return model_output
        return self.extraction.strip(model_output)

    def capture(
        self,
        model_output: Any,
        request_ids: Sequence[str],
        num_scheduled_tokens: Sequence[int],
        num_computed_tokens: Sequence[int],
        positions: torch.Tensor | None = None,
        is_dummy: bool = False,
    ) -> Any:
        """Take what is wanted of this step; returns the output without it.

        Never waits for the device.

        Args:
            model_output, positions, is_dummy: See ``HiddenStateCapture.capture``.
            request_ids, num_scheduled_tokens, num_computed_tokens: See
                ``plan_spans``.
        """
        batch = request_ids, num_scheduled_tokens, num_computed_tokens
        if self.extraction is not None:
            model_output = self.extraction.capture(
                model_output, *batch, positions, is_dummy
            )
        if self.last is not None and not is_dummy:
            # A drafter's layers come beside the hidden states.
            is_several = isinstance(model_output, tuple)
            hidden_states = model_output[0] if is_several else model_output
            self.last.capture(hidden_states, *batch)
        return model_output

    def take_last(self) -> StepVectors | None:
        """The last hidden states of this step, for its output."""
        return None if self.last is None else self.last.take()
