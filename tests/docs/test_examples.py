# SPDX-License-Identifier: Apache-2.0
"""The example programs run."""

import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = "examples/features/speculative_decoding"
OFFLINE = "examples/offline_inference"


def example(docs: Any, name: str, folder: str = FOLDER) -> list[str]:
    return [sys.executable, str(docs.ROOT / folder / name)]


@pytest.mark.soak
def test_offline_example(docs: Any, runner: Any, tmp_path: Path) -> None:
    """With its own tiny model, and files that stay."""
    command = example(docs, "extract_hidden_states_offline.py")
    command += ["--layers", "6", "0", "--output", str(tmp_path)]
    # In one process, which saves a start.
    output = runner.run(
        command, "the offline example", VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    assert "[9, 2, 128] torch." in output
    assert "layer 0: mean norm" in output
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


@pytest.mark.soak
def test_example_of_requests(docs: Any, runner: Any) -> None:
    command = example(docs, "extract_hidden_states_per_request.py")
    # In one process, which saves a start.
    output = runner.run(
        command, "the example of requests", VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    assert "asked for {}\n  no file" in output
    assert "[9, 3, 128]: rows" in output
    assert "[9, 2, 128]: rows" in output
    assert "[16, 3, 128]: rows" in output


@pytest.mark.soak
def test_example_of_sinks(docs: Any, runner: Any, tiny_model: Any) -> None:
    """In processes of its own, as a user has it: the worker finds the sink."""
    command = example(docs, "extract_hidden_states_elsewhere.py")
    command += ["--model", str(tiny_model), "--enforce-eager"]
    output = runner.run(command, "the example of sinks")
    assert "in the response: (9, 2, 128)" in output
    assert "by the sink: (9, 2, 128), float32" in output


@pytest.mark.soak
def test_last_hidden_states_offline(docs: Any, runner: Any) -> None:
    command = example(docs, "last_hidden_state.py", OFFLINE)
    command.append("--enforce-eager")
    # In one process, which saves a start.
    output = runner.run(command, "the example", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert "a chat: (128,)\n" in output
    assert "an ordinary request: " in output


@pytest.mark.soak
def test_retrieval(docs: Any, runner: Any, tmp_path: Path) -> None:
    """A model with random weights finds nothing; that it comes to its end is shown,
    and that the picture is one."""
    command = example(docs, "last_hidden_state_retrieval.py", OFFLINE)
    plot = tmp_path / "similarity.png"
    output = runner.run(
        [*command, "--enforce-eager", "--plot", str(plot)],
        "the retrieval",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    assert output.count("\n  +0.") + output.count("\n  -0.") == 9
    assert plot.read_bytes().startswith(b"\x89PNG")
