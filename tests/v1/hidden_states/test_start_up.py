# SPDX-License-Identifier: Apache-2.0
"""What the engine refuses when it starts, though the configuration is well-formed."""

import errno
import fcntl
import os
import subprocess

import pytest
import torch
from safetensors import safe_open

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    load_hidden_states,
)


@pytest.fixture
def start(engines, tiny_model):
    def start(path, model=tiny_model, layer_ids=(1,), **settings):
        with engines.running_engine(
            model, **engines.extraction(list(layer_ids), path), **settings
        ):
            pass

    return start


def test_a_storage_path_that_is_a_file(start, tmp_path):
    path = tmp_path / "file"
    path.write_text("not a directory")
    with pytest.raises(ValueError, match="shared_storage_path .*file' is no directory"):
        start(path)
    with pytest.raises(ValueError, match="shared_storage_path .*no file can be made"):
        start(path / "below")
    assert path.read_text() == "not a directory"


def test_a_storage_path_that_is_read_only(start, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(ValueError, match="shared_storage_path .*Read-only file system"):
        start(small_disk)


def test_a_storage_path_without_flock(start, tmp_path, monkeypatch):
    """As on some network file systems: no reader could know what is complete."""

    real = fcntl.flock

    def flock(file, operation):
        fd = file if isinstance(file, int) else file.fileno()
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match="shared_storage_path .*No locks available"):
        start(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_storage_path_that_does_not_exist_is_made(start, tmp_path):
    start(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700


@pytest.mark.scenario("a family that cannot expose its layers")
@pytest.mark.refused
def test_a_family_that_cannot_expose_its_layers(start, tmp_path_factory, tmp_path):
    from transformers import OPTConfig

    model = tmp_path_factory.mktemp("opt")
    OPTConfig(
        architectures=["OPTForCausalLM"],
        vocab_size=64,
        hidden_size=32,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=1,
        word_embed_proj_dim=32,
        max_position_embeddings=2048,
    ).save_pretrained(model)
    with pytest.raises(
        ValueError, match="OPTForCausalLM cannot expose.*LlamaForCausal"
    ):
        start(tmp_path, str(model), load_format="dummy", skip_tokenizer_init=True)


def test_an_engine_after_one_that_failed_to_start(
    engines, tiny_model, tmp_path, make_prompt, reference_rows
):
    """In one process the failed one leaves vLLM's one connector behind: its layers."""
    with (
        pytest.raises(ValueError, match="block size"),
        engines.running_engine(
            tiny_model, block_size=16, **engines.extraction([2, 6], tmp_path)
        ),
    ):
        pass
    with engines.running_engine(
        tiny_model, **engines.extraction([3, 1, 0], tmp_path)
    ) as llm:
        prompt = make_prompt(20)
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
        path = output.kv_transfer_params["hidden_states_path"]
        rows = load_hidden_states(path, timeout=10)["hidden_states"]
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["layer_ids"] == "[3, 1, 0]"
    expected = reference_rows(prompt["prompt_token_ids"])[:, [3, 1, 0]]
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.scenario("a layer that a model's class does not hand over")
@pytest.mark.refused
def test_a_layer_that_a_class_does_not_hand_over(start, tmp_path):
    """Transformers' implementation has no embeddings to give."""
    with pytest.raises(ValueError, match=r"cannot hand over layers \[0, 2\]"):
        start(tmp_path, layer_ids=(2, 0), model_impl="transformers")
