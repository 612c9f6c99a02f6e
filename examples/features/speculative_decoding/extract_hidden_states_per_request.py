# SPDX-License-Identifier: Apache-2.0
"""One engine, and requests that each ask for other hidden states, or for none.

Without ``--model`` a tiny model with random weights is made, so that this runs
anywhere, offline:

    python extract_hidden_states_per_request.py
    python extract_hidden_states_per_request.py --model Qwen/Qwen3-0.6B --layers 2 14 28
"""

import argparse
import tempfile
from pathlib import Path

from tiny_model import make_tiny_model  # type: ignore[import-not-found]

# Before anything that cleans up when the program ends, such as a temporary directory.
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    example_hidden_states_connector as connector,
)

PROMPT = "A river starts as rain on a hill."


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or path; default: a tiny one, made here")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 3, 6], metavar="K")
    parser.add_argument("--max-tokens", type=int, default=8)
    return parser.parse_args()


def run(arguments: argparse.Namespace, model: str, folder: str) -> None:
    """Ask in every way, and show what comes back."""
    llm = LLM(
        model=model,
        enforce_eager=arguments.model is None,
        # No speculative config is needed where the connector has the layers.
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleHiddenStatesConnector",
            kv_role="kv_producer",
            kv_connector_extra_config={
                "shared_storage_path": folder,
                "layer_ids": arguments.layers,
                "extract_by_default": False,
            },
        ),
    )
    first, last = arguments.layers[0], arguments.layers[-1]
    for asked in (
        {},
        {"extract_hidden_states": True},
        {"extract_hidden_states": True, "hidden_states_layers": [last, first]},
        {"extract_hidden_states": True, "include_output_tokens": True},
    ):
        sampling = SamplingParams(
            max_tokens=arguments.max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": asked},
        )
        (output,) = llm.generate([PROMPT], sampling, use_tqdm=False)
        print(f"\nasked for {asked}")
        if output.kv_transfer_params is None:
            print("  no file")
            continue
        path = output.kv_transfer_params["hidden_states_path"]
        tensors = connector.load_hidden_states(path)
        print(f"  {list(tensors['hidden_states'].shape)}: rows, layers, hidden size")
        print(f"  of {len(output.prompt_token_ids or [])} prompt and", end=" ")
        print(f"{len(output.outputs[0].token_ids)} output tokens")
        connector.cleanup_hidden_states(path)


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="hidden-states-") as folder:
        model = arguments.model or make_tiny_model(Path(folder) / "tiny-qwen3")
        run(arguments, str(model), str(Path(folder) / "files"))


# The engine may start processes that import this file again.
if __name__ == "__main__":
    main()
