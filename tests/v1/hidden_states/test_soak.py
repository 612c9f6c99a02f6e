# SPDX-License-Identifier: Apache-2.0
"""Twenty minutes of everything at once: clients that come, ask, and give up, readers
that compare every row, and a disk that fills up and is emptied again.

Rows are those of the constant-layer model, so that each is compared with what it must
be without a reference's forward. HIDDEN_STATES_SOAK_SECONDS makes it shorter.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import prometheus_client
import psutil
import pytest
import torch
from safetensors import safe_open

from tests.v1.hidden_states.storage import files
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    HiddenStatesError,
    cleanup_hidden_states,
    load_hidden_states,
)
from vllm.v1.hidden_states.client import hidden_states

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("HIDDEN_STATES_SOAK_SECONDS", "1200"))
NUM_CLIENTS = 32
LAYER_IDS = [3, 0, 1]
PARAMS = "kv_transfer_params"
# Some 40 files of the mean length: fewer than there are clients and readers behind.
DISK = "6m"
# Of every minute, for how many seconds the disk is full.
FULL_FOR = 10


@pytest.fixture
def disk(engines, tmp_path):
    yield from engines.mounted_disk(tmp_path / "disk", DISK)


def check(constant_layers, tensors: dict[str, torch.Tensor], layer_ids) -> None:
    token_ids = tensors["token_ids"]
    positions = torch.arange(len(token_ids))
    for column, layer in enumerate(layer_ids):
        known = constant_layers.known_rows(layer, positions, token_ids)
        assert torch.equal(tensors["hidden_states"][:, column], known)


class Soak:
    """Clients of one engine, and what they have seen."""

    def __init__(self, engine: Any, disk: Path, constant_layers: Any):
        self.engine = engine
        self.disk = disk
        self.constant_layers = constant_layers
        self.seen: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.num_rows = 0

    async def client(self, number: int, deadline: float) -> None:
        generator = random.Random(number)
        count = 0
        while time.monotonic() < deadline:
            count += 1
            await self.request(f"{number}-{count}", generator)

    async def request(self, request_id: str, generator: random.Random) -> None:
        length = generator.choice([1, 2, 63, 64, 65, 128, 200, 500, 1000])
        prompt = [generator.randrange(3, 1000) for _ in range(length)]
        layer_ids = generator.choice([LAYER_IDS, LAYER_IDS, [1, 3]])
        options = {
            "hidden_states_layers": layer_ids,
            "include_output_tokens": generator.random() < 0.3,
            "return_inline": length < 300 and generator.random() < 0.2,
            "extract_hidden_states": generator.random() < 0.9,
        }
        sampling = SamplingParams(
            max_tokens=generator.choice([1, 1, 2, 12]),
            temperature=0,
            detokenize=False,
            extra_args={PARAMS: options},
        )
        gives_up_after = generator.choice([None, None, generator.random() * 0.4])
        try:
            async with asyncio.timeout(gives_up_after):
                async for output in self.engine.generate(
                    {"prompt_token_ids": prompt}, sampling, request_id
                ):
                    last = output
        except TimeoutError:
            self.seen["given up"] += 1
            return
        token_ids = prompt
        if options["include_output_tokens"]:
            token_ids = prompt + list(last.outputs[0].token_ids[:-1])
        if not options["extract_hidden_states"]:
            assert last.kv_transfer_params is None
            self.seen["opted out"] += 1
            return
        # Readers are behind at times, as those of a busy trainer.
        await asyncio.sleep(generator.choice([0, 0, 0.5]))
        await asyncio.to_thread(self.read, last, token_ids, layer_ids)

    def read(self, output: Any, token_ids: list[int], layer_ids: list[int]) -> None:
        told = output.kv_transfer_params
        path = told.get("hidden_states_path")
        try:
            if "hidden_states" in told:
                tensors, kind = hidden_states(output), "in the response"
            elif path is None:
                self.failed(told["hidden_states_error"], "error in the response")
                return
            else:
                tensors = load_hidden_states(path, timeout=120, verify=True)
                kind = "file"
        except HiddenStatesError as error:
            self.failed(error.cause, "error at the path")
        else:
            assert tensors["token_ids"].tolist() == token_ids
            check(self.constant_layers, tensors, layer_ids)
            self.seen[kind] += 1
            self.num_rows += len(token_ids)
        finally:
            if path is not None:
                cleanup_hidden_states(path)

    def failed(self, cause: str, kind: str) -> None:
        assert "No space left on device" in cause, cause
        self.seen[kind] += 1

    async def fill_the_disk(self, deadline: float) -> None:
        """Now and then; the clients' errors are its alone."""
        filler = self.disk / "filler"
        while time.monotonic() + 60 < deadline:
            await asyncio.sleep(60 - FULL_FOR)
            end = time.monotonic() + FULL_FOR
            with filler.open("wb", buffering=0) as file:
                while time.monotonic() < end:
                    try:
                        file.write(bytes(64 * 1024))
                    except OSError:
                        self.seen["times that the disk was found full"] += 1
                        await asyncio.sleep(0.05)
            filler.unlink()


def processes() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def used() -> dict[str, int]:
    """Of the engine's processes: descriptors, and memory that is theirs alone."""
    descriptors = memory = 0
    for process in processes():
        descriptors += process.num_fds()
        memory += process.memory_full_info().uss
    return {"descriptors": descriptors, "memory": memory}


def gauge(name: str) -> float:
    values = [
        sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name
    ]
    assert values, name
    return sum(values)


def test_hours_in_minutes(
    engines, constant_layers, disk, tmp_path, monkeypatch, make_prompt
):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    for path in constant_layers.plugin(tmp_path / "plugin"):
        # For the engine's processes, and for one that vLLM asks about the class.
        monkeypatch.syspath_prepend(path)
        monkeypatch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    settings = engines.extraction(LAYER_IDS, disk, checksum="crc32")
    arguments = AsyncEngineArgs(
        model=constant_layers.make_constant_layers_model(tmp_path / "model"),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        max_num_batched_tokens=128,
        max_num_seqs=24,
        # Too small for the batch: some are preempted.
        num_gpu_blocks_override=120,
        block_size=32,
        enforce_eager=True,
        **settings,
    )

    async def run() -> tuple[Soak, dict[str, int], dict[str, int]]:
        engine = AsyncLLM.from_engine_args(arguments)
        soak = Soak(engine, disk, constant_layers)
        try:
            generator = random.Random("warm-up")
            for number in range(200):
                await soak.request(f"warm-up-{number}", generator)
            before = used()
            deadline = time.monotonic() + SECONDS
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(soak.fill_the_disk(deadline))
                for number in range(NUM_CLIENTS):
                    tasks.create_task(soak.client(number, deadline))
            # Two more, in whose steps workers hear of what has ended.
            for number in range(2):
                await soak.request(f"end-{number}", random.Random(number))
                await asyncio.sleep(1)
            assert gauge("vllm:num_requests_running") == 0
            assert gauge("vllm:num_requests_waiting") == 0
            assert gauge("vllm:kv_cache_usage_perc") == 0
            return soak, before, used()
        finally:
            engine.shutdown()

    start = time.monotonic()
    soak, before, after = asyncio.run(run())
    seconds = time.monotonic() - start
    # Whose client gave up when the answer was on its way in this process already.
    left = files(disk)
    print(
        f"\n{seconds:.0f} s, {soak.num_rows} rows compared; {dict(soak.seen)}; "
        f"before {before}, after {after}; {len(left)} files left"
    )
    for kind in ("file", "in the response", "opted out", "given up"):
        assert soak.seen[kind] > 50, soak.seen
    if SECONDS > 120:
        assert soak.seen["error in the response"] + soak.seen["error at the path"] > 5
    assert len(left) < 0.02 * soak.seen["given up"] + 2, left
    for path in left:
        with safe_open(path, framework="pt") as file:
            layer_ids = json.loads(file.metadata()["layer_ids"])
        check(constant_layers, load_hidden_states(str(path), verify=True), layer_ids)
    assert after["descriptors"] <= before["descriptors"] + 4
    assert after["memory"] < before["memory"] + 64 * 2**20
