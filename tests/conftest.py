# SPDX-License-Identifier: Apache-2.0
"""Engines and models that the tests share.

Engines run in the test's own process, one after the other: a start costs three
seconds there (eager), and half a minute in a process of their own.
"""

import contextlib
import gc
import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before vLLM is imported anywhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "features" / "speculative_decoding"


def import_file(path: Path) -> Any:
    """A module from a file that is in no package."""
    if path.stem in sys.modules:
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny Qwen3 checkpoint: 6 layers, hidden size 128, 1,024 tokens."""
    make = import_file(EXAMPLES / "tiny_model.py").make_tiny_model
    return str(make(tmp_path_factory.mktemp("tiny-qwen3")))


@pytest.fixture(scope="session")
def make_prompt() -> Callable[..., dict[str, list[int]]]:
    """Makes prompts of random token ids: ``make_prompt(length, seed)``."""

    def make(length: int, seed: int = 0) -> dict[str, list[int]]:
        generator = random.Random(f"{length} {seed}")
        return {
            "prompt_token_ids": [generator.randrange(3, 1000) for _ in range(length)]
        }

    return make


@contextlib.contextmanager
def running_engine(model: str, own_process: bool = False, **settings: Any) -> Iterator:
    """An ``LLM`` with small settings, shut down at the end."""
    from vllm import LLM

    flag = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(flag)
    os.environ[flag] = "1" if own_process else "0"
    defaults: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "dtype": "float32",
        "enforce_eager": True,
        "disable_log_stats": True,
    }
    try:
        llm = LLM(model=model, **(defaults | settings))
    finally:
        os.environ.pop(flag)
        if before is not None:
            os.environ[flag] = before
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@contextlib.contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """Engines that start within schedule a step ahead of the model, on a CPU, too.

    vLLM's CPU platform switches that off, though its code runs there.
    """
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    check = platform.check_and_update_config
    of_class = platform.__dict__["check_and_update_config"]

    def check_and_switch_on(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(check_and_switch_on)
    try:
        yield
    finally:
        platform.check_and_update_config = of_class


def extraction(layer_ids: Any, path: Any, **options: Any) -> dict[str, Any]:
    """Engine settings that extract, in the way of the feature's documentation."""
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}
            },
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(path), **options},
        },
    }


@pytest.fixture(scope="session")
def engines() -> Any:
    """``running_engine`` and ``extraction``, for tests in folders below."""
    return sys.modules[__name__]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB of its own."""
    yield from mounted_disk(tmp_path / "disk", "1m")


def mounted_disk(path: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of this size at ``path``; unmounted at the end."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small tmpfs to fill up")
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


columns = import_file(ROOT / "tests" / "columns.py")


@pytest.fixture(scope="module", params=columns.parameters())
def column(request: pytest.FixtureRequest) -> str:
    """A column of the table of scenarios, such as "V1 eager"."""
    return str(request.param)


def column_settings(column: str) -> dict[str, Any]:
    """Engine settings of a column; its runner is its process's."""
    return {"enforce_eager": column.endswith("eager")}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Before -m selects."""
    columns.mark_soak(item)


@pytest.hookimpl(trylast=True)  # of the items that -m and -k leave
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` run where there is a CUDA device, and tests that need
    another process in that."""
    if any("gpu" in item.keywords for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if "gpu" in item.keywords:
                    item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
    columns.send_elsewhere(items)
