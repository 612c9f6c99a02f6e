# SPDX-License-Identifier: Apache-2.0
"""The first oracle with the V2 model runner, under Triton's interpreter.

In a process of its own: the stub backend that makes it run on a CPU must stay out of
sight of engines with the V1 runner.
"""

import os
import subprocess
import sys
from pathlib import Path

MODULE = Path(__file__).with_name("test_constant_layers.py")
TESTS = Path(__file__).parents[2]


def test_known_rows_with_the_v2_runner(tmp_path):
    """Eager, as the interpreter runs nothing else; chunked prefill on and off."""
    stub = tmp_path / "triton_cpu_interpreter-0.dist-info"
    stub.mkdir()
    (stub / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: triton-cpu-interpreter\nVersion: 0\n"
    )
    (stub / "entry_points.txt").write_text(
        "[triton.backends]\ncpu = triton_cpu_interpreter\n"
    )
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{TESTS / 'triton_cpu'}",
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    # From the tests' folder: the repository's own vllm/ must not be in the way.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "not compiled", str(MODULE)],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "8 passed" in done.stdout
