# SPDX-License-Identifier: Apache-2.0
"""An engine of one process that has nothing left to do."""

from typing import Any


def settle(engine_core: Any) -> None:
    """Let the workers hear of the last finished requests, in a step without tokens.

    Their files may wait for it. An engine with a process of its own makes that step by
    itself; one that is stepped by its caller is not called again when it is idle.
    """
    scheduler = engine_core.scheduler
    if (
        engine_core.vllm_config.hidden_states_config is not None
        and scheduler.finished_req_ids
        and not scheduler.has_unfinished_requests()
    ):
        engine_core.step_fn()
