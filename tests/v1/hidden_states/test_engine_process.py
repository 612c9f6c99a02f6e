# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, beside another one on the same storage path."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.v1.hidden_states.storage import files
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    cleanup_hidden_states,
    load_hidden_states,
)

SAMPLING = SamplingParams(max_tokens=1, detokenize=False)


def generate(llm, prompts):
    return llm.generate(prompts, SAMPLING, use_tqdm=False)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def two_engines(engines, tiny_model, shared):
    """One with locks in its own process, one without in the test's."""
    with (
        engines.running_engine(
            tiny_model, own_process=True, **engines.extraction([4, 2], shared)
        ) as other,
        engines.running_engine(
            tiny_model,
            **engines.extraction([0], shared, use_synchronization_lock=False),
        ) as own,
    ):
        yield other, own


def check(output, prompt, layer_ids, reference_rows) -> str:
    path = output.kv_transfer_params["hidden_states_path"]
    loaded = load_hidden_states(path)
    assert loaded["token_ids"].tolist() == prompt["prompt_token_ids"]
    expected = reference_rows(prompt["prompt_token_ids"])[:, layer_ids]
    torch.testing.assert_close(loaded["hidden_states"], expected, atol=1e-5, rtol=1e-5)
    return path


def test_engines_never_touch_each_others_files(
    two_engines, make_prompt, shared, reference_rows
):
    """Both number their requests from 0, at the same time."""
    prompts = [
        [make_prompt(length, seed) for length in (5, 64, 300, 17)] for seed in (1, 2)
    ]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(generate, two_engines, prompts))
    paths = {
        check(output, prompt, layer_ids, reference_rows)
        for layer_ids, outputs, batch in zip(
            ([4, 2], [0]), results, prompts, strict=True
        )
        for output, prompt in zip(outputs, batch, strict=True)
    }
    assert len(paths) == 8
    assert {str(path) for path in files(shared)} == paths
    for path in paths:
        cleanup_hidden_states(path)
    assert os.listdir(shared) == []


def test_every_file_of_a_batch_can_be_read_when_generate_returns(
    two_engines, make_prompt, reference_rows
):
    """With locks and without: the last file too, though no step follows."""
    for llm, layer_ids in zip(two_engines, ([4, 2], [0]), strict=True):
        for seed in range(10, 15):
            prompt = make_prompt(200, seed)
            (output,) = generate(llm, [prompt])
            check(output, prompt, layer_ids, reference_rows)


def test_readers_of_other_threads_do_not_disturb(two_engines, make_prompt):
    """A reader that waits for one file while others are written and read."""
    _, own = two_engines
    outputs = generate(own, [make_prompt(900, seed) for seed in range(4)])
    loaded: list = []
    threads = [
        threading.Thread(
            target=lambda path=output.kv_transfer_params["hidden_states_path"]: (
                loaded.append(load_hidden_states(path, timeout=10))
            )
        )
        for output in outputs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(tensors["token_ids"]) for tensors in loaded] == [900] * 4
