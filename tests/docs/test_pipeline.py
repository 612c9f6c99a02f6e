# SPDX-License-Identifier: Apache-2.0
"""The pipeline's steps are complete, and name what exists."""

import os
import shlex
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="module")
def steps(docs: Any) -> list[dict[str, Any]]:
    text = (docs.ROOT / ".buildkite" / "pipeline.yaml").read_text()
    pipeline = yaml.safe_load(text)
    assert pipeline["group"]
    found: list[dict[str, Any]] = pipeline["steps"]
    return found


def test_steps_are_complete(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        assert step["label"]
        assert step["commands"], step["label"]
        assert step["source_file_dependencies"], step["label"]
        assert step["timeout_in_minutes"] > 0, step["label"]
    keys = [step["key"] for step in steps]
    assert len(set(keys)) == len(keys)
    assert {"lint", "cpu-tests", "gpu-tests", "wheel-cpu", "wheel-cuda"} <= set(keys)


def test_commands_exist(docs: Any, steps: list[dict[str, Any]]) -> None:
    makefile = (docs.ROOT / "Makefile").read_text().splitlines()
    for step in steps:
        for command in step["commands"]:
            program, *arguments = shlex.split(command)
            if program == "make":
                for target in arguments:
                    assert any(line.startswith(f"{target}:") for line in makefile)
            else:
                assert os.access(docs.ROOT / program, os.X_OK), command


def test_sources_exist(docs: Any, steps: list[dict[str, Any]]) -> None:
    for step in steps:
        for path in step["source_file_dependencies"]:
            assert (docs.ROOT / path).exists(), f"{step['label']}: {path}"
            if path.endswith("/"):
                assert (docs.ROOT / path).is_dir(), f"{step['label']}: {path}"
