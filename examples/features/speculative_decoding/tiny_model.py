# SPDX-License-Identifier: Apache-2.0
"""Makes a tiny Qwen3 checkpoint from a seed: real architecture, random weights.

A byte-level BPE tokenizer is trained on ``tiny_model_text.txt``; it has a chat
template. The same seed gives the same files. Nothing is fetched.

    python tiny_model.py /tmp/tiny-qwen3
"""

import argparse
from pathlib import Path

TEXT = Path(__file__).with_name("tiny_model_text.txt")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(vocab_size: int = 1024):
    """A tokenizer trained on the text, with ``<|im_end|>`` as its end of sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        TEXT.read_text(encoding="utf-8").splitlines(), trainer
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(path: str | Path, seed: int = 0, **overrides) -> Path:
    """Write the checkpoint to ``path`` unless one is there.

    Args:
        path: A directory; made where it does not exist.
        seed: Of the weights.
        overrides: Fields of ``Qwen3Config``, such as ``num_hidden_layers``.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = Path(path)
    if (path / "model.safetensors").exists():
        return path
    settings = {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
        # A random model with tied weights says one token over and over.
        "tie_word_embeddings": False,
        "dtype": "float32",
    } | overrides
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**settings)).float().eval()
    make_tokenizer(settings["vocab_size"]).save_pretrained(path)
    model.save_pretrained(path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="directory of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_tiny_model(arguments.path, arguments.seed))
