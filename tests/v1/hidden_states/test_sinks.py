# SPDX-License-Identifier: Apache-2.0
"""Rows that go elsewhere than to our files: a third party's sink, and a connector that
writes whole tensors as stock vLLM has it."""

import os
import sys
import time
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from tests.v1.hidden_states.storage import files
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    ExampleHiddenStatesConnector,
    HiddenStatesError,
    load_hidden_states,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_sink import (
    RowSpan,
    Sink,
    SinkRequest,
)

LAYER_IDS = [2, 6]


class MemorySink(Sink):
    """Keeps rows in this process."""

    kept: dict[str, "MemorySink"] = {}

    def __init__(self, request: SinkRequest):
        self.request = request
        self.rows = bytearray()
        self.token_ids: list[int] = []
        self.withdrawn: list[str | None] = []
        self.kept[request.request_id] = self

    def write(self, span: RowSpan) -> None:
        first = span.position * self.request.bytes_per_row
        self.rows[first : first + len(span.data)] = span.data

    def finish(self, token_ids) -> None:
        self.token_ids = token_ids.tolist()

    def withdraw(self, cause: str | None, advice: str | None = None) -> None:
        self.withdrawn.append(cause)

    @property
    def hidden_states(self) -> torch.Tensor:
        shape = (-1, len(self.request.layer_ids), self.request.hidden_size)
        return torch.frombuffer(self.rows, dtype=self.request.dtype).view(shape)


class WholeConnector(ExampleHiddenStatesConnector):
    """Saves the rows of the first layer alone, negated."""

    @staticmethod
    def _write_tensors(tensors, event, filename, lock_fd) -> None:
        try:
            event.synchronize()
            if len(tensors["token_ids"]) == 13:
                raise OSError("thirteen")
            rows = -tensors["hidden_states"][:, :1].clone()
            save_file(tensors | {"hidden_states": rows}, filename)
        finally:
            if lock_fd is not None:
                os.close(lock_fd)


@pytest.fixture(scope="module")
def package():
    """A third party's, which an engine of this process can import."""
    module = ModuleType("third_party_of_the_tests")
    module.open_sink = MemorySink
    module.SlowSink = SlowSink
    module.WholeConnector = WholeConnector
    sys.modules[module.__name__] = module
    yield module.__name__
    del sys.modules[module.__name__]


# Without an engine beside: a process has one that extracts.


@pytest.mark.parametrize("name", ["nowhere.at_all:f", "json:nothing", "json:__name__"])
def test_a_sink_that_is_none(engines, tiny_model, tmp_path, name):
    with (
        pytest.raises(ValueError, match=f"sink '{name}'"),
        engines.running_engine(
            tiny_model, **engines.extraction(LAYER_IDS, tmp_path, sink=name)
        ),
    ):
        pass


@pytest.mark.parametrize(
    "option", [{"checksum": "crc32"}, {"storage_dtype": "bfloat16"}]
)
def test_options_that_are_not_for_files_of_others(
    engines, tiny_model, package, tmp_path, option
):
    settings = engines.extraction(LAYER_IDS, tmp_path, **option)
    settings["kv_transfer_config"] |= {
        "kv_connector": "WholeConnector",
        "kv_connector_module_path": package,
    }
    (name,) = option
    with (
        pytest.raises(ValueError, match=f"{name} .*WholeConnector overrides"),
        engines.running_engine(tiny_model, **settings),
    ):
        pass


def test_a_connector_that_writes_whole_tensors(
    engines, tiny_model, package, tmp_path, make_prompt, reference_rows
):
    settings = engines.extraction(LAYER_IDS, tmp_path)
    settings["kv_transfer_config"] |= {
        "kv_connector": "WholeConnector",
        "kv_connector_module_path": package,
    }
    prompts = [make_prompt(length) for length in (1, 65, 200, 13)]
    with engines.running_engine(tiny_model, **settings) as llm:
        *outputs, failed = llm.generate(prompts, SamplingParams(max_tokens=1))
        for prompt, output in zip(prompts, outputs, strict=False):
            path = output.kv_transfer_params["hidden_states_path"]
            loaded = load_hidden_states(path, timeout=30)
            assert loaded["token_ids"].tolist() == prompt["prompt_token_ids"]
            expected = -reference_rows(prompt["prompt_token_ids"])[:, LAYER_IDS[:1]]
            torch.testing.assert_close(
                loaded["hidden_states"], expected, atol=1e-4, rtol=1e-4
            )
        with pytest.raises(HiddenStatesError, match="thirteen"):
            load_hidden_states(failed.kv_transfer_params["hidden_states_path"], 30)
        assert len(files(tmp_path)) == 4


class SlowSink(MemorySink):
    """Takes longer than a shutdown is to wait."""

    def write(self, span: RowSpan) -> None:
        time.sleep(0.3)
        super().write(span)


@pytest.mark.parametrize("timeout", [0.1, 30.0])
def test_a_shutdown_with_work_in_flight(
    engines, tiny_model, package, tmp_path, make_prompt, timeout
):
    """Writers are waited for, and those that are not done in time are withdrawn."""
    options = {
        "sink": f"{package}:SlowSink",
        "shutdown_timeout_s": timeout,
        "num_ring_slots": 8,
    }
    MemorySink.kept.clear()
    with engines.running_engine(
        tiny_model, **engines.extraction(LAYER_IDS, tmp_path, **options)
    ) as llm:
        llm.generate([make_prompt(300)], SamplingParams(max_tokens=1))
        core = llm.llm_engine
        core.add_request("half", make_prompt(200), SamplingParams(max_tokens=1))
        core.step()
        start = time.monotonic()
    took = time.monotonic() - start
    done, half = MemorySink.kept.values()
    (cause,) = half.withdrawn
    if timeout > 1:
        assert len(done.token_ids) == 300 and done.withdrawn == []
        assert "before the prompt was computed" in cause
    else:
        assert took < 5
        assert done.token_ids == []
        (other,) = done.withdrawn
        assert "shut down before" in other and "shut down before" in cause


@pytest.fixture(scope="module")
def sink_engine(engines, tiny_model, package, tmp_path_factory):
    storage = tmp_path_factory.mktemp("sink")
    options = {"sink": f"{package}:open_sink"}
    with engines.running_engine(
        tiny_model, **engines.extraction(LAYER_IDS, storage, **options)
    ) as llm:
        yield llm, storage


def test_a_third_partys_sink(sink_engine, make_prompt, reference_rows):
    llm, storage = sink_engine
    prompts = [make_prompt(length) for length in (1, 64, 65, 200)]
    for prompt, output in zip(
        prompts, llm.generate(prompts, SamplingParams(max_tokens=1)), strict=True
    ):
        path = output.kv_transfer_params["hidden_states_path"]
        (sink,) = [s for s in MemorySink.kept.values() if s.request.path == path]
        token_ids = prompt["prompt_token_ids"]
        assert sink.token_ids == token_ids
        assert sink.request.num_rows == len(token_ids)
        assert sink.request.layer_ids == tuple(LAYER_IDS)
        assert sink.request.metadata["num_prompt_tokens"] == str(len(token_ids))
        expected = reference_rows(token_ids)[:, LAYER_IDS]
        torch.testing.assert_close(sink.hidden_states, expected, atol=1e-4, rtol=1e-4)
        assert sink.withdrawn == []
    assert list(storage.iterdir()) == []


def test_an_abort_withdraws_a_sink(sink_engine, make_prompt):
    llm, _ = sink_engine
    MemorySink.kept.clear()
    core = llm.llm_engine
    request_id = core.add_request(
        "gone", make_prompt(200), SamplingParams(max_tokens=1)
    )
    core.step()
    core.abort_request([request_id], internal=True)
    llm.generate([make_prompt(3)], SamplingParams(max_tokens=1))
    assert MemorySink.kept[request_id].withdrawn == [None]
    assert MemorySink.kept[request_id].token_ids == []
