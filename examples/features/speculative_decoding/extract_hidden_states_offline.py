# SPDX-License-Identifier: Apache-2.0
"""Extract a model's hidden states with ``LLM(...)``.

Every prompt's hidden states end in one ``.safetensors`` file, whose path comes back
in the prompt's output. Without ``--model`` a tiny model with random weights is made,
so that this runs anywhere, offline:

    python extract_hidden_states_offline.py
    python extract_hidden_states_offline.py --model Qwen/Qwen3-0.6B --layers 2 14 28
    python extract_hidden_states_offline.py --output /data/hidden_states

Without ``--output`` the files are removed at the end.
"""

import argparse
import tempfile
from pathlib import Path

from tiny_model import make_tiny_model  # type: ignore[import-not-found]

# Before anything that cleans up when the program ends, such as a temporary directory:
# what was imported first is cleaned up last, and the engine has to go before
# multiprocessing waits for it.
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    example_hidden_states_connector as connector,
)

PROMPTS = [
    "A river starts as rain on a hill.",
    "By four the ovens are hot.",
    "Which of the two ways is the shorter one, and who has taken it?",
]


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or path; default: a tiny one, made here")
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        metavar="K",
        help="layer K is what enters decoder layer K; the number of layers is what "
        "leaves the last one (default: half way, and the last)",
    )
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, metavar="TEXT")
    parser.add_argument("--output", type=Path, help="directory in which files stay")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--enforce-eager", action="store_true", help="start sooner, run slower"
    )
    return parser.parse_args()


def default_layers(model: str) -> list[int]:
    """Half way through the model, and the last layer's output."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    return [config.num_hidden_layers // 2, config.num_hidden_layers]


def extract(arguments: argparse.Namespace, model: str, output: Path) -> None:
    """Run the prompts, and show what the files hold."""
    layers = arguments.layers or default_layers(model)
    llm = LLM(
        model=model,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        tensor_parallel_size=arguments.tensor_parallel_size,
        # To compile a tiny model takes longer than to run it.
        enforce_eager=arguments.enforce_eager or arguments.model is None,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": layers}
            },
        },
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleHiddenStatesConnector",
            kv_role="kv_producer",
            kv_connector_extra_config={"shared_storage_path": str(output)},
        ),
    )
    # One token is the least that a request can ask for.
    outputs = llm.generate(arguments.prompts, SamplingParams(max_tokens=1))
    for result in outputs:
        params = result.kv_transfer_params or {}
        if "hidden_states_error" in params:
            raise SystemExit(f"{result.prompt!r}: {params['hidden_states_error']}")
        path = params["hidden_states_path"]
        tensors = connector.load_hidden_states(path)
        hidden_states = tensors["hidden_states"]  # [num_tokens, num_layers, H]
        assert tensors["token_ids"].tolist() == result.prompt_token_ids
        print(f"\n{result.prompt!r}")
        print(f"  {path}")
        print(f"  {list(hidden_states.shape)} {hidden_states.dtype}")
        for column, layer in enumerate(layers):
            rows = hidden_states[:, column].float()  # [num_tokens, H]
            print(f"  layer {layer}: mean norm {rows.norm(dim=-1).mean():.4f}")
        if arguments.output is None:
            connector.cleanup_hidden_states(path)


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="hidden-states-") as folder:
        model = arguments.model
        if model is None:
            model = str(make_tiny_model(Path(folder) / "tiny-qwen3"))
        output = arguments.output or Path(folder) / "files"
        extract(arguments, model, output)


# The engine may start processes that import this file again.
if __name__ == "__main__":
    main()
