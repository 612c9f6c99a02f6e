# SPDX-License-Identifier: Apache-2.0
"""A tiny EAGLE-3 draft for a tiny target, right at times and wrong at times.

It says what the target's own head makes of the residual stream that enters the last of
its layers, a token ago: right while the target repeats itself. Its one decoder layer
computes, but adds nothing.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def make_eagle3_draft(path: Path, target: str, layers: tuple[int, ...]) -> str:
    """Write a checkpoint.

    Args:
        path: An empty directory.
        target: The target's checkpoint, of Qwen3's or Llama's architecture.
        layers: Of the target, that the draft wants.
    """
    from transformers import LlamaConfig

    weights_of_target = load_file(Path(target) / "model.safetensors")
    head = weights_of_target["lm_head.weight"]
    vocab_size, hidden_size = head.shape
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
    config.eagle_aux_hidden_state_layer_ids = list(layers)
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    config.save_pretrained(path)
    heads = num_heads * head_size
    shapes = {
        "self_attn.q_proj": (heads, 2 * hidden_size),
        "self_attn.k_proj": (heads, 2 * hidden_size),
        "self_attn.v_proj": (heads, 2 * hidden_size),
        "mlp.gate_proj": (intermediate_size, hidden_size),
        "mlp.up_proj": (intermediate_size, hidden_size),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"midlayer.{name}.weight": torch.randn(shape, generator=generator) / 16
        for name, shape in shapes.items()
    }
    weights["midlayer.self_attn.o_proj.weight"] = torch.zeros(hidden_size, heads)
    weights["midlayer.mlp.down_proj.weight"] = torch.zeros(
        hidden_size, intermediate_size
    )
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"midlayer.{norm}.weight"] = torch.ones(hidden_size)
    nothing = torch.zeros(hidden_size, (len(layers) - 1) * hidden_size)
    weights["fc.weight"] = torch.cat([nothing, torch.eye(hidden_size)], dim=1)
    weights["norm.weight"] = weights_of_target["model.norm.weight"].clone()
    weights["lm_head.weight"] = head.clone()
    weights["embed_tokens.weight"] = weights_of_target["model.embed_tokens.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return str(path)
