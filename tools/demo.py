# SPDX-License-Identifier: Apache-2.0
"""Extracts hidden states offline and online, and compares them with Transformers.

    make demo

Makes a tiny model, runs a few sentences through ``LLM(...)`` and through ``vllm
serve``, and shows what was extracted in one table. Ends with status 1 where a value
differs from Transformers' by more than ``TOLERANCE`` or extraction costs KV cache.
Everything is made in one temporary directory, which goes at the end, as do the
processes; also after Ctrl-C.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "features" / "speculative_decoding"

PROMPTS = [
    "A river starts as rain on a hill.",
    "In the harbour town the bakers get up at three.",
    "The fishermen buy theirs on the way to the boats, and eat it on the water.",
    "No drop of it knows where the sea is, and still the whole of it arrives. " * 8,
]
# The embeddings, two layers, and the last layer's output; not in their order.
LAYERS = [0, 6, 2, 4]
# Of float32 sums of these lengths, done in another order.
TOLERANCE = 1e-4

ENGINE = {
    "dtype": "float32",
    "max_model_len": 1024,
    # The longest sentence takes several steps.
    "max_num_batched_tokens": 64,
    # To compile a tiny model takes longer than to run it.
    "enforce_eager": True,
}
SPECULATIVE_CONFIG = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
}

START_TIMEOUT = 600.0
STOP_TIMEOUT = 30.0
LOG_LINES = 40

# Where the output is no terminal rich takes 80 columns, which folds the table.
console = Console(width=None if sys.stdout.isatty() else 130, highlight=False)


class DemoError(RuntimeError):
    """The demo cannot go on, and the message says why."""


@dataclass
class Extracted:
    """One request's file."""

    way: str
    prompt: str
    token_ids: list[int]
    path: str


class Child:
    """A process of the demo, with what it starts, and a log of what they say."""

    def __init__(self, name: str, command: list[str], folder: Path):
        self.name = name
        self.log = folder / f"{name}.log"
        scratch = folder / "tmp"
        scratch.mkdir(exist_ok=True)
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(scratch),
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with self.log.open("w") as log:
            # A session of its own: Ctrl-C reaches the demo alone, which ends it.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until it has done its work."""
        try:
            status = self.process.wait(START_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.fail(f"did not end within {START_TIMEOUT:.0f} s")
        if status != 0:
            self.fail(f"ended with status {status}")

    def fail(self, reason: str) -> NoReturn:
        """Show the end of the log, and give up."""
        text = self.log.read_text(errors="replace")
        console.rule(f"the last lines of {self.name}'s log")
        console.print(escape("\n".join(text.splitlines()[-LOG_LINES:])))
        console.rule()
        raise DemoError(f"{self.name} {reason}")

    def stop(self) -> None:
        """End it and all that it started."""
        group = self.process.pid
        if self.process.poll() is None:
            self.process.terminate()  # it ends its own children in order
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
                deadline = time.monotonic() + STOP_TIMEOUT / 6
                while time.monotonic() < deadline:
                    self.process.poll()
                    os.killpg(group, 0)  # raises once the last is gone
                    time.sleep(0.1)


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Say what is being done while it is, and how long it took."""
    started = time.monotonic()
    if not console.is_terminal:
        console.print(f"     {title} ...")
    with console.status(title):
        yield
    console.print(f"[green]done[/] {title} ({time.monotonic() - started:.0f} s)")


@contextlib.contextmanager
def running(name: str, command: list[str], folder: Path) -> Iterator[Child]:
    """A child that is gone at the end, however that comes."""
    child = Child(name, command, folder)
    try:
        yield child
    finally:
        # A second Ctrl-C must not leave half of it.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            child.stop()
        finally:
            signal.signal(signal.SIGINT, handler)


def kv_transfer_config(files: Path) -> dict[str, Any]:
    """The connector that writes hidden states to ``files``."""
    return {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(files)},
    }


def run_offline(name: str, engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the prompts through ``LLM(**engine)``; returns demo_engine.py's result."""
    task, result = folder / f"{name}-task.json", folder / f"{name}-result.json"
    task.write_text(json.dumps({"engine": engine, "prompts": PROMPTS}))
    command = [sys.executable, str(ROOT / "tools" / "demo_engine.py")]
    with running(name, [*command, str(task), str(result)], folder) as child:
        child.wait()
    answer: dict[str, Any] = json.loads(result.read_text())
    return answer


def hidden_states_path(params: dict[str, Any] | None) -> str:
    """The path in a request's ``kv_transfer_params``."""
    if not params or "hidden_states_path" not in params:
        raise DemoError(f"a request got no hidden states: {params}")
    path: str = params["hidden_states_path"]
    return path


def extract_offline(model: Path, folder: Path) -> tuple[list[Extracted], int]:
    """The prompts' files by ``LLM(...)``, and the size of the KV cache in tokens."""
    engine = {
        "model": str(model),
        **ENGINE,
        "speculative_config": SPECULATIVE_CONFIG,
        "kv_transfer_config": kv_transfer_config(folder / "offline"),
    }
    result = run_offline("offline-engine", engine, folder)
    extracted = [
        Extracted(
            "offline",
            prompt,
            request["token_ids"],
            hidden_states_path(request["kv_transfer_params"]),
        )
        for prompt, request in zip(PROMPTS, result["requests"], strict=True)
    ]
    return extracted, result["kv_cache_tokens"]


def serve_command(model: Path, files: Path, port: int) -> list[str]:
    """The command line of the server."""
    # The command of the environment that this runs in, whatever PATH says.
    vllm = Path(sys.executable).with_name("vllm")
    command = (
        [str(vllm)]
        if vllm.exists()
        else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    )
    command += ["serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    for option, value in ENGINE.items():
        command.append(f"--{option.replace('_', '-')}")
        if value is not True:
            command.append(str(value))
    command += ["--speculative-config", json.dumps(SPECULATIVE_CONFIG)]
    command += ["--kv-transfer-config", json.dumps(kv_transfer_config(files))]
    return command


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until_healthy(server: Child, port: int) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            server.fail(f"ended with status {server.process.returncode}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            url = f"http://127.0.0.1:{port}/health"
            with urllib.request.urlopen(url, timeout=5):
                return
        time.sleep(0.5)
    server.fail(f"did not answer within {START_TIMEOUT:.0f} s")


def request_online(model: Path, port: int) -> list[Extracted]:
    """The prompts' files from the served model, by OpenAI's client."""
    from openai import OpenAI

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY")
    extracted = []
    for prompt in PROMPTS:
        completion: Any = client.completions.create(
            model=str(model),
            prompt=prompt,
            max_tokens=1,
            extra_body={"return_token_ids": True},
        )
        extracted.append(
            Extracted(
                "online",
                prompt,
                completion.choices[0].prompt_token_ids,
                hidden_states_path(completion.kv_transfer_params),
            )
        )
    return extracted


def kv_cache_tokens(log: Path) -> int:
    """The size of the KV cache that an engine has logged."""
    found = re.search(r"KV cache size: ([\d,]+) tokens", log.read_text())
    if found is None:
        raise DemoError(f"{log.name} names no KV cache size")
    return int(found[1].replace(",", ""))


def reference_states(model: Any, token_ids: list[int]) -> "torch.Tensor":
    """What Transformers computes.

    Takes each layer's input where it enters: the entries of Transformers'
    ``output_hidden_states`` differ in meaning between families, and the last one is
    after the final norm.

    Returns:
        ``[num_tokens, len(LAYERS), H]``
    """
    import torch

    decoder = model.model
    # What leaves the last layer enters the final norm.
    modules = [*decoder.layers, decoder.norm]
    seen: dict[int, torch.Tensor] = {}

    def hook_for(layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = args[0] if args else kwargs["hidden_states"]  # [1, num_tokens, H]
            seen[layer] = states[0].detach()

        return hook

    handles = [
        modules[layer].register_forward_pre_hook(hook_for(layer), with_kwargs=True)
        for layer in LAYERS
    ]
    try:
        with torch.inference_mode():
            model(torch.tensor([token_ids]))
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([seen[layer] for layer in LAYERS], dim=1)


def compare(model: Path, extracted: list[Extracted]) -> tuple[Table, float]:
    """The demo's table, and the largest difference in it."""
    import torch
    from transformers import AutoModelForCausalLM

    from vllm.distributed.kv_transfer.kv_connector.v1 import (
        example_hidden_states_connector as connector,
    )

    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference.eval()
    expected = {
        tuple(one.token_ids): reference_states(reference, one.token_ids)
        for one in extracted
    }
    table = Table(title="hidden states of a tiny Qwen3, float32, and Transformers'")
    table.add_column("way", no_wrap=True)
    table.add_column("prompt", max_width=24, no_wrap=True)
    for heading in ("tokens", "layers", "shape"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("file (.safetensors)", overflow="fold")
    table.add_column("largest\ndifference", justify="right", no_wrap=True)
    largest = 0.0
    for one in extracted:
        tensors = connector.load_hidden_states(one.path, timeout=60)
        states = tensors["hidden_states"]  # [num_tokens, len(LAYERS), H]
        if tensors["token_ids"].tolist() != one.token_ids:
            raise DemoError(f"{one.path} has other token ids than its request")
        want = expected[tuple(one.token_ids)]
        if states.shape != want.shape:
            raise DemoError(f"{one.path} is {states.shape}, and should be {want.shape}")
        # NaN must not pass as a small difference.
        difference = (states - want).abs().nan_to_num(nan=float("inf")).max().item()
        largest = max(largest, difference)
        table.add_row(
            one.way,
            escape(one.prompt),
            str(len(one.token_ids)),
            ", ".join(map(str, LAYERS)),
            " x ".join(map(str, states.shape)),
            Path(one.path).stem,
            f"{difference:.1e}",
            style=None if difference <= TOLERANCE else "red",
        )
    return table, largest


def demo(folder: Path) -> bool:
    """Returns whether everything is as it should be."""
    with step("making a tiny Qwen3 with random weights"):
        sys.path.insert(0, str(EXAMPLES))
        from tiny_model import make_tiny_model  # type: ignore[import-not-found]

        # Its loading bars would break into the steps.
        from transformers.utils import logging

        disable_progress_bar: Any = logging.disable_progress_bar
        disable_progress_bar()
        model = make_tiny_model(folder / "tiny-qwen3")
    with step("offline: LLM(...) without extraction, for the size of its KV cache"):
        plain = run_offline("plain-engine", {"model": str(model), **ENGINE}, folder)
    with step(f"offline: LLM(...) extracts layers {LAYERS} of {len(PROMPTS)} prompts"):
        extracted, offline_tokens = extract_offline(model, folder)
    port = free_port()
    command = serve_command(model, folder / "online", port)
    with running("server", command, folder) as server:
        with step(f"online: vllm serve starts on port {port}"):
            wait_until_healthy(server, port)
        with step(f"online: {len(PROMPTS)} requests by OpenAI's client"):
            extracted += request_online(model, port)
        online_tokens = kv_cache_tokens(server.log)
        with step("comparing every value with Transformers"):
            table, largest = compare(model, extracted)
        with step("stopping the server"):
            server.stop()
    without = plain["kv_cache_tokens"]
    console.print()
    console.print(table)
    console.print(
        f"KV cache: {without:,} tokens without extraction, {offline_tokens:,} with "
        f"(offline), {online_tokens:,} with (online)"
    )
    is_close = largest <= TOLERANCE
    is_free = min(offline_tokens, online_tokens) >= without
    console.print(
        f"largest difference {largest:.1e}, allowed {TOLERANCE:.0e}: "
        f"{'good' if is_close else '[red]too large[/]'}"
    )
    if not is_free:
        console.print("[red]extraction has made the KV cache smaller[/]")
    return is_close and is_free


def _terminated(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    # A shell that starts us in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    folder = Path(tempfile.mkdtemp(prefix="hidden-states-demo-"))
    # torch makes this when it is imported, beside us where nothing says otherwise.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    try:
        return 0 if demo(folder) else 1
    except DemoError as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything is cleaned up")
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
