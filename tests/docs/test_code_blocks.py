# SPDX-License-Identifier: Apache-2.0
"""What a reader would copy from a page runs."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# `text` is to be read; all other kinds are checked below.
KINDS = {"bash", "console", "json", "python", "text"}


def blocks(docs: Any, language: str) -> list[Any]:
    return [
        block
        for page in docs.pages()
        for block in docs.read_blocks(page)
        if block.language == language
    ]


def test_every_block_is_of_a_kind_that_is_checked(docs: Any) -> None:
    for page in docs.pages():
        for block in docs.read_blocks(page):
            assert block.language in KINDS, block
    # The tests below run these, one by one.
    assert len(blocks(docs, "bash")) == 1
    assert len(blocks(docs, "python")) == 9


def test_first_example(docs: Any, runner: Any) -> None:
    [block] = [b for b in docs.read_blocks("README.md") if b.language == "python"]
    # In one process, which saves two starts; the engine's log is in the output too.
    output = runner.run_python(block, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    [path] = re.findall(r"^/.+\.safetensors$", output, re.M)
    assert Path(path).parent == runner.files
    assert "\ntorch.Size([9, 2, 128])\n" in output


@pytest.mark.soak
def test_offline_program_of_the_feature(docs: Any, runner: Any) -> None:
    block = docs.read_blocks(docs.FEATURE_PAGE)[0]
    assert "enable_chunked_prefill=False" in block.text
    # In one process, which saves two starts.
    output = runner.run_python(block, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    shapes = re.findall(r"torch.Size\((.+)\)", output)
    assert shapes == ["[9, 4, 128]", "[8, 4, 128]"]


@pytest.mark.soak
def test_offline_program_of_the_last_hidden_state(docs: Any, runner: Any) -> None:
    (block,) = (b for b in docs.read_blocks(docs.LAST_PAGE) if "LLM(" in b.text)
    # In one process, which saves a start.
    output = runner.run_python(block, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert "\n(128,)\n" in output


def test_logits_of_the_last_layer(docs: Any, runner: Any) -> None:
    """The block's logits are those that the model itself computes."""
    files = sorted(runner.files.glob("*.safetensors"))
    if not files:
        pytest.skip("needs the file of test_first_example")
    block = next(b for b in docs.read_blocks(docs.FEATURE_PAGE) if "logits" in b.text)
    text = re.sub(rf"{docs.FILES}/[^\"]+", str(files[-1]), block.text)
    text = runner.localized(text)
    names: dict[str, Any] = {}
    exec(compile(text, str(block), "exec"), names)
    import torch

    with torch.inference_mode():
        expected = names["model"](names["tensors"]["token_ids"][None]).logits[0]
    assert names["logits"].shape == expected.shape
    # The engine's rows are bfloat16; logits before the norm would differ by far more.
    distance = (names["logits"] - expected).norm() / expected.norm()
    assert distance < 0.05


def test_a_sink_of_ones_own(docs: Any, tmp_path: Path) -> None:
    (block,) = docs.read_blocks("docs/features/hidden_states_sinks.md")
    names: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), names)
    import numpy as np
    import torch

    rows = torch.arange(24, dtype=torch.float32).view(3, 2, 4)
    path = tmp_path / "a.safetensors"
    request = names["SinkRequest"](
        "a", str(path), np.arange(3), 3, (1, 2), 4, torch.float32
    )
    sink = names["open_sink"](request)
    for position, num_rows in ((0, 2), (1, 2)):
        data = rows[position : position + num_rows].numpy().view(np.uint8).data
        sink.write(names["RowSpan"](position, num_rows, data.cast("B")))
    sink.finish(np.arange(3))
    saved = np.load(f"{path}.npy").view(np.float32).reshape(3, 2, 4)
    assert (saved == rows.numpy()).all()
    sink.withdraw(None)


def test_configuration_by_layer_ids(docs: Any, runner: Any) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    assert len(blocks(docs, "json")) == 3  # one of them within a MultiConnector
    for block in blocks(docs, "json"):
        connector = KVTransferConfig(**json.loads(runner.localized(block.text)))
        arguments = EngineArgs(model=runner.model, kv_transfer_config=connector)
        config = arguments.create_engine_config()
        assert config.hidden_states_config is not None
        assert config.hidden_states_config.layer_ids == (2, 4, 6)
        assert config.speculative_config is None


def test_make_targets_of_the_pages_exist(docs: Any) -> None:
    makefile = (docs.ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    named = {
        words[1]
        for block in blocks(docs, "console")
        for line in block.text.splitlines()
        if (words := shlex.split(line, comments=True)) and words[0] == "make"
    }
    assert {"demo", "test", "check", "install"} <= named
    assert named <= targets


def test_verbs_of_the_series_exist(docs: Any) -> None:
    named = set()
    for block in [*blocks(docs, "console"), *blocks(docs, "bash")]:
        named |= set(re.findall(r"python -m series ([a-z]+)", block.text))
    done = subprocess.run(
        [sys.executable, "-m", "series", "--help"],
        cwd=docs.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert named
    for verb in named:
        assert re.search(rf"^\s+{verb}\s", done.stdout, re.M), verb
