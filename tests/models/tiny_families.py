# SPDX-License-Identifier: Apache-2.0
"""Makes tiny checkpoints of many model families: real architectures, random weights.

A family is a row of ``FAMILIES``: a class of Transformers, and the fields of its
configuration that make it small. The weights come from a seed, and are large enough
that each layer changes its input and the logits are not flat; the weights of norms
are not all the same, so that a norm that is left out or doubled shows.

    path = make_family("Llama", folder)
    reference = load_reference("Llama", path)
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 512
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
IMAGE_TOKEN = SPECIAL_TOKENS[-1]
IMAGE_TOKEN_ID = len(SPECIAL_TOKENS) - 1
IMAGE_SIZE = 32
PATCH_SIZE = 8
TOKENS_PER_IMAGE = (IMAGE_SIZE // PATCH_SIZE) ** 2

# Every family's, but for what it changes.
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # About what keeps a vector's length from layer to layer.
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Latent attention: the sizes that the kernels know are those of the real models.
MLA: dict[str, Any] = MOE | {
    "head_dim": None,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,  # a dense layer, then experts
    "n_group": 1,
    "topk_group": 1,
}
# Gated delta net, with full attention in the last layer.
DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MAMBA: dict[str, Any] = {
    "num_hidden_layers": None,  # as many as there are letters
    "hybrid_override_pattern": "M-*-",  # Mamba2, MLP, attention, MLP
    "ssm_state_size": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 32,
}
VISION: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
    "initializer_range": 0.12,
}


@dataclass(frozen=True)
class Family:
    """How to make a checkpoint of a family.

    ``config`` and ``architecture`` are names in Transformers; ``settings`` are added
    to ``TEXT`` (None leaves a field out).
    """

    config: str
    architecture: str
    settings: dict[str, Any] = field(default_factory=dict)
    has_images: bool = False

    @property
    def text_settings(self) -> dict[str, Any]:
        """The fields of the language model's configuration."""
        settings = TEXT | self.settings
        return {name: value for name, value in settings.items() if value is not None}


FAMILIES: dict[str, Family] = {
    "Llama": Family("LlamaConfig", "LlamaForCausalLM"),
    "Qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", {"head_dim": None}),
    # Published with code of its own, which is Qwen2's but for what it drafts with.
    "MiMo": Family("Qwen2Config", "Qwen2ForCausalLM", {"head_dim": None}),
    "Qwen3": Family("Qwen3Config", "Qwen3ForCausalLM"),
    "Gemma3": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 32,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 64,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
        },
    ),
    "Qwen3-MoE": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        MOE | {"num_experts": 4, "norm_topk_prob": True},
    ),
    "DeepSeek-V2": Family(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        MLA | {"q_lora_rank": None, "topk_method": "greedy"},
    ),
    "DeepSeek-V3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        MLA
        | {
            "q_lora_rank": 64,
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 0,
        },
    ),
    "GLM4-MoE": Family(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        MOE
        | {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 1,  # see add_mtp_layer
        },
    ),
    "Qwen3-Next": Family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        MOE | DELTA_NET | {"num_experts": 4, "shared_expert_intermediate_size": 64},
    ),
    "Qwen3.5": Family(
        "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA_NET | {"head_dim": 64}
    ),
    "NemotronH": Family("NemotronHConfig", "NemotronHForCausalLM", MAMBA),
    "LLaVA": Family("LlavaConfig", "LlavaForConditionalGeneration", has_images=True),
}


def make_family(name: str, path: Path, seed: int = 0) -> str:
    """Write a family's checkpoint to ``path``; returns it as a string.

    Text families have no tokenizer (``skip_tokenizer_init=True``), a family with
    images has the processor that it cannot do without.
    """
    import transformers

    family = FAMILIES[name]
    config_class = getattr(transformers, family.config)
    if family.has_images:
        processor = make_processor()
        processor.save_pretrained(path)
        config = config_class(
            text_config=family.text_settings | {"model_type": "llama"},
            vision_config=VISION,
            image_token_index=IMAGE_TOKEN_ID,
            image_seq_length=TOKENS_PER_IMAGE,
            tie_word_embeddings=False,
            dtype="float32",
        )
    else:
        config = config_class(**family.text_settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, family.architecture)(config).float()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name and parameter.dim() == 1:
                    parameter += torch.empty_like(parameter).uniform_(-0.3, 0.3)
    model.save_pretrained(path)
    if family.has_images:
        _name_as_published(path / "model.safetensors")
    if name == "MiMo":
        file = path / "config.json"
        written = json.loads(file.read_text())
        written["architectures"] = ["MiMoForCausalLM"]
        file.write_text(json.dumps(written))
    return str(path)


def add_mtp_layer(path: str, num_layers: int, seed: int = 0) -> None:
    """Give a checkpoint of GLM4-MoE a layer that predicts the token after the next.

    Transformers leaves it out. It is a copy of the last decoder layer, behind norms
    and a random projection of its two inputs.

    Args:
        path: Of the checkpoint.
        num_layers: The decoder layers that it has.
        seed: Of the projection.
    """
    from safetensors.torch import load_file, save_file

    file = Path(path) / "model.safetensors"
    weights = load_file(file)
    last, added = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    for name, tensor in list(weights.items()):
        if name.startswith(last):
            weights[added + name.removeprefix(last)] = tensor.clone()
    hidden_size = TEXT["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    projection = torch.randn(hidden_size, 2 * hidden_size, generator=generator)
    weights[f"{added}eh_proj.weight"] = projection / hidden_size**0.5
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{added}{norm}.weight"] = torch.ones(hidden_size)
    weights[f"{added}embed_tokens.weight"] = weights[
        "model.embed_tokens.weight"
    ].clone()
    weights[f"{added}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})


def _name_as_published(path: Path) -> None:
    """Name the vision tower's weights as in the published checkpoints: vLLM knows
    those names alone, and Transformers writes others now."""
    from safetensors.torch import load_file, save_file

    ours, published = "vision_tower.", "vision_tower.vision_model."
    weights = {
        name.replace(ours, published): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})


@cache
def make_processor() -> Any:
    """Tokenizer and image processor of the family with images.

    The image processor is the one that works by Pillow: torchvision is not needed.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessorPil,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    words = SPECIAL_TOKENS + [f"word{i}" for i in range(VOCAB_SIZE)]
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate(words[:VOCAB_SIZE])}, "<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    side = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIZE}, crop_size=side),
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            eos_token="</s>",
            unk_token="<unk>",
            additional_special_tokens=[IMAGE_TOKEN],
        ),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE_TOKEN,
    )


def import_torchvision() -> None:
    """Make sure that ``torchvision`` can be imported, here and in processes started
    from here: vLLM's classes of some families do.

    Where there is none, one without content takes its place (tests/no_torchvision),
    after Transformers took note that it has to do without.
    """
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available():
        return
    stub = str(Path(__file__).parent.parent / "no_torchvision")
    sys.path.append(stub)
    others = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [others, stub]))


def make_image(seed: int = 0) -> Any:
    """A picture of random colours, not of the size that the model sees."""
    import numpy
    from PIL import Image

    colours = numpy.random.default_rng(seed).integers(0, 256, (6, 8, 3), "uint8")
    return Image.fromarray(colours).resize((64, 48), Image.Resampling.NEAREST)


def as_url(image: Any) -> str:
    """A picture as it stands in a chat request."""
    import base64
    import io

    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def load_reference(name: str, path: str) -> "Reference":
    """A family's checkpoint in Transformers, float32."""
    import transformers

    architecture = getattr(transformers, FAMILIES[name].architecture)
    return Reference(architecture.from_pretrained(path, dtype="float32").eval())


class Reference:
    """A model of Transformers, and what goes on in it."""

    def __init__(self, model: Any):
        self.model = model
        self._decoder = model.get_decoder()
        self.num_layers = len(self._decoder.layers)

    @property
    def norm(self) -> torch.nn.Module:
        """The norm after the last layer, under either of its names."""
        norm = getattr(self._decoder, "norm_f", None)
        return self._decoder.norm if norm is None else norm

    @torch.no_grad()
    def rows(self, token_ids: list[int], image: Any = None) -> torch.Tensor:
        """``[num_tokens, num_layers + 1, H]``: what enters each layer and the norm."""
        inputs = {"input_ids": torch.tensor([token_ids])}
        if image is not None:
            images = make_processor().image_processor(image, return_tensors="pt")
            inputs["pixel_values"] = images["pixel_values"]
        with self._seen() as seen:
            self.model(**inputs)
        return torch.stack([seen[layer] for layer in range(len(seen))], dim=1)

    @torch.no_grad()
    def logprobs(self, last_rows: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, vocab_size]`` from the rows of layer ``num_layers``."""
        return torch.log_softmax(self.model.lm_head(self.norm(last_rows)), dim=-1)

    @contextmanager
    def _seen(self) -> Iterator[dict[int, torch.Tensor]]:
        """What enters, by hooks: no output of a model has the last layer's rows."""
        seen: dict[int, torch.Tensor] = {}

        def watch(module: torch.nn.Module, layer: int) -> Any:
            def hook(module: Any, args: Any, kwargs: Any) -> None:
                rows = args[0] if args else kwargs["hidden_states"]
                seen[layer] = rows[0].clone()

            return module.register_forward_pre_hook(hook, with_kwargs=True)

        modules = [*self._decoder.layers, self.norm]
        hooks = [watch(module, layer) for layer, module in enumerate(modules)]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()
