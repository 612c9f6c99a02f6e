# SPDX-License-Identifier: Apache-2.0
"""A tiny random EAGLE-3 draft for a tiny target: it is often wrong, which is what the
tests want. With a vocabulary of a few tokens it is right often enough, too."""

from pathlib import Path

import torch
from safetensors.torch import save_file


def make_eagle3_draft(
    path: Path, vocab_size: int, hidden_size: int = 128, layers: tuple[int, ...] = ()
) -> str:
    """Write a checkpoint of one layer.

    Args:
        path: An empty directory.
        vocab_size, hidden_size: The target's.
        layers: Of the target, that the draft wants; vLLM's own choice where empty.
    """
    from transformers import LlamaConfig

    num_heads, head_size, intermediate_size = 4, 32, 256
    config = LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=head_size,
        max_position_embeddings=4096,
        dtype="float32",
    )
    config.draft_vocab_size = vocab_size
    if layers:
        config.eagle_aux_hidden_state_layer_ids = list(layers)
        config.eagle_config = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    config.save_pretrained(path)
    heads = num_heads * head_size
    shapes = {
        "embed_tokens": (vocab_size, hidden_size),
        "fc": (hidden_size, (len(layers) or 3) * hidden_size),
        "lm_head": (vocab_size, hidden_size),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden_size),
        "midlayer.self_attn.k_proj": (heads, 2 * hidden_size),
        "midlayer.self_attn.v_proj": (heads, 2 * hidden_size),
        "midlayer.self_attn.o_proj": (hidden_size, heads),
        "midlayer.mlp.gate_proj": (intermediate_size, hidden_size),
        "midlayer.mlp.up_proj": (intermediate_size, hidden_size),
        "midlayer.mlp.down_proj": (hidden_size, intermediate_size),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"midlayer.{norm}.weight"] = torch.ones(hidden_size)
    weights["norm.weight"] = torch.ones(hidden_size)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return str(path)
