# SPDX-License-Identifier: Apache-2.0
"""What the simulation has to say where the answer is known without it."""

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def simulate():
    name = "hidden_states_simulate"
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / "simulate.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture
def machine(simulate):
    """Steps of a second, slots of 1,000 bytes, and no limit."""
    return simulate.Machine(
        prefill=100,
        step_tokens=100,
        pack=math.inf,
        to_host=math.inf,
        write=math.inf,
        per_file=0,
    )


@pytest.fixture
def work(simulate):
    return simulate.Work(bytes_per_token=10, prompt_tokens=50)


def test_without_limits_it_costs_nothing(simulate, machine, work):
    outcome = simulate.simulate(machine, work)
    assert (outcome.slowdown, outcome.waited) == (1, 0)
    assert outcome.binds == "compute"


def test_what_is_beside_costs_its_last_step_alone(simulate, machine, work):
    machine = replace(machine, write=1250, to_host=10_000)  # 0.8 s and 0.1 s a step
    outcome = simulate.simulate(machine, work, num_steps=100)
    assert outcome.slowdown == pytest.approx(1 + 0.9 / 100)
    assert (outcome.waited, outcome.binds) == (0, "compute")


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_a_slow_disk_sets_the_pace(simulate, machine, work, slots):
    machine = replace(machine, write=500, slots=slots)  # 2 s a step
    outcome = simulate.simulate(machine, work, num_steps=1000)
    # A slot is taken after the forward. More slots do not make the disk faster.
    assert outcome.slowdown == pytest.approx(2, rel=0.01)
    assert outcome.binds == "bytes"
    assert outcome.waited > 0.4


def test_files_take_their_threads(simulate, machine, work):
    machine = replace(machine, per_file=8.0, threads=4)  # 2 files: 4 s a step
    outcome = simulate.simulate(machine, work, num_steps=1000)
    assert outcome.slowdown == pytest.approx(4, rel=0.01)
    assert outcome.binds == "files"


def test_on_shared_cores_nothing_is_beside(simulate, machine, work):
    machine = replace(
        machine, pack=10_000, write=5000, per_file=0.1, threads=8, shared_cores=2
    )
    outcome = simulate.simulate(machine, work)
    assert outcome.slowdown == pytest.approx(1 + 0.1 + 0.2 + 2 * 0.1 / 2)


def test_beside_what_was_measured(tmp_path):
    """Its second form, with files as the other benchmarks write them."""
    parts = {
        "num_cpus": 2,
        "pack": [
            {
                "dtypes": "float32 to float32",
                "rows": "prefill, one run",
                "torch": 4.0,
                "pack": 8.0,
            }
        ],
        "writes": [
            {"folder": "/dev/shm", "files": files, "writer": 4.0, "pwrite": 4.0}
            for files in (
                "32 files, 8 steps of 256 rows",
                "512 files, 1 step of 16 rows",
            )
        ],
    }
    plain = {"tokens": 1000, "seconds": 1.0}
    # 8 MB: a millisecond of packing and two of writing, for each second of computing.
    ours = {"files": 10, "bytes": 8e6, "slowdown": 1.25, "lowest": 1, "highest": 2}
    result = {"model": "m", "mode": "eager", "workload": "w"}
    result["figures"] = {"plain": plain, "ours": plain | ours}
    opted_out = result | {"figures": {"plain": plain, "ours": plain | {"files": 0}}}
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    (tmp_path / "bench.json").write_text(json.dumps({"results": [result, opted_out]}))
    command = [sys.executable, str(BENCHMARKS / "simulate.py")]
    command += ["--parts", str(tmp_path / "parts.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "belong together" in done.stderr
    command += ["--measured", str(tmp_path / "bench.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *_, row = done.stdout.strip().splitlines()
    assert row == "| m, eager | w | 1.003 | 1.250 | 1.000 to 2.000 |"
    assert "files | 0" not in done.stdout
