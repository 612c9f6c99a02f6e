# SPDX-License-Identifier: Apache-2.0
"""The references that several modules compare with."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def reference(tiny_model: str) -> Any:
    """The tiny model's weights in Transformers, float32."""
    return load_reference(tiny_model)


@pytest.fixture(scope="session")
def reference_rows(reference: Any) -> Callable[[list[int]], torch.Tensor]:
    """``[num_tokens, num_layers + 1, H]`` of the tiny model; see ``rows_of``."""
    return partial(rows_of, reference)


@pytest.fixture(scope="session")
def reference_of() -> Callable[[str], Callable[[list[int]], torch.Tensor]]:
    """``rows_of`` for another Qwen3 or Llama checkpoint, by its path."""
    return lambda path: partial(rows_of, load_reference(path))


@pytest.fixture(scope="session")
def reference_last(reference: Any) -> Callable[[list[int]], torch.Tensor]:
    """``[H]``, the tiny model's last hidden state; see ``last_of``."""
    return partial(last_of, reference)


@pytest.fixture(scope="session")
def reference_last_of() -> Callable[[str], Callable[[list[int]], torch.Tensor]]:
    """``last_of`` for another checkpoint, by its path."""
    return lambda path: partial(last_of, load_reference(path))


@torch.no_grad()
def last_of(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """``[H]``: what the language-model head gets at the last position."""
    return reference.model(torch.tensor([token_ids])).last_hidden_state[0, -1]


def load_reference(path: str) -> Any:
    """A checkpoint in Transformers, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()


def rows_of(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """``[num_tokens, num_layers + 1, H]``: what enters each layer and the final norm.

    By hooks, not ``output_hidden_states``: its last entry is after the norm.
    """
    modules = [*reference.model.layers, reference.model.norm]
    seen: dict[int, torch.Tensor] = {}

    def watch(module: Any, layer: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            rows = args[0] if args else kwargs["hidden_states"]
            seen[layer] = rows[0].clone()

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    hooks = [watch(module, layer) for layer, module in enumerate(modules)]
    try:
        with torch.no_grad():
            reference(torch.tensor([token_ids]))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([seen[layer] for layer in range(len(modules))], dim=1)


@pytest.fixture(scope="session")
def constant_layers(engines: Any) -> Any:
    """The module of the model whose hidden states are known."""
    tests = Path(engines.__file__).parent
    return engines.import_file(tests / "models" / "constant_layers.py")


@pytest.fixture(scope="session")
def families(engines):
    """The module that makes the checkpoints."""
    return engines.import_file(engines.ROOT / "tests" / "models" / "tiny_families.py")
