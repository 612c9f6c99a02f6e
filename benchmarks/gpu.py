# SPDX-License-Identifier: Apache-2.0
"""What the capture path costs on a GPU: the pack, the copy to the host, a step.

Needs a CUDA device, torch and Triton; no vLLM. Shapes are those of real models: four
layers of the hidden size, a step of `--rows` rows. (What extraction costs a whole
engine there is `hidden_states.py`'s to say, with a CUDA build of vLLM.)

    python benchmarks/gpu.py --output figures.md
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
HIDDEN_SIZES = {"8B": 4096, "70B": 8192, "DeepSeek-V3": 7168}
NUM_LAYERS = 4


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192, help="of a step")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--output", type=Path, help="write the table there, and JSON")
    return parser.parse_args()


def missing() -> str | None:
    """What this machine lacks, in a sentence."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "there is no Triton (pip install triton)"
    return None


def seconds_of(action: Callable[[], object], turns: int) -> float:
    """Median seconds on the device."""
    times: list[float] = []
    event: Any = torch.cuda.Event
    for turn in range(-3, turns):
        start, end = (event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        end.synchronize()
        if turn >= 0:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure(name: str, hidden_size: int, arguments: argparse.Namespace) -> list[Any]:
    """One model's size, stored as it is and in FP8."""
    from vllm.v1.hidden_states.dtypes import FLOAT8, name_of
    from vllm.v1.hidden_states.pack import pack_reference
    from vllm.v1.hidden_states.pack_triton import pack_triton

    num_rows = arguments.rows
    layers = [
        torch.randn(num_rows, hidden_size, device="cuda").bfloat16()
        for _ in range(NUM_LAYERS)
    ]
    # Every other request opts out.
    runs = [(first, 64) for first in range(0, num_rows - 63, 128)]
    taken = 64 * len(runs)
    results = []
    for storage_dtype in (torch.bfloat16, FLOAT8):
        shape = taken, NUM_LAYERS, hidden_size
        out = torch.empty(shape, dtype=storage_dtype, device="cuda")
        host = torch.empty(shape, dtype=storage_dtype, pin_memory=True)
        scales = torch.empty(taken, device="cuda")
        source = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        target = torch.empty_like(source)
        sides: dict[str, Callable[[], object]] = {
            "triton": partial(pack_triton, layers, runs, out, scales),
            "torch": partial(pack_reference, layers, runs, out, scales),
            "copy": partial(target.copy_, source),
            "to_host": partial(host.copy_, out, non_blocking=True),
        }
        seconds = {
            side: seconds_of(action, arguments.turns) for side, action in sides.items()
        }
        results.append(
            {
                "model": name,
                "hidden_size": hidden_size,
                "stored": name_of(storage_dtype),
                "rows": taken,
                "bytes_read": source.nbytes,
                "bytes_out": out.nbytes,
                "seconds": seconds,
            }
        )
    return results


def table(results: list[Any]) -> str:
    """The figures, in Markdown; GB/s of what the pack reads, and of what goes out."""
    lines = [
        "| model, four layers | stored | rows | pack, GB/s | torch "
        "| copy on the device | pack / copy | to the host, GB/s "
        "| microseconds of a step's pack |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in results:
        speed = {
            side: each["bytes_out" if side == "to_host" else "bytes_read"] / taken / 1e9
            for side, taken in each["seconds"].items()
        }
        lines.append(
            f"| {each['model']}, {each['hidden_size']:,} | {each['stored']} "
            f"| {each['rows']:,} | {speed['triton']:,.0f} | {speed['torch']:,.0f} "
            f"| {speed['copy']:,.0f} | {speed['triton'] / speed['copy']:.2f} "
            f"| {speed['to_host']:.1f} | {each['seconds']['triton'] * 1e6:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = parse_arguments()
    lacks = missing()
    if lacks is not None:
        sys.exit(f"error: this needs a CUDA device, torch and Triton, and {lacks}")
    try:
        import vllm.v1.hidden_states.pack  # noqa: F401
    except ImportError:  # no vLLM here: this repository's part is enough
        sys.path.insert(0, str(ROOT))
    results = []
    for name, hidden_size in HIDDEN_SIZES.items():
        results += measure(name, hidden_size, arguments)
        print(f"{name}: done", flush=True)
    text = (
        f"{table(results)}\n{torch.cuda.get_device_name()}, torch {torch.__version__}\n"
    )
    print(f"\n{text}")
    if arguments.output:
        arguments.output.write_text(text)
        arguments.output.with_suffix(".json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
