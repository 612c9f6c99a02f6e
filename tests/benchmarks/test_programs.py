# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' programs: what they say where they cannot run."""

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


def test_a_side_that_dies_between_workloads_says_why(tmp_path):
    program = (
        "import pathlib, hidden_states as benchmark, tiny_model\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "model = tiny_model.make_tiny_model(folder / 'tiny')\n"
        "with benchmark.running(['transformers'], model, 'eager') as sides:\n"
        "    print('it is up')\n"
        "    sides['transformers'].run((1, 'sixteen', 1, 0), 'seed')\n"
    )
    done = run("-c", program)
    assert done.returncode == 1
    assert "it is up" in done.stdout
    said = done.stderr.partition("the side 'transformers' ended:")[2]
    assert "TypeError" in said


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = BENCHMARKS / "hidden_states.py"
    spec = importlib.util.spec_from_file_location("benchmark_hidden_states", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "wait_for_quiet", lambda: None)
    return module


@pytest.mark.parametrize(
    ("minutes", "seeds"),
    [
        (60.0, ["-1", "0", "1", "2", "3"]),  # all turns that are asked for
        (0.030, ["-1", "0", "1", "2"]),  # three there are
        (0.001, ["-1"]),  # what was to warm up has taken all of the time
    ],
)
def test_how_many_turns_there_are(benchmark, monkeypatch, minutes, seeds):
    """A turn of the two sides takes a second, by a clock of the test."""
    now = 0.0
    seen = []

    def run(workload, seed):
        nonlocal now
        now += 0.5
        seen.append(seed.removeprefix("title "))
        seconds = 2.0 if seed.endswith("-1") and len(seeds) > 1 else 1.0
        return {"seconds_complete": seconds, "tokens": 10}

    monkeypatch.setattr(benchmark, "time", SimpleNamespace(monotonic=lambda: now))
    sides = {"plain": SimpleNamespace(run=run), "ours": SimpleNamespace(run=run)}
    figures = benchmark.compare(sides, (1, 1, 1, 0), 4, minutes, "title")
    assert seen == [seed for seed in seeds for _ in sides]
    num_turns = max(1, len(seeds) - 1)
    for figure in figures.values():
        assert figure["turns"] == num_turns
        assert figure["seconds_complete"] == 1  # the one that warmed up is not in it
