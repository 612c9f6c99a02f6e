# SPDX-License-Identifier: Apache-2.0
"""One side of `hidden_states.py`, in a process of its own: an engine that takes orders.

Each line of the standard input is a JSON object, a workload; for each there is one line
of results on the standard output, behind ``RESULT``. Also runs with a stock vLLM.
"""

import argparse
import fcntl
import gc
import json
import os
import random
import shutil
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

EXTRACTING = ("ours", "stock")
# Files of a workload whose time from response to readable file is taken.
NUM_WATCHED = 256


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["plain", "ours", "stock", "transformers"])
    parser.add_argument("model")
    parser.add_argument("storage", type=Path)
    parser.add_argument("--layers", type=json.loads, required=True)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--max-model-len", type=int, default=4096)
    return parser.parse_args()


def make_prompts(count: int, length: int, seed: str) -> list[list[int]]:
    """New ones for each seed: none is in the prefix cache."""
    generator = random.Random(seed)
    return [generator.choices(range(3, 1000), k=length) for _ in range(count)]


class Processes:
    """This process and those below it: what they use."""

    def __init__(self) -> None:
        self._processes = [psutil.Process(), *psutil.Process().children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Of all of them, so far."""
        times = [process.cpu_times() for process in self._processes]
        return float(sum(each.user + each.system for each in times))

    def reset_peak(self) -> None:
        """Begin to look for the largest memory anew."""
        for process in self._processes:
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The most that one of them had resident: the worker."""
        peaks = []
        for process in self._processes:
            status = Path(f"/proc/{process.pid}/status").read_text()
            (line,) = [row for row in status.splitlines() if row.startswith("VmHWM")]
            peaks.append(int(line.split()[1]) * 1024)
        return max(peaks)


def wait_until_readable(path: str) -> float:
    """Sleep until a file is complete; the time at which it was."""
    try:
        with open(f"{path}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
    except FileNotFoundError:
        pass  # complete already, and the lock gone
    wait_until_there(path)
    return time.perf_counter()


def wait_until_there(path: str) -> None:
    """Sleep until a file is shown under its name: complete.

    Raises:
        RuntimeError: if it never will be, with the note that says why.
    """
    while not os.path.exists(path):
        note = Path(f"{path}.error")
        if note.exists():
            raise RuntimeError(f"{path}: {note.read_text().strip()}")
        time.sleep(0.0005)


class Engine:
    """An offline vLLM."""

    def __init__(self, arguments: argparse.Namespace):
        from vllm import LLM

        settings: dict[str, Any] = {}
        if arguments.side in EXTRACTING:
            settings = {
                "speculative_config": {
                    "method": "extract_hidden_states",
                    "num_speculative_tokens": 1,
                    "draft_model_config": {
                        "hf_config": {
                            "eagle_aux_hidden_state_layer_ids": arguments.layers
                        }
                    },
                },
                "kv_transfer_config": {
                    "kv_connector": "ExampleHiddenStatesConnector",
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": {
                        "shared_storage_path": str(arguments.storage)
                    },
                },
            }
        self._side = arguments.side
        self._storage = arguments.storage
        start = time.perf_counter()
        self._llm = LLM(
            model=arguments.model,
            dtype="float32",
            max_model_len=arguments.max_model_len,
            enforce_eager=arguments.eager,
            disable_log_stats=True,
            **settings,
        )
        cache = self._llm.llm_engine.vllm_config.cache_config
        self.about = {
            "start_up_seconds": time.perf_counter() - start,
            "kv_cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        }
        self._processes = Processes()

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do a workload, and say how it went."""
        from vllm import SamplingParams

        prompts = make_prompts(order["prompts"], order["length"], order["seed"])
        opts_out = order.get("opt_out", 0.0)
        engine = self._llm.llm_engine
        self._processes.reset_peak()
        cpu_seconds = self._processes.cpu_seconds()
        start = time.perf_counter()
        for index, prompt in enumerate(prompts):
            wants_none = self._side == "ours" and index < opts_out * len(prompts)
            extra_args = {"kv_transfer_params": {"extract_hidden_states": False}}
            sampling = SamplingParams(
                max_tokens=order["max_tokens"],
                temperature=1,
                ignore_eos=True,
                detokenize=False,
                extra_args=extra_args if wants_none else None,
            )
            engine.add_request(
                f"{order['seed']}-{index}", {"prompt_token_ids": prompt}, sampling
            )
        paths: list[str] = []
        watched = []
        # A client that waits for each file beside the engine takes its processors. One
        # thread: files are complete in the order of the responses, nearly.
        every = max(1, order["prompts"] // NUM_WATCHED)
        with ThreadPoolExecutor(1) as readers:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if not output.finished:
                        continue
                    params = getattr(output, "kv_transfer_params", None) or {}
                    path = params.get("hidden_states_path")
                    if path is not None:
                        if len(paths) % every == 0:
                            answered = time.perf_counter()
                            readable = readers.submit(wait_until_readable, path)
                            watched.append((answered, readable))
                        paths.append(path)
            generated = time.perf_counter()
            # Ours is not there before it is complete; stock vLLM's is, and locked: to
            # open and lock 2,000 of them takes some 10 ms more.
            wait = wait_until_there if self._side == "ours" else wait_until_readable
            for path in paths:
                wait(path)
            completed = time.perf_counter()
            latencies = [readable.result() - answered for answered, readable in watched]
        written = sum(os.path.getsize(path) for path in paths)
        tokens = order["prompts"] * (order["length"] + order["max_tokens"] - 1)
        result = {
            "tokens": tokens,
            "seconds": generated - start,
            "seconds_complete": completed - start,
            "cpu_seconds": self._processes.cpu_seconds() - cpu_seconds,
            "peak_bytes": self._processes.peak_bytes(),
            "bytes": written,
            "files": len(paths),
        }
        if latencies:
            result["latency_p50"] = statistics.median(latencies)
            result["latency_p99"] = sorted(latencies)[int(0.99 * (len(latencies) - 1))]
        for path in self._storage.iterdir():
            path.unlink(missing_ok=True)
        return result

    def stop(self) -> None:
        """End the engine's processes."""
        self._llm.llm_engine.engine_core.shutdown()


class Transformers:
    """The same without vLLM: `output_hidden_states=True`, eight prompts at once."""

    def __init__(self, arguments: argparse.Namespace):
        import torch
        from transformers import AutoModelForCausalLM

        start = time.perf_counter()
        self._torch = torch
        self._layers = arguments.layers
        self._storage = arguments.storage
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype="float32"
        )
        self.about = {"start_up_seconds": time.perf_counter() - start}
        self._processes = Processes()

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do a workload, and say how it went."""
        from safetensors.torch import save_file

        prompts = make_prompts(order["prompts"], order["length"], order["seed"])
        self._processes.reset_peak()
        cpu_seconds = self._processes.cpu_seconds()
        written = 0
        start = time.perf_counter()
        for first in range(0, len(prompts), 8):
            batch = self._torch.tensor(prompts[first : first + 8])
            with self._torch.inference_mode():
                states = self._model(batch, output_hidden_states=True).hidden_states
            rows = self._torch.stack([states[k] for k in self._layers], dim=2)
            for index, tokens in enumerate(batch):
                path = self._storage / f"{first + index}.safetensors"
                save_file(
                    {"hidden_states": rows[index].clone(), "token_ids": tokens.clone()},
                    path,
                )
                written += path.stat().st_size
        seconds = time.perf_counter() - start
        for path in self._storage.iterdir():
            path.unlink()
        return {
            "tokens": order["prompts"] * order["length"],
            "seconds": seconds,
            "seconds_complete": seconds,
            "cpu_seconds": self._processes.cpu_seconds() - cpu_seconds,
            "peak_bytes": self._processes.peak_bytes(),
            "bytes": written,
            "files": len(prompts),
        }

    def stop(self) -> None:
        """Nothing to end."""


def say(result: dict[str, Any]) -> None:
    """One line, which the engine's own output cannot be taken for."""
    print(f"RESULT {json.dumps(result)}", flush=True)


def main() -> None:
    arguments = parse_arguments()
    arguments.storage.mkdir(parents=True, exist_ok=True)
    make = Transformers if arguments.side == "transformers" else Engine
    side: Engine | Transformers = make(arguments)
    # As vLLM's server does when it is up: a full collection here takes 0.4 s.
    gc.collect()
    gc.freeze()
    say(side.about)
    try:
        for line in sys.stdin:
            say(side.run(json.loads(line)))
    finally:
        side.stop()
        shutil.rmtree(arguments.storage, ignore_errors=True)


if __name__ == "__main__":
    main()
