# SPDX-License-Identifier: Apache-2.0
"""An API server in a process of its own, for tests that need a whole one."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_TIMEOUT = 480.0


class Server:
    """A running ``vllm serve``; every process of it is in its session."""

    def __init__(self, process: "subprocess.Popen[Any]", port: int, log: Path):
        self.process = process
        self.port = port
        self.log = log

    def get(self, path: str) -> str:
        """The body of a GET request."""
        with urllib.request.urlopen(self._url(path), timeout=60) as response:
            return str(response.read().decode())

    def complete(self, token_ids: list[int], **options: Any) -> dict[str, Any]:
        """The response to a completion request of one prompt.

        Args:
            token_ids: The prompt.
            options: ``headers``, and fields of the request.
        """
        headers = options.pop("headers", {})
        fields = {"prompt": token_ids, "max_tokens": 1, "temperature": 0} | options
        request = urllib.request.Request(
            self._url("/v1/completions"),
            json.dumps(fields).encode(),
            {"Content-Type": "application/json", **headers},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return dict(json.load(response))

    def kill(self) -> None:
        """As by ``kill -9``: nothing is tidied up."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _url(self, path: str) -> str:
        return f"http://localhost:{self.port}{path}"

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            time.sleep(0.2)
        raise AssertionError(f"no server came up:\n{self.log.read_text()[-6000:]}")


@contextlib.contextmanager
def serving(
    model: str, folder: Path, *options: str, **variables: str
) -> Iterator[Server]:
    """``vllm serve`` with small settings, until it is no longer needed.

    Args:
        model: A checkpoint with a tokenizer.
        folder: For the log.
        options: Of the command.
        variables: Of the environment, beside the tests' own.
    """
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = int(listener.getsockname()[1])
    log = folder / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "1024"]
    command += ["--max-num-batched-tokens", "64", "--max-num-seqs", "16", *options]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, port, log)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        server.kill()


def bind_threads(num_workers: int) -> dict[str, str]:
    """The variable by which vLLM's CPU workers share the processors there are.

    By itself it gives each worker a NUMA node, and fails where there are too few.
    """
    cpus = sorted(os.sched_getaffinity(0))
    bound = [str(cpus[worker % len(cpus)]) for worker in range(num_workers)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(bound)}
