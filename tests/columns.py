# SPDX-License-Identifier: Apache-2.0
"""The columns of the table of scenarios, and the processes that their tests need.

A test that uses the fixture ``column`` runs once in each column: the V1 and the V2
model runner, eager and compiled. With the marker ``scenario("row")`` it fills the
row's cells of the table in docs/design/scenarios.md, which is generated from the
collected tests (tools/scenarios.py).

Engines run in the test's own process, but for two kinds, whose tests run in a second
pytest, all of a module in one, and are reported here one by one:

- those with the V2 runner, which needs a Triton: on a CPU its interpreter and a stub
  backend (tests/triton_cpu), which must stay out of sight of engines with V1;
- those with the marker ``own_process("name")``: what they import stays in a process
  and disturbs the engines after them.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

TESTS = Path(__file__).parent
RUNNERS = {"V1": "0", "V2": "1"}
MODES = ("eager", "compiled")
COLUMNS = tuple(f"{runner} {mode}" for runner in RUNNERS for mode in MODES)

# Which process this is: "" for the one that `make test` starts.
PROCESS = os.environ.get("HIDDEN_STATES_TEST_PROCESS", "")
# Modules whose tests start engines in processes of their own, with whatever runner.
STARTS_PROCESSES = "starts_processes"

GPU_ONLY = pytest.mark.gpu  # Triton's interpreter runs nothing but eager code


def parameters() -> list[Any]:
    """The columns, for ``pytest.fixture(params=...)``."""
    return [
        pytest.param(column, marks=GPU_ONLY if column == "V2 compiled" else ())
        for column in COLUMNS
    ]


def column_of(item: pytest.Item) -> str | None:
    """The column in which a test runs; None for tests outside the table."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("column")


def reason_without(item: pytest.Item) -> str | None:
    """Why a test does not run in its column, by its marker ``without``."""
    for mark in item.iter_markers("without"):
        columns, reason = mark.args
        if (column_of(item) or "").startswith(columns):
            return str(reason)
    return None


def mark_soak(item: pytest.Item) -> None:
    """Leave a test to `make soak` in the columns of its marker ``soak_in``."""
    for mark in item.iter_markers("soak_in"):
        if column_of(item) in mark.args:
            item.add_marker(pytest.mark.soak)


def process_of(item: pytest.Item) -> str:
    """Which process a test needs."""
    if item.get_closest_marker(STARTS_PROCESSES) is not None:
        return ""
    column = column_of(item) or ""
    name = " ".join(mark.args[0] for mark in item.iter_markers("own_process"))
    if name:
        return f"{column} {name}".strip()
    return "V2" if column.startswith("V2") else ""


def v2_environment(folder: Path) -> dict[str, str]:
    """What makes a process run the V2 runner, on a CPU too.

    Args:
        folder: An empty one, for the entry point by which Triton finds the stub.
    """
    import torch

    environment = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if torch.cuda.is_available():
        return environment
    stub = folder / "triton_cpu_interpreter-0.dist-info"
    stub.mkdir(parents=True)
    (stub / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: triton-cpu-interpreter\nVersion: 0\n"
    )
    (stub / "entry_points.txt").write_text(
        "[triton.backends]\ncpu = triton_cpu_interpreter\n"
    )
    paths = [str(folder), str(TESTS / "triton_cpu"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["TRITON_INTERPRET"] = "1"
    return environment


class Elsewhere:
    """The tests of one module that need one other process, run there together."""

    def __init__(self, process: str):
        self.process = process
        self.node_ids: list[str] = []
        self._outcomes: dict[str, ElementTree.Element] | None = None
        self._log = ""

    def report(self, name: str) -> None:
        """Pass, fail or skip as the test of this name did over there."""
        if self._outcomes is None:
            self._outcomes = self._run()
        case = self._outcomes.get(name)
        if case is None:
            pytest.fail(f"no outcome of this test:\n{self._log}", pytrace=False)
        for problem in case:
            text = problem.text or problem.get("message") or ""
            if problem.tag == "skipped":
                pytest.skip(problem.get("message") or "")
            if problem.tag in ("failure", "error"):
                pytest.fail(text + (case.findtext("system-err") or ""), pytrace=False)

    def _run(self) -> dict[str, ElementTree.Element]:
        with tempfile.TemporaryDirectory(prefix="hs") as name:
            folder = Path(name)
            environment = os.environ | {"HIDDEN_STATES_TEST_PROCESS": self.process}
            if "V2" in self.process.split():
                environment |= v2_environment(folder / "stub")
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "pytest", "-q"),
                    f"--junitxml={folder / 'outcomes.xml'}",
                    *self.node_ids,
                ],
                cwd=TESTS.parent,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            self._log = f"status {done.returncode}\n{done.stdout[-8000:]}"
            try:
                cases = ElementTree.parse(folder / "outcomes.xml").iter("testcase")
            except (OSError, ElementTree.ParseError):
                return {}
            return {str(case.get("name")): case for case in cases}


def send_elsewhere(items: list[pytest.Item]) -> None:
    """Replace the tests that need another process by reports of what they did there,
    and skip those that do not run in their column."""
    groups: dict[tuple[Path, str], Elsewhere] = {}
    for index, item in enumerate(items):
        reason = reason_without(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
            continue
        process = process_of(item)
        if process == PROCESS or "skip" in item.keywords:
            continue
        group = groups.setdefault((item.path, process), Elsewhere(process))
        group.node_ids.append(item.nodeid)
        items[index] = _report(item, group)


def _report(item: pytest.Item, group: Elsewhere) -> pytest.Item:
    name = item.name
    assert item.parent is not None
    report = pytest.Function.from_parent(
        item.parent, name=name, callobj=lambda: group.report(name)
    )
    report.own_markers.extend(item.own_markers)
    report.keywords.update({mark.name: mark for mark in item.own_markers})
    return report
