# SPDX-License-Identifier: Apache-2.0
"""Hidden states without our files: in a response, and by a sink of one's own.

The sink below writes one ``.npy`` file per request. The engine's worker imports this
file to find it, so its directory has to be on PYTHONPATH; this program sees to that.

    python extract_hidden_states_elsewhere.py --model Qwen/Qwen3-0.6B
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_sink import (
    RowSpan,
    Sink,
    SinkRequest,
)

PROMPTS = ["A river starts as rain on a hill.", "By four the ovens are hot."]


class NumpySink(Sink):
    """Collects a request's rows, and saves them as float32 when all have come."""

    def __init__(self, request: SinkRequest):
        self.request = request
        self.rows = bytearray()
        self.file = Path(request.path).with_suffix(".npy")

    def write(self, span: RowSpan) -> None:
        first = span.position * self.request.bytes_per_row
        self.rows[first : first + len(span.data)] = span.data

    def finish(self, token_ids: np.ndarray) -> None:
        import torch

        request = self.request
        shape = (len(token_ids), len(request.layer_ids), request.hidden_size)
        rows = torch.frombuffer(self.rows, dtype=request.dtype).view(shape)
        partial = self.file.with_suffix(".partial")
        with partial.open("wb") as file:
            np.save(file, rows.float().numpy())
        partial.rename(self.file)  # complete, or not there

    def withdraw(self, cause: str | None, advice: str | None = None) -> None:
        self.rows.clear()
        self.file.unlink(missing_ok=True)


def open_sink(request: SinkRequest) -> Sink:
    """Called by the engine's worker for each request."""
    return NumpySink(request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--enforce-eager", action="store_true")
    args = parser.parse_args()
    here = Path(__file__).resolve()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(here.parent), os.environ.get("PYTHONPATH")])
    )

    from vllm import LLM, SamplingParams
    from vllm.v1.hidden_states.client import hidden_states

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            model=args.model,
            enforce_eager=args.enforce_eager,
            max_model_len=512,
            kv_transfer_config={
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "layer_ids": args.layers,
                    "shared_storage_path": folder,
                    "sink": f"{here.stem}:open_sink",
                },
            },
        )
        inline = {"kv_transfer_params": {"return_inline": True}}
        for output in llm.generate(
            PROMPTS, SamplingParams(max_tokens=1, extra_args=inline)
        ):
            shape = tuple(hidden_states(output)["hidden_states"].shape)
            print(f"in the response: {shape}")
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=1))
        del llm  # ends the engine, and its worker has written all
        for output in outputs:
            assert output.kv_transfer_params and output.prompt_token_ids
            path = Path(output.kv_transfer_params["hidden_states_path"])
            rows = np.load(path.with_suffix(".npy"))
            assert len(rows) == len(output.prompt_token_ids)
            print(f"by the sink: {rows.shape}, {rows.dtype}")


if __name__ == "__main__":
    main()
