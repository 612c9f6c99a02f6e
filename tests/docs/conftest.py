# SPDX-License-Identifier: Apache-2.0
"""The pages' code blocks, and what they need to run here.

Blocks run as they are written but for three things, which are replaced in their text:
the model (the tests' tiny one), the server's port, and the directory of the files.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAST_PAGE = "docs/features/last_hidden_state.md"
FEATURE_PAGE = "docs/features/speculative_decoding/extract_hidden_states.md"

MODEL = "Qwen/Qwen3-0.6B"
ADDRESS = "localhost:8000"
FILES = "/tmp/hidden_states"

START_TIMEOUT = 420.0


@dataclass
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Paths of all pages, below the root."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def read_blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    blocks = []
    block: Block | None = None
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if block is not None:
            if line == "```":
                blocks.append(block)
                block = None
            else:
                block.text += f"{line}\n"
        elif line.startswith("```"):
            block = Block(page, number, line.removeprefix("```"), "")
    assert block is None, f"{block} is not closed"
    return blocks


class Runner:
    """Runs blocks and programs in a directory, with the installed vLLM."""

    def __init__(self, model: str, folder: Path):
        self.model = model
        self.folder = folder
        self.files = folder / "hidden_states"
        self.port = _free_port()

    def localized(self, text: str) -> str:
        """The text of a block, for here."""
        for written, here in (
            (MODEL, self.model),
            (ADDRESS, f"localhost:{self.port}"),
            (FILES, str(self.files)),
        ):
            text = text.replace(written, here)
        return text

    def environment(self) -> dict[str, str]:
        """Has the ``vllm`` command of the interpreter that runs the tests.

        Nothing is compiled: other tests do that, and each program would take half a
        minute for it.
        """
        binaries = Path(sys.executable).parent
        return os.environ | {
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_USE_AOT_COMPILE": "0",
        }

    def run_python(self, block: Block, **variables: str) -> str:
        """Run a block as a program; returns its standard output."""
        name = f"{Path(block.page).stem}_{block.line}.py"
        script = self.folder / name
        script.write_text(self.localized(block.text), encoding="utf-8")
        return self.run([sys.executable, str(script)], str(block), **variables)

    def run(self, command: list[str], name: str, **variables: str) -> str:
        """Run a command to its end; returns its standard output."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment() | variables,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT,
        )
        assert done.returncode == 0, f"{name} failed:\n{done.stderr[-6000:]}"
        return done.stdout

    @contextlib.contextmanager
    def serving(self, block: Block) -> Iterator[None]:
        """Run a block that serves, until it is no longer needed."""
        command = f"exec {self.localized(block.text).rstrip()} --port {self.port}"
        log = self.folder / "server.log"
        with log.open("w") as output:
            server = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(server, log)
            yield
        finally:
            end_session(server)

    def _wait_until_healthy(self, server: "subprocess.Popen[Any]", log: Path) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while server.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.URLError, OSError):
                url = f"http://localhost:{self.port}/health"
                with urllib.request.urlopen(url, timeout=5):
                    return
            time.sleep(0.5)
        pytest.fail(f"the server did not come up:\n{log.read_text()[-6000:]}")


def end_session(leader: "subprocess.Popen[Any]") -> None:
    """End a process that leads a session, and all in its group."""
    leader.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        leader.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def docs() -> Any:
    """This module's names, for the tests beside it."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def runner(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Shared, so that one block's files are there for another."""
    return Runner(tiny_model, tmp_path_factory.mktemp("docs"))


# Not for the session: it would take processors from all tests that come later.
@pytest.fixture(scope="module")
def server(runner: Runner) -> Iterator[Runner]:
    """The server that the feature's page starts."""
    [block] = [b for b in read_blocks(FEATURE_PAGE) if b.language == "bash"]
    with runner.serving(block):
        yield runner


def read_table(page: str, mark: str) -> list[list[str]]:
    """The rows of the table under ``<!-- checked: MARK -->``, without its head."""
    text = (ROOT / page).read_text(encoding="utf-8")
    _, found, rest = text.partition(f"<!-- checked: {mark} -->\n")
    assert found, f"{page} has no table marked {mark!r}"
    rows = []
    for line in rest.splitlines():
        if not line.startswith("|"):
            break
        rows.append([re.sub("`", "", cell).strip() for cell in line.split("|")[1:-1]])
    return rows[2:]
