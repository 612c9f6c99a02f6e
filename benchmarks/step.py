# SPDX-License-Identifier: Apache-2.0
"""Where the time of a worker's steps goes: plain, ours and stock, sampled by py-spy.

The worker's main thread alone, while it computes prompts; writers' threads are beside
it, and shown by themselves. Needs py-spy (`pip install py-spy`) and the right to trace.

    python benchmarks/step.py --output build/bench-step.md
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import psutil
from hidden_states import MODELS, Side  # type: ignore[import-not-found]

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "examples/features/speculative_decoding"))

WORKLOADS = {
    "prefill, prompts of 256": (256, 1),
    "prefill, prompts of 16": (16, 1),
    "decode": (16, 64),
}
# A part, and what its functions look like; the innermost of a stack counts.
PARTS = {
    "waits for orders": r"(dequeue|acquire_read|recv) \(",
    "the model": r"(_model_forward|forward) \(",
    "samples": r"(_sample|sample|compute_logits) \(",
    "waits for a slot": r"acquire \(.*hidden_states/ring\.py",
    "packs": r"pack_rows \(.*hidden_states/pack\.py",
    "captures, else": r"capture \(.*hidden_states/",
    "the connector": r"\(.*example_hidden_states_connector\.py",
    "drafts, stock": r"propose_draft_token_ids \(|\(.*spec_decode/extract_hidden",
    "a step, else": r"(execute_model|sample_tokens) \(",
}
WRITERS = "hidden-states-writer"


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--seconds", type=int, default=8, help="of each workload")
    parser.add_argument("--sides", nargs="+", default=["plain", "ours", "stock"])
    parser.add_argument("--output", type=Path, help="write the table there")
    return parser.parse_args()


def worker_of(side: Side) -> int:
    """The process that computes."""
    for process in psutil.Process(side.pid).children(recursive=True):
        if "Worker" in " ".join(process.cmdline()):
            return int(process.pid)
    raise RuntimeError(f"the side {side.name!r} has no worker process")


def part_of(stack: list[str]) -> str:
    """Of a stack from the outermost function to the innermost."""
    for function in reversed(stack):
        for part, pattern in PARTS.items():
            if re.search(pattern, function):
                return part
    return "else"


def sample(side: Side, length: int, max_tokens: int, seconds: int) -> Counter[str]:
    """Shares of the main thread's time, and of one processor in the writers'."""
    enough = threading.Event()

    def work() -> None:
        seed = 1
        while not enough.is_set():
            side.run(
                (max(8, 16384 // (length + max_tokens)), length, max_tokens, 0), seed
            )
            seed += 1

    side.run((8, length, max_tokens, 0), 0)  # warms up
    thread = threading.Thread(target=work)
    thread.start()
    with tempfile.NamedTemporaryFile() as file:
        command = ["py-spy", "record", "--pid", str(worker_of(side)), "--threads"]
        command += ["--format", "raw", "--rate", "200", "--output", file.name]
        command += ["--idle", "--duration", str(seconds)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        finally:
            enough.set()
            thread.join()
        counts: Counter[str] = Counter()
        for line in Path(file.name).read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            _, thread_name, *functions = stack.split(";")
            if "MainThread" in thread_name:
                counts[part_of(functions)] += int(count)
            elif WRITERS in thread_name and functions:
                innermost = functions[-1]
                is_idle = re.search(
                    r"\((threading|queue|thread)\.py|_worker \(", innermost
                )
                counts[WRITERS] += 0 if is_idle else int(count)
    return counts


def main() -> None:
    arguments = parse_arguments()
    if shutil.which("py-spy") is None:
        sys.exit("this needs py-spy, which is not installed: pip install py-spy")
    from tiny_model import make_tiny_model  # type: ignore[import-not-found]

    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        settings = MODELS[arguments.model]
        model = make_tiny_model(Path(folder) / arguments.model, **settings)
        for name in arguments.sides:
            side = Side(name, model, "compiled", settings.get("num_hidden_layers", 6))
            try:
                for title, (length, max_tokens) in WORKLOADS.items():
                    rows.append(
                        (
                            title,
                            name,
                            sample(side, length, max_tokens, arguments.seconds),
                        )
                    )
            finally:
                side.stop()
    parts = [*PARTS, "else", WRITERS]
    lines = [
        f"| workload | side | {' | '.join(parts)} |",
        "| --- | --- |" + " --- |" * len(parts),
    ]
    for title, name, counts in sorted(
        rows, key=lambda row: list(WORKLOADS).index(row[0])
    ):
        total = sum(count for part, count in counts.items() if part != WRITERS)
        shares = [f"{100 * counts[part] / total:.1f} %" for part in parts]
        lines.append(f"| {title} | {name} | {' | '.join(shares)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
