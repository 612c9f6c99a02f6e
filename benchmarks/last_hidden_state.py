# SPDX-License-Identifier: Apache-2.0
"""What the last hidden state costs: one-token requests with the flag and without.

At the engine and over HTTP, for a tiny model (nothing to hide behind) and for a hidden
size of 4,096; and against a pooling engine of the same model, which is what one would
run otherwise. All sides of a comparison run in turns in one run, each time with new
prompts; a figure is the median of the ratios of neighbours.

    python benchmarks/last_hidden_state.py --output figures.md
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples/features/speculative_decoding"))
# Every side on the same processors: without it vLLM's CPU worker keeps one free in
# some configurations and not in others.
CPUS = sorted(os.sched_getaffinity(0))
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"{CPUS[0]}-{CPUS[-1]}")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

MODELS: dict[str, dict[str, Any]] = {
    "tiny, hidden size 128": {},
    "one layer, hidden size 4,096": {
        "hidden_size": 4096,
        "intermediate_size": 4096,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
FLOAT = {"return_last_hidden_state": True}
BASE64 = FLOAT | {"encoding_format": "base64"}
SIDES = {"without": None, "list of numbers": FLOAT, "base64": BASE64}
VOCAB = range(3, 1000)
ENGINE: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 64, "dtype": "float32"}


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=2.0, help="about, of a turn")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--clients", type=int, default=32, help="at once, over HTTP")
    parser.add_argument("--only", default="", help="models whose title has this text")
    parser.add_argument("--output", type=Path, help="write the table there, and JSON")
    return parser.parse_args()


class Prompts:
    """New random prompts, so that none is in the prefix cache."""

    def __init__(self, length: int):
        self._length = length
        self._random = random.Random(0)

    def take(self, count: int) -> list[list[int]]:
        return [
            [self._random.choice(VOCAB) for _ in range(self._length)]
            for _ in range(count)
        ]


Run = Callable[[list[list[int]]], None]


def compare(
    sides: dict[str, Run], arguments: argparse.Namespace, title: str
) -> dict[str, Any]:
    """Requests per second of each side, in turns, and ratios to the first one."""
    prompts = Prompts(arguments.prompt_tokens)
    count = 32
    for run in sides.values():  # warm up
        run(prompts.take(count))
    started = time.perf_counter()
    next(iter(sides.values()))(prompts.take(count))
    per_request = (time.perf_counter() - started) / count
    count = max(count, int(arguments.seconds / per_request))
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(arguments.rounds):
        # Back and forth, so that no side always comes after the same other.
        order = list(sides) if turn % 2 == 0 else list(reversed(sides))
        for name in order:
            batch = prompts.take(count)
            started = time.perf_counter()
            sides[name](batch)
            rates[name].append(count / (time.perf_counter() - started))
        shown = ", ".join(f"{name} {rates[name][-1]:.0f}/s" for name in sides)
        print(f"{title}: {turn + 1} of {arguments.rounds}: {shown}", flush=True)
    first = next(iter(sides))
    result: dict[str, Any] = {}
    for name in sides:
        ratios = [a / b for a, b in zip(rates[name], rates[first], strict=True)]
        result[name] = {
            "requests_per_second": statistics.median(rates[name]),
            "ratio": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
    return result


@contextlib.contextmanager
def engine(model: str, **settings: Any) -> Iterator[Any]:
    """An offline engine in processes of its own, as users have it."""
    from vllm import LLM

    llm = LLM(model=model, disable_log_stats=True, **ENGINE, **settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def measure_engine(model: str, arguments: argparse.Namespace, title: str) -> Any:
    """The flag's cost at the engine, then a pooling engine beside."""
    from vllm import SamplingParams

    def generate(llm: Any, options: Any) -> Run:
        extra_args = {"kv_transfer_params": options} if options else None
        sampling = SamplingParams(
            max_tokens=1, temperature=0, detokenize=False, extra_args=extra_args
        )

        def run(prompts: list[list[int]]) -> None:
            inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(inputs, sampling, use_tqdm=False)
            assert bool(outputs[0].kv_transfer_params) == bool(options)

        return run

    def embed(pooler: Any) -> Run:
        def run(prompts: list[list[int]]) -> None:
            inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
            pooler.embed(inputs, use_tqdm=False)

        return run

    with engine(model) as llm:
        sides = {name: generate(llm, options) for name, options in SIDES.items()}
        result = compare(sides, arguments, f"engine, {title}")
        with engine(model, runner="pooling", convert="embed") as pooler:
            pair = {
                "a pooling engine": embed(pooler),
                "base64": generate(llm, BASE64),
            }
            against = compare(pair, arguments, f"pooling engine, {title}")
    return {"engine": result, "against a pooling engine": against}


@contextlib.contextmanager
def server(model: str) -> Iterator[str]:
    """``vllm serve``; its address."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--port", str(port), "--disable-uvicorn-access-log"]
    for name, value in ENGINE.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        url = f"http://localhost:{port}"
        while process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            time.sleep(0.5)
        else:
            raise RuntimeError("the server did not come up")
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure_http(model: str, arguments: argparse.Namespace, title: str) -> Any:
    """The flag's cost over HTTP, the client's parsing included."""
    import httpx

    def ask(url: str, options: Any) -> Run:
        async def one(client: Any, prompts: list[list[int]]) -> None:
            while prompts:
                body: dict[str, Any] = {
                    "model": model,
                    "prompt": prompts.pop(),
                    "max_tokens": 1,
                    "temperature": 0,
                }
                if options:
                    body["kv_transfer_params"] = options
                response = await client.post(f"{url}/v1/completions", json=body)
                assert response.status_code == 200, response.text
                params = json.loads(response.content).get("kv_transfer_params")
                assert bool(params) == bool(options)

        async def everything(prompts: list[list[int]]) -> None:
            limits = httpx.Limits(max_connections=arguments.clients)
            async with httpx.AsyncClient(timeout=600, limits=limits) as client:
                await asyncio.gather(
                    *(one(client, prompts) for _ in range(arguments.clients))
                )

        return lambda prompts: asyncio.run(everything(list(prompts)))

    with server(model) as url:
        sides = {name: ask(url, options) for name, options in SIDES.items()}
        return compare(sides, arguments, f"HTTP, {title}")


def table(results: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| model | where | requests | per second | ratio | lowest to highest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model, places in results.items():
        for place, sides in places.items():
            for side, figures in sides.items():
                lines.append(
                    f"| {model} | {place} | {side} "
                    f"| {figures['requests_per_second']:,.0f} "
                    f"| {figures['ratio']:.3f} "
                    f"| {figures['lowest']:.3f} to {figures['highest']:.3f} |"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = parse_arguments()
    from tiny_model import make_tiny_model  # type: ignore[import-not-found]

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="last-hidden-state-") as folder:
        for number, (title, overrides) in enumerate(MODELS.items()):
            if arguments.only not in title:
                continue
            path = str(make_tiny_model(Path(folder) / str(number), **overrides))
            results[title] = measure_engine(path, arguments, title)
            results[title]["HTTP"] = measure_http(path, arguments, title)
    machine = f"{len(CPUS)} CPUs, {platform.machine()}, Python {sys.version.split()[0]}"
    text = f"{table(results)}\n{machine}; {arguments.prompt_tokens} prompt tokens.\n"
    print(f"\n{text}")
    if arguments.output:
        arguments.output.write_text(text)
        figures = {"machine": machine, "results": results}
        arguments.output.with_suffix(".json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
