# SPDX-License-Identifier: Apache-2.0
"""Last hidden states without a server: of prompts, of a chat, beside ordinary requests.

Without ``--model`` a tiny model with random weights is made, so that this runs
anywhere, offline:

    python last_hidden_state.py
    python last_hidden_state.py --model Qwen/Qwen3-0.6B
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "features/speculative_decoding"))
from tiny_model import make_tiny_model  # type: ignore[import-not-found]  # noqa: E402

# Before anything that cleans up when the program ends, such as a temporary directory.
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.v1.hidden_states.client import last_hidden_state  # noqa: E402

PROMPTS = ["A river starts as rain on a hill.", "By four the ovens are hot."]


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or path; default: a tiny one, made here")
    parser.add_argument("--enforce-eager", action="store_true", help="compile nothing")
    return parser.parse_args()


def run(model: str, enforce_eager: bool) -> None:
    """Ask for vectors, and for ordinary outputs in the same batch."""
    llm = LLM(model=model, enforce_eager=enforce_eager)
    asks = SamplingParams(
        max_tokens=1,
        extra_args={"kv_transfer_params": {"return_last_hidden_state": True}},
    )
    ordinary = SamplingParams(max_tokens=8)
    outputs = llm.generate([*PROMPTS, PROMPTS[0]], [asks, asks, ordinary])
    for prompt, output in zip(PROMPTS, outputs[:2], strict=True):
        print(f"{prompt!r}: {last_hidden_state(output)[:4]} ...")
    print(f"an ordinary request: {outputs[2].outputs[0].text!r}")
    conversation: list[Any] = [{"role": "user", "content": PROMPTS[0]}]
    [output] = llm.chat(conversation, asks)
    vector = last_hidden_state(output)
    assert output.kv_transfer_params is not None
    print(f"a chat: {vector.shape}")
    print(f"  {output.kv_transfer_params['last_hidden_state_metadata']}")


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="last-hidden-state-") as folder:
        model = arguments.model or make_tiny_model(Path(folder) / "tiny-qwen3")
        run(str(model), arguments.enforce_eager)


# The engine may start processes that import this file again.
if __name__ == "__main__":
    main()
