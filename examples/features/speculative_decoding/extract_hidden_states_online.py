# SPDX-License-Identifier: Apache-2.0
"""Extract hidden states from a served model, as its client.

Start the server, here with a tiny model (or name any other one):

    python tiny_model.py /tmp/tiny-qwen3
    vllm serve /tmp/tiny-qwen3 \\
        --speculative_config '{"method": "extract_hidden_states",
            "num_speculative_tokens": 1, "draft_model_config": {"hf_config":
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}}}' \\
        --kv_transfer_config '{"kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer", "kv_connector_extra_config":
            {"shared_storage_path": "/tmp/hidden_states"}}'

Then, on a machine that sees the server's ``shared_storage_path``:

    python extract_hidden_states_online.py

Each response names the file of its request. A client that has read a file removes it:
the server does not.
"""

import argparse
from typing import Any

from openai import OpenAI

from vllm.distributed.kv_transfer.kv_connector.v1 import (
    example_hidden_states_connector as connector,
)

PROMPTS = ["A river starts as rain on a hill.", "By four the ovens are hot."]
MESSAGE = "Where does the river end?"


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="EMPTY")
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, metavar="TEXT")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds to wait for a file"
    )
    parser.add_argument("--keep", action="store_true", help="leave the files there")
    return parser.parse_args()


def show(title: str, params: dict, arguments: argparse.Namespace) -> None:
    """Load the file of one response, and show what it holds.

    Args:
        title: What to call the request.
        params: ``kv_transfer_params`` of the response.
        arguments: Of the command line.
    """
    if "hidden_states_error" in params:
        raise SystemExit(f"{title}: {params['hidden_states_error']}")
    path = params["hidden_states_path"]
    tensors = connector.load_hidden_states(path, timeout=arguments.timeout)
    hidden_states = tensors["hidden_states"]  # [num_tokens, num_layers, H]
    print(f"\n{title}\n  {path}")
    print(f"  {list(hidden_states.shape)} {hidden_states.dtype}")
    print(f"  token ids {tensors['token_ids'].tolist()}")
    if not arguments.keep:
        connector.cleanup_hidden_states(path)


def main() -> None:
    arguments = parse_arguments()
    client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    model = client.models.list().data[0].id
    # One prompt a request; of a list of prompts each choice has its own path.
    for prompt in arguments.prompts:
        # `kv_transfer_params` is vLLM's own, beside the fields that OpenAI has.
        completion: Any = client.completions.create(
            model=model, prompt=prompt, max_tokens=1
        )
        show(repr(prompt), completion.kv_transfer_params, arguments)
    chat: Any = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": MESSAGE}], max_tokens=1
    )
    show(f"chat: {MESSAGE!r}", chat.kv_transfer_params, arguments)


if __name__ == "__main__":
    main()
