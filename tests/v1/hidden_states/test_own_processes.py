# SPDX-License-Identifier: Apache-2.0
"""The first oracle where it needs a process of its own.

- With the V2 model runner, under Triton's interpreter: the stub backend that makes it
  run on a CPU must stay out of sight of engines with the V1 runner.
- Beside ngram speculation: it imports numba, and with that in the process stock vLLM
  cannot start another engine on a CPU (its scan for Triton kernels trips over it).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = Path(__file__).with_name("test_constant_layers.py")
TESTS = Path(__file__).parents[2]


@pytest.fixture
def run_module(tmp_path):
    def run(selection: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-k", selection, str(MODULE)],
            cwd=TESTS.parent,
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        return done.stdout

    return run


def test_known_rows_with_the_v2_runner(run_module, tmp_path):
    """Eager, as the interpreter runs nothing else, and slowly: what is quick."""
    stub = tmp_path / "triton_cpu_interpreter-0.dist-info"
    stub.mkdir()
    (stub / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: triton-cpu-interpreter\nVersion: 0\n"
    )
    (stub / "entry_points.txt").write_text(
        "[triton.backends]\ncpu = triton_cpu_interpreter\n"
    )
    output = run_module(
        "not compiled and not preemption and not 32 and not outgrow",
        PYTHONPATH=f"{tmp_path}:{TESTS / 'triton_cpu'}",
        TRITON_INTERPRET="1",
        VLLM_USE_V2_MODEL_RUNNER="1",
    )
    assert "6 passed" in output


def test_known_rows_beside_ngram_speculation(run_module):
    assert "5 passed" in run_module("ngram", ONLY_NGRAM="1")
