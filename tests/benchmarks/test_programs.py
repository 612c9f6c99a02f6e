# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' programs: what they say where they cannot run."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)


@pytest.mark.parametrize(
    "program", sorted(path.name for path in BENCHMARKS.glob("*.py"))
)
def test_each_says_what_it_does(program):
    done = run(program, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_the_one_for_a_gpu_says_what_it_needs():
    done = run("gpu.py")
    assert done.returncode == 1
    assert "needs a CUDA device, torch and Triton" in done.stderr
    assert "finds no CUDA device" in done.stderr


def test_a_benchmark_that_is_ended_ends_its_sides():
    """They would compute on, beside whatever is measured next."""
    command = [sys.executable, "hidden_states.py", "--models", "tiny"]
    command += ["--sides", "transformers"]
    before = set(Path("/dev/shm").glob("bench-transformers-*"))
    program = subprocess.Popen(
        command, cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout is not None
        assert any("transformers is up" in line for line in program.stdout)
        sides = psutil.Process(program.pid).children(recursive=True)
        assert sides
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 128 + signal.SIGTERM
    finally:
        program.kill()
        program.wait()
        program.stdout.close()
    _, alive = psutil.wait_procs(sides, timeout=10)
    assert not alive
    assert set(Path("/dev/shm").glob("bench-transformers-*")) <= before


def test_a_side_that_cannot_start_says_why(tmp_path):
    model = tmp_path / "tiny"
    model.mkdir()
    program = (
        "import pathlib, hidden_states as benchmark\n"
        f"model = pathlib.Path({str(model)!r})\n"
        "with benchmark.running(['transformers'], model, 'eager'):\n"
        "    print('it is up')\n"
    )
    done = run("-c", program)
    assert done.returncode == 1
    said = done.stderr.partition("the side 'transformers' ended:")[2]
    assert "config.json" in said
    assert "it is up" not in done.stdout
