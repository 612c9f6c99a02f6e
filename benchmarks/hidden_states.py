# SPDX-License-Identifier: Apache-2.0
"""What extracting hidden states costs, against not extracting, in one run.

Each side is an engine in processes of its own: plain vLLM (this build), plain vLLM
again (what differs between two that are the same), ours, stock vLLM (its wheel,
unpacked) and Transformers. They take turns, A B A B, each time with new prompts; a
figure is the median of turns, a ratio the median of the ratios of neighbours. Files go
to memory (/dev/shm).

    python benchmarks/hidden_states.py --output figures.md
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path += [
    str(HERE.parent / "examples/features/speculative_decoding"),
    str(HERE.parent),
]

from series.stock import find_stock, unpacked  # noqa: E402

# All sides have the same processors: without it vLLM's CPU worker keeps one free in
# some configurations and not in others.
CPUS = sorted(os.sched_getaffinity(0))

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"max_position_embeddings": 65536},
    "150 M": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 65536,
    },
}
# GiB of KV cache that hold 33,024 tokens of each model; stock vLLM keeps the rows
# there, too, and needs more for the larger one.
KV_CACHE = {"tiny": 1, "150 M": 2}
KV_CACHE_STOCK = {"tiny": 1, "150 M": 3}
# Of what a side that ended has said of errors.
LINES_SHOWN = 10
MODES = ["compiled", "eager"]
SIDES = ["plain", "again", "ours", "stock", "transformers"]
# (prompts, their length, output tokens, the part that opts out)
WORKLOADS: dict[str, tuple[int, int, int, float]] = {
    "prefill, 128 of 256": (128, 256, 1, 0),
    "prefill, 32 of 2,048": (32, 2048, 1, 0),
    "prefill, 2,000 of 16": (2000, 16, 1, 0),
    "decode, 16 of 64 output": (16, 16, 64, 0),
    "mixed, half opts out": (128, 256, 1, 0.5),
    "all opt out": (128, 256, 1, 1),
    "one of 32,768": (1, 32768, 1, 0),
}


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="workloads: " + "; ".join(WORKLOADS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--turns", type=int, default=7, help="of each side")
    parser.add_argument(
        "--minutes",
        type=float,
        default=5,
        help="for a workload: no new turn after that, but three there are; where the "
        "one that warms up takes so long already, it is the only one",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="of vLLM"
    )
    parser.add_argument("--only", default="", help="workloads whose name has this")
    parser.add_argument("--skip", help="no workload whose name has this")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the numbers of prompts"
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=SIDES,
        default=SIDES,
    )
    parser.add_argument("--output", type=Path, help="write the table there, and JSON")
    return parser.parse_args()


class Side:
    """A process of `side.py`."""

    def __init__(self, name: str, model: Path, mode: str, num_layers: int):
        layers = [1, num_layers // 2, num_layers - 1, num_layers]
        kv_cache = KV_CACHE_STOCK if name == "stock" else KV_CACHE
        stock = unpacked(find_stock("cpu")) if name == "stock" else None
        storage = Path(tempfile.mkdtemp(prefix=f"bench-{name}-", dir="/dev/shm"))
        command = [
            sys.executable,
            str(HERE / "side.py"),
            "plain" if name == "again" else name,
            str(model),
            str(storage),
        ]
        command += ["--layers", json.dumps(layers), "--max-model-len", "33024"]
        command += ["--eager"] if mode == "eager" else []
        environment = os.environ | {
            "VLLM_CPU_OMP_THREADS_BIND": f"{CPUS[0]}-{CPUS[-1]}",
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache[model.name]),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if stock is not None:
            environment["PYTHONPATH"] = f"{HERE / 'stock_shims'}:{stock}"
        self.name = name
        self._storage = storage
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.about: dict[str, Any] = {}

    def wait_until_up(self) -> None:
        """Until its engine has started."""
        self.about = self._listen()

    def run(self, workload: tuple[int, int, int, float], seed: str) -> dict[str, Any]:
        """Do a workload."""
        prompts, length, max_tokens, opt_out = workload
        order = {
            "prompts": prompts,
            "length": length,
            "max_tokens": max_tokens,
            "opt_out": opt_out,
            "seed": seed,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: so says _listen
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        return self._listen()

    def _listen(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return result
        # By position: its processes may still write, by the same offset.
        size = os.fstat(self._errors.fileno()).st_size
        said = os.pread(self._errors.fileno(), size, 0).decode(errors="replace")
        lines = said.splitlines()
        errors = [line for line in lines if "error" in line.lower()] or lines
        shown = "\n".join(errors[-LINES_SHOWN:])
        raise RuntimeError(f"the side {self.name!r} ended:\n{shown}")

    def stop(self, patience: float) -> None:
        """End it, and wait; kill what has not ended after so many seconds."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            print(f"the side {self.name!r} does not end: killed", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()
        shutil.rmtree(self._storage, ignore_errors=True)


@contextlib.contextmanager
def running(names: list[str], model: Path, mode: str) -> Iterator[dict[str, Side]]:
    """The sides, one started after the other."""
    num_layers = MODELS[model.name].get("num_hidden_layers", 6)
    sides: dict[str, Side] = {}
    patience = 0.0  # for what would go on with a workload in whose middle this ends
    try:
        for name in names:
            sides[name] = Side(name, model, mode, num_layers)
            sides[name].wait_until_up()
            print(
                f"{model.name}, {mode}: {name} is up: {sides[name].about}", flush=True
            )
        yield sides
        patience = 60.0
    finally:
        for side in sides.values():
            side.stop(patience)


def compare(
    sides: dict[str, Side],
    workload: tuple[int, int, int, float],
    turns: int,
    minutes: float,
    title: str,
) -> dict[str, Any]:
    """The figures of each side, and its ratios to the first one."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    start = time.monotonic()
    for turn in range(-1, turns):
        passed = (time.monotonic() - start) / 60
        if (turn == 0 or turn >= 3) and passed > minutes:
            break
        if turn == 0:  # the one before was to warm up
            for warm_up in results.values():
                warm_up.clear()
        # Back and forth, so that no side always comes after the same other.
        order = list(sides) if turn % 2 == 0 else list(reversed(sides))
        for name in order:
            wait_for_quiet()
            result = sides[name].run(workload, f"{title} {turn}")
            results[name].append(result)
        number = f"{turn + 1} of {turns}" if turn >= 0 else "to warm up"
        shown = ", ".join(
            f"{name} {speed(each[-1]):,.0f}/s" for name, each in results.items()
        )
        print(f"{title}: {number}: {shown}", flush=True)
    first = next(iter(sides))
    figures: dict[str, Any] = {}
    for name, turns_of in results.items():
        slowdowns = [
            own["seconds_complete"]
            / other["seconds_complete"]
            * (other["tokens"] / own["tokens"])
            for own, other in zip(turns_of, results[first], strict=True)
        ]
        figures[name] = {
            key: statistics.median(each[key] for each in turns_of)
            for key in turns_of[0]
        } | {
            "turns": len(turns_of),
            "slowdown": statistics.median(slowdowns),
            "lowest": min(slowdowns),
            "highest": max(slowdowns),
        }
    return figures


def wait_for_quiet(seconds: float = 15) -> None:
    """Until the processors are idle: an engine's threads spin on after its work."""
    end = time.monotonic() + seconds
    while psutil.cpu_percent(interval=0.5) > 10 and time.monotonic() < end:
        pass


def speed(result: dict[str, Any]) -> float:
    """Tokens per second until the last file was complete."""
    return float(result["tokens"] / result["seconds_complete"])


def table(results: list[dict[str, Any]]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| model | workload | side | tokens/s | files complete | slowdown "
        "| lowest to highest, turns | CPU s per 1,000 tokens | peak MB | MB written "
        "| response to file, p50 and p99, ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        for side, each in result["figures"].items():
            latency = ""
            if "latency_p50" in each:
                latency = (
                    f"{each['latency_p50'] * 1e3:.1f}, {each['latency_p99'] * 1e3:.1f}"
                )
            lines.append(
                f"| {result['model']}, {result['mode']} | {result['workload']} "
                f"| {side} | {each['tokens'] / each['seconds']:,.0f} "
                f"| {speed(each):,.0f} | {each['slowdown']:.3f} "
                f"| {each['lowest']:.3f} to {each['highest']:.3f}, {each['turns']} "
                f"| {each['cpu_seconds'] / each['tokens'] * 1e3:.3f} "
                f"| {each['peak_bytes'] / 1e6:,.0f} | {each['bytes'] / 1e6:,.1f} "
                f"| {latency} |"
            )
    return "\n".join(lines) + "\n"


def start_up_table(starts: list[dict[str, Any]]) -> str:
    """What each side's engine was like when it had started."""
    lines = [
        "| model | side | start-up, s | KV-cache tokens |",
        "| --- | --- | --- | --- |",
    ]
    for start in starts:
        for side, about in start["sides"].items():
            tokens = about.get("kv_cache_tokens")
            lines.append(
                f"| {start['model']}, {start['mode']} | {side} "
                f"| {about['start_up_seconds']:.1f} "
                f"| {'' if tokens is None else format(tokens, ',')} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = parse_arguments()
    # An end by a signal (of `timeout`, say) is an exception: the sides end, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    from tiny_model import make_tiny_model  # type: ignore[import-not-found]

    results, starts = [], []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for name in arguments.models:
            model = make_tiny_model(Path(folder) / name, **MODELS[name])
            for mode in arguments.modes:
                names = [
                    side
                    for side in arguments.sides
                    # Its modes are vLLM's: once is enough.
                    if side != "transformers" or mode == arguments.modes[0]
                ]
                with running(names, model, mode) as sides:
                    about = {side: each.about for side, each in sides.items()}
                    starts.append({"model": name, "mode": mode, "sides": about})
                    for title, workload in WORKLOADS.items():
                        if arguments.only not in title:
                            continue
                        if arguments.skip and arguments.skip in title:
                            continue
                        count = max(1, round(workload[0] * arguments.scale))
                        used = {
                            side: each
                            for side, each in sides.items()
                            # It generates no output, and would need all of the memory.
                            if side != "transformers"
                            or (
                                workload[2] == 1
                                and workload[1] <= 2048
                                and not workload[3]
                            )
                        }
                        if not used:
                            continue
                        figures = compare(
                            used,
                            (count, *workload[1:]),
                            arguments.turns,
                            arguments.minutes,
                            f"{name}, {mode}, {title}",
                        )
                        results.append(
                            {
                                "model": name,
                                "mode": mode,
                                "workload": title,
                                "prompts": count,
                                "figures": figures,
                            }
                        )
                        # What there is stays, if it ends before the last.
                        report(arguments, results, starts)
    print(f"\n{report(arguments, results, starts)}")


def report(
    arguments: argparse.Namespace,
    results: list[dict[str, Any]],
    starts: list[dict[str, Any]],
) -> str:
    """The tables, also written, with JSON, to where the arguments say."""
    machine = f"{len(CPUS)} CPUs, {platform.machine()}, Python {sys.version.split()[0]}"
    text = (
        f"{table(results)}\n{start_up_table(starts)}\n{machine}; "
        f"up to {arguments.turns} turns of each side; "
        f"numbers of prompts times {arguments.scale:g}.\n"
    )
    if arguments.output:
        arguments.output.write_text(text)
        everything = {"machine": machine, "results": results, "starts": starts}
        arguments.output.with_suffix(".json").write_text(
            json.dumps(everything, indent=1)
        )
    return text


if __name__ == "__main__":
    main()
