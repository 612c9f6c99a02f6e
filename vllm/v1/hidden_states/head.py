# SPDX-License-Identifier: Apache-2.0
"""What a model's language-model head is given.

Most families hand over their hidden states after the final norm. Some (MiMo, Step-3.5,
Kimi-K3 in vLLM 0.32.0) norm them only on their way to the head, in ``compute_logits``.
Rather than a list of families, which would be wrong with the next one, what arrives at
the head is looked at.
"""

from collections.abc import Callable
from typing import Any

import torch

# vLLM's, and the one that takes its place with LoRA; both multiply by the head.
PROCESSORS = frozenset({"LogitsProcessor", "LogitsProcessorWithLoRA"})

Head = Callable[[torch.Tensor], torch.Tensor]


class _Arrived(Exception):
    def __init__(self, rows: torch.Tensor):
        super().__init__()
        self.rows = rows


class UnknownHeadError(RuntimeError):
    """It was not to be seen what a model's head is given."""


def find_head(model: torch.nn.Module, rows: torch.Tensor) -> Head | None:
    """What turns a model's output into its head's input; None if nothing does.

    To be called by all tensor-parallel ranks: a model that has another way to its
    logits goes that way to the end.

    Args:
        model: Has ``compute_logits``.
        rows: ``[n, H]``, such as the model returns.

    Raises:
        UnknownHeadError: saying why it cannot be found out.
    """
    processors = [
        module
        for module in model.modules()
        if PROCESSORS.intersection(kind.__name__ for kind in type(module).__mro__)
    ]
    if not processors:
        return None
    compute_logits: Any = model.compute_logits

    @torch.inference_mode()
    def head(rows: torch.Tensor) -> torch.Tensor:
        hooks = [
            module.register_forward_pre_hook(_stop, with_kwargs=True)
            for module in processors
        ]
        try:
            compute_logits(rows)
        except _Arrived as arrived:
            return arrived.rows
        finally:
            for hook in hooks:
                hook.remove()
        raise UnknownHeadError("its logits are computed without vLLM's LogitsProcessor")

    try:
        arrived = head(rows)
    except UnknownHeadError:
        raise
    except Exception as error:
        raise UnknownHeadError(f"its compute_logits fails: {error!r}") from error
    if arrived.shape != rows.shape:
        raise UnknownHeadError(f"it has shape {list(arrived.shape)} for one row")
    return None if arrived is rows else head


def _stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """In the place of the multiplication, which is not wanted."""
    raise _Arrived(args[1] if len(args) > 1 else kwargs["hidden_states"])
