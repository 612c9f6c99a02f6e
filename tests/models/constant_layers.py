# SPDX-License-Identifier: Apache-2.0
"""A model whose hidden states are known: each layer's output is a function of
(layer, position, token id), so that any mix-up of row, layer or request shows as a
wrong number.

It has attention layers, so that it has a KV cache to be scheduled by; what they
compute is multiplied by zero. Its next token is a function of position and token too.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3
from vllm.sequence import IntermediateTensors

ARCHITECTURE = "ConstantLayersForCausalLM"
NUM_LAYERS = 5
HIDDEN_SIZE = 32
HEAD_SIZE = 32
VOCAB_SIZE = 1024


def known_rows(
    layer: int, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """What layer ``layer``'s hidden states must be: ``[N, HIDDEN_SIZE]``."""
    column = torch.arange(HIDDEN_SIZE, device=positions.device)
    return (
        layer * 4096 + positions[:, None] + token_ids[:, None] * (column + 1)
    ).float()


def next_token(positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The token that the model says after each token."""
    return (token_ids * 7 + positions * 3 + 1) % VOCAB_SIZE


@support_torch_compile
class ConstantLayersModel(nn.Module, EagleModelMixin):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.start_layer = 0
        self.layers = nn.ModuleList(
            Attention(
                1,
                HEAD_SIZE,
                1.0,
                num_kv_heads=1,
                cache_config=vllm_config.cache_config,
                prefix=f"{prefix}.layers.{layer}.attn",
            )
            for layer in range(NUM_LAYERS)
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ):
        hidden_states = known_rows(0, positions, input_ids)
        aux_hidden_states = self._maybe_add_hidden_state([], 0, hidden_states, None)
        for layer, attention in enumerate(self.layers):
            heads = hidden_states[:, :HEAD_SIZE] * 0.0
            nothing = attention(heads, heads, heads) * 0.0
            hidden_states = known_rows(layer + 1, positions, input_ids) + nothing
            self._maybe_add_hidden_state(
                aux_hidden_states, layer + 1, hidden_states, None
            )
        if aux_hidden_states:
            return hidden_states, aux_hidden_states
        return hidden_states


class ConstantLayersForCausalLM(nn.Module, SupportsEagle3):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.model = ConstantLayersModel(vllm_config=vllm_config, prefix="model")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return known_rows(0, torch.zeros_like(input_ids), input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ):
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # Columns 0 and 1 differ by the token id; what is left of column 0 is the
        # position, as the last layer's number is known.
        token_ids = hidden_states[:, 1] - hidden_states[:, 0]
        positions = hidden_states[:, 0] - token_ids - NUM_LAYERS * 4096
        wanted = next_token(positions.long(), token_ids.long())
        return torch.nn.functional.one_hot(wanted, VOCAB_SIZE).float() * 50

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()


def make_constant_layers_model(path: Path) -> str:
    """Write a config (there are no weights) and register the class; use with
    ``load_format="dummy"`` and ``skip_tokenizer_init=True``."""
    from transformers import LlamaConfig

    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, ConstantLayersForCausalLM)
    config = LlamaConfig(
        architectures=[ARCHITECTURE],
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD_SIZE,
        max_position_embeddings=4096,
        eos_token_id=2,
        dtype="float32",
    )
    config.save_pretrained(path)
    return str(path)


def plugin(folder: Path) -> list[Path]:
    """What has to be on ``sys.path`` for an engine's own processes to know the model.

    Args:
        folder: An empty one, for a plugin of vLLM that names the class; the module
            itself cannot be imported as early as plugins are.
    """
    information = folder / "constant_layers_plugin-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: constant-layers-plugin\nVersion: 0\n"
    )
    (information / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nconstant_layers = constant_layers_plugin:register\n"
    )
    name = f"{Path(__file__).stem}:{ConstantLayersForCausalLM.__name__}"
    (folder / "constant_layers_plugin.py").write_text(
        "def register():\n"
        "    from vllm import ModelRegistry\n"
        f"    ModelRegistry.register_model({ARCHITECTURE!r}, {name!r})\n"
    )
    return [folder, Path(__file__).parent]
