# SPDX-License-Identifier: Apache-2.0
"""`.ci/run` and the demo leave nothing behind."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FAKE_MAKE = """\
#!/bin/bash
# Leaves a process in a session of its own, which holds the output open.
setsid sleep 300 &
echo $! > "$TEST_FOLDER/left"
echo '=== 1 failed, 2 passed in 3.45s ==='
echo 'make: *** [test] Error 1' >&2
exit 2
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    make = tmp_path / "make"
    make.write_text(FAKE_MAKE)
    make.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {
        "PATH": path,
        "TEST_FOLDER": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }


def test_ci_run_ends_with_the_closing_line(
    docs: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [docs.ROOT / ".ci" / "run"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "=== 1 failed, 2 passed in 3.45s ==="
    left = int((tmp_path / "left").read_text())
    assert not is_running(left)
    # It, and not the script's own programs.
    assert re.findall(r"still running, .*", done.stderr) == [
        f"still running, sending TERM to: {left}"
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"left", "make"}


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path leaves room for the engine's sockets (107 bytes)."""
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as path:
        yield Path(path)


def test_demo_cleans_up_after_an_interrupt(docs: Any, short_path: Path) -> None:
    mark = f"DEMO_TEST={short_path}"
    demo = subprocess.Popen(
        [sys.executable, docs.ROOT / "tools" / "demo.py"],
        env=os.environ | {"DEMO_TEST": str(short_path), "TMPDIR": str(short_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # As where a shell has started the tests in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if "without extraction" in line:
            break
    time.sleep(5)  # the engine is on its way up
    assert len(marked(mark)) > 1
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=120)
    assert demo.returncode == 130, output
    assert not marked(mark)
    assert not list(short_path.iterdir())


def marked(mark: str) -> list[int]:
    """Processes that were started with ``mark`` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in variables and is_running(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found
