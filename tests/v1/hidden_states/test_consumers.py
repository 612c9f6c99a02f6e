# SPDX-License-Identifier: Apache-2.0
"""Packages that read hidden states today, unchanged: `speculators`, `hs-connectors`.

They run in child processes (consumers.py says from where); here is what they get.
"""

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from vllm import EngineArgs, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import (
    get_kv_connector_cache_layout,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_file import (
    HiddenStatesFile,
)

LAYER_IDS = [6, 0, 3]
NUM_SAMPLES = 200
IN_FLIGHT = 16
# Of so many samples rows are compared; the packages themselves check all of them.
NUM_COMPARED = 25
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def consumers(engines):
    """The module that has the packages."""
    module = engines.import_file(Path(__file__).with_name("consumers.py"))
    module.installed()
    return module


@pytest.fixture(scope="module")
def prompts(make_prompt):
    """Of all lengths: some take several steps of 64 tokens."""
    return [
        make_prompt(1 + seed * 7 % 100, seed)["prompt_token_ids"]
        for seed in range(NUM_SAMPLES)
    ]


@pytest.fixture(scope="module")
def served(consumers, engines, tiny_model, tmp_path_factory):
    server = engines.import_file(Path(__file__).with_name("server.py"))
    folder = tmp_path_factory.mktemp("served")
    storage = folder / "storage"
    options = ["--enforce-eager"]
    for name, value in engines.extraction(LAYER_IDS, storage).items():
        options += [f"--{name}", json.dumps(value)]
    with server.serving(
        tiny_model, folder, *options, VLLM_USE_V2_MODEL_RUNNER="0"
    ) as running:
        yield SimpleNamespace(server=running, storage=storage)


@pytest.fixture
def read(consumers, tmp_path):
    """Runs a transfer of hs-connectors in a child; sends it parameters as they come."""
    children: list[subprocess.Popen[str]] = []

    def start(transfer: str) -> SimpleNamespace:
        child = consumers.start(
            "hs_connectors_client.py",
            *(transfer, tmp_path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        children.append(child)
        assert child.stdout.readline() == "ready\n"

        def send(params) -> None:
            child.stdin.write(json.dumps(params) + "\n")
            child.stdin.flush()

        def finish(number: int) -> list[dict[str, torch.Tensor]]:
            child.stdin.close()
            said = child.stdout.read().split("\n")[:-1]
            assert sorted(said) == sorted(map(str, range(number)))
            return [
                load_file(tmp_path / f"{index}.safetensors") for index in range(number)
            ]

        return SimpleNamespace(pid=child.pid, send=send, finish=finish)

    yield start
    for child in children:
        child.kill()
        child.wait()


def generate(server, prompts, send) -> list[list[int]]:
    """Complete the prompts, ``IN_FLIGHT`` at a time.

    Args:
        send: Gets each one's parameters as they come.

    Returns:
        The prompts in the order of their answers.
    """
    answered = []
    mutex = threading.Lock()

    def complete(prompt):
        response = server.complete(prompt, return_token_ids=True)
        with mutex:
            send(response["kv_transfer_params"])
            answered.append(prompt)
        assert response["choices"][0]["prompt_token_ids"] == prompt

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(complete, prompts))
    return answered


def assert_nothing_left(storage: Path) -> None:
    """Readers have taken what was theirs, and the server leaves nothing else."""
    deadline = time.monotonic() + 10
    while list(storage.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(storage.iterdir()) == []


@pytest.mark.soak
def test_speculators(consumers, served, prompts, reference_rows, tmp_path):
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    child = consumers.start(
        "speculators_client.py",
        *(f"http://localhost:{served.server.port}/v1", tmp_path, IN_FLIGHT),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, _ = child.communicate(timeout=300)
    finally:
        child.kill()
    assert child.returncode == 0, said[-6000:]
    assert "Skipping" not in said
    generated = tmp_path / "offline" / "hidden_states"
    assert len(list(generated.iterdir())) == NUM_SAMPLES
    for name in ("offline", "online"):
        for index in range(NUM_SAMPLES):
            sample = load_file(tmp_path / name / f"{index}.safetensors")
            assert sample["input_ids"].tolist() == prompts[index]
            assert sample["loss_mask"].tolist() == [1] * len(prompts[index])
            if index >= NUM_COMPARED:
                continue
            expected = reference_rows(prompts[index])[:, LAYER_IDS]
            torch.testing.assert_close(
                sample["hidden_states"], expected[:, :-1].flatten(1), **TOLERANCE
            )
            torch.testing.assert_close(
                sample["verifier_last_hidden_states"], expected[:, -1], **TOLERANCE
            )
    for path in generated.iterdir():
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["layer_ids"] == str(LAYER_IDS)
    assert_nothing_left(served.storage)


@pytest.mark.soak
def test_file_transfer(read, served, prompts, reference_rows):
    """Each path at once, as it comes; ``online`` above is the same transfer, too."""
    prompts = prompts[: 4 * IN_FLIGHT]
    child = read("FileTransfer")
    answered = generate(served.server, prompts, child.send)
    for index, tensors in enumerate(child.finish(len(prompts))):
        assert tensors["token_ids"].tolist() == answered[index]
        assert len(tensors["hidden_states"]) == len(answered[index])
        assert tensors["hidden_states"].isfinite().all()
        if index < NUM_COMPARED:
            expected = reference_rows(answered[index])[:, LAYER_IDS]
            torch.testing.assert_close(tensors["hidden_states"], expected, **TOLERANCE)
    assert_nothing_left(served.storage)


@pytest.mark.soak
def test_file_transfer_waits(read, tmp_path):
    """It has the lock open before the file is complete: there is no way to be sure of
    that with a server and a fast disk."""
    files = [
        HiddenStatesFile(str(tmp_path / f"file-{index}.safetensors"), str(index))
        for index in range(8)
    ]
    for file in files:
        file.open()
    child = read("FileTransfer")
    for file in files:
        child.send({"hidden_states_path": file.path})
    deadline = time.monotonic() + 5  # it gives up after ten seconds
    while not {f"{file.path}.lock" for file in files} <= open_files(child.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rows = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 4)
    for file in files:
        file.write(0, memoryview(rows.numpy()).cast("B"))
        file.finish(np.arange(2), 3, 4, torch.float32, {})
    for tensors in child.finish(len(files)):
        assert torch.equal(tensors["hidden_states"], rows)
    assert list(tmp_path.glob("file-*")) == []


def open_files(pid: int) -> set[str]:
    """The paths of what a process has open."""
    names = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.add(os.readlink(link))
        except FileNotFoundError:  # closed meanwhile
            continue
    return names


@pytest.fixture(scope="module")
def connectors(consumers, tmp_path_factory):
    """Its connectors can be imported: for tests in a process of their own."""
    folder = consumers.connectors_alone(tmp_path_factory.mktemp("connectors"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(folder)
        yield importlib.import_module("hs_connectors")


@pytest.mark.soak
@pytest.mark.own_process("consumers")
@pytest.mark.parametrize("is_theirs", [True, False])
def test_fp8_connector(
    connectors, engines, tiny_model, prompts, reference_rows, tmp_path, is_theirs
):
    """Their reader reads what their connector writes, and what ours does."""
    prompts = prompts[: 2 * IN_FLIGHT]
    storage = tmp_path / "storage"
    settings = engines.extraction(LAYER_IDS, storage)
    if is_theirs:
        settings["kv_transfer_config"] |= {
            "kv_connector": "FP8HiddenStatesConnector",
            "kv_connector_module_path": "hs_connectors.fp8_hidden_states_connector",
        }
    else:
        settings = engines.extraction(LAYER_IDS, storage, storage_dtype="float8_e4m3")
    with engines.running_engine(tiny_model, **settings) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(max_tokens=1, detokenize=False),
            use_tqdm=False,
        )
        samples = []
        transfer = connectors.FP8Transfer(storage, torch.float32)
        for output in outputs:
            params = output.kv_transfer_params
            samples.append(transfer.get_generated(params))
            with safe_open(params["hidden_states_path"], framework="pt") as file:
                stored = file.get_tensor("hidden_states")
            assert stored.dtype == torch.float8_e4m3fn
            transfer.delete(params["hidden_states_path"])
        assert_nothing_left(storage)
    fp8 = torch.finfo(torch.float8_e4m3fn)
    for prompt, tensors in zip(prompts, samples, strict=True):
        assert tensors["token_ids"].tolist() == prompt
        rows, expected = tensors["hidden_states"], reference_rows(prompt)[:, LAYER_IDS]
        assert rows.dtype == torch.float32
        # The largest value of a token becomes the largest that FP8 has. Half a step
        # is what rounding may take away, 1e-4 what the implementations differ by.
        scale = expected.abs().amax((1, 2), keepdim=True) / fp8.max
        step = fp8.eps * torch.maximum(expected.abs(), scale * fp8.smallest_normal)
        assert ((rows - expected).abs() <= step / 2 + 1e-4).all()


@pytest.mark.soak
@pytest.mark.own_process("consumers")
def test_mooncake_connector(connectors, engines, tiny_model):
    """It needs an accelerator and a store to run; it must be led to the stock path."""
    settings = engines.extraction(LAYER_IDS, "")
    settings["kv_transfer_config"] = {
        "kv_connector": "MooncakeHiddenStatesConnector",
        "kv_connector_module_path": "hs_connectors.mooncake_hidden_states_connector",
        "kv_role": "kv_producer",
    }
    config = EngineArgs(model=tiny_model, **settings).create_engine_config()
    assert config.hidden_states_config is None
    assert config.speculative_config.method == "extract_hidden_states"
    assert get_kv_connector_cache_layout(config) == "LBNHC"


def test_a_connector_that_reads_the_kv_group(
    engines, tiny_model, make_prompt, reference_rows, tmp_path
):
    """It does not take rows, so that it has the stock path with all of its parts."""
    settings = engines.extraction([0, 3, 6], tmp_path)  # stock sorts them
    settings["kv_transfer_config"] = {
        "kv_connector": "KVGroupConnector",
        "kv_connector_module_path": "kv_group_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"folder": str(tmp_path)},
    }
    prompts = [make_prompt(length, length) for length in (1, 16, 63, 64, 200)]
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        with engines.running_engine(
            tiny_model, enable_prefix_caching=False, **settings
        ) as llm:
            config = llm.llm_engine.vllm_config
            assert config.hidden_states_config is None
            assert config.speculative_config.method == "extract_hidden_states"
            outputs = llm.generate(
                prompts, SamplingParams(max_tokens=4, temperature=0), use_tqdm=False
            )
            # In the test's own process nothing goes on until the next request comes.
            llm.generate(prompts[:1], SamplingParams(max_tokens=1), use_tqdm=False)
    finally:
        sys.path.remove(str(Path(__file__).parent))
    for prompt, output in zip(prompts, outputs, strict=True):
        tensors = load_file(output.kv_transfer_params["group_path"])
        token_ids = prompt["prompt_token_ids"]
        assert tensors["token_ids"].tolist() == token_ids
        expected = reference_rows(token_ids)[:, [0, 3, 6]]
        torch.testing.assert_close(tensors["hidden_states"], expected, **TOLERANCE)
