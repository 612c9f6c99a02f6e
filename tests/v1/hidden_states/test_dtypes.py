# SPDX-License-Identifier: Apache-2.0
"""Rows in another dtype than the model's: what is stored, and what comes back."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_file import (
    FileOptions,
    HiddenStatesError,
    load_hidden_states,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_sink import (
    FileSink,
    SinkRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_writer import (
    RequestWriter,
)
from vllm.v1.hidden_states.client import hidden_states
from vllm.v1.hidden_states.dtypes import FLOAT8, SCALES
from vllm.v1.hidden_states.plan import Span
from vllm.v1.hidden_states.ring import Ring

LAYER_IDS = [6, 0, 3]
PARAMS = "kv_transfer_params"
# The model's and what is stored: how far off a row's values may be. By half a step of
# the coarser, relatively; a model in bfloat16 by its own error, of the largest value.
KINDS = {
    "float32-float8_e4m3": 2**-4,
    "float32-bfloat16": 2**-8,
    "float32-float16": 2**-11,
    "bfloat16-float32": 2**-5,
    "bfloat16-float8_e4m3": 2**-4 + 2**-5,
}
IN_SOAK = ("float32-bfloat16", "bfloat16-float32", "bfloat16-float8_e4m3")


def expected_scales(rows: torch.Tensor) -> torch.Tensor:
    return rows.float().abs().amax((1, 2), keepdim=True) / 448


def sampling(max_tokens: int = 1, **options) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0, extra_args={PARAMS: options}
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.soak if kind in IN_SOAK else ())
        for kind in KINDS
    ],
)
def stored(request, engines, tiny_model, tmp_path_factory):
    """An engine, the model's dtype, what is stored, and how far off rows may be."""
    model_dtype, storage_dtype = request.param.split("-")
    settings = engines.extraction(
        LAYER_IDS,
        tmp_path_factory.mktemp("stored"),
        storage_dtype=storage_dtype,
        checksum="crc32",
    )
    with engines.running_engine(tiny_model, dtype=model_dtype, **settings) as llm:
        yield llm, model_dtype, storage_dtype, KINDS[request.param]


def dtype_of(name: str) -> torch.dtype:
    return FLOAT8 if name == "float8_e4m3" else getattr(torch, name)


def check(tensors, expected, model_dtype, storage_dtype, bound) -> None:
    """What is stored, against the reference's rows."""
    assert tensors["hidden_states"].dtype == dtype_of(storage_dtype)
    assert tensors["hidden_states"].shape == expected.shape
    rows = tensors["hidden_states"].float()
    if storage_dtype == "float8_e4m3":
        assert tensors[SCALES].shape == (len(rows), 1, 1)
        rows = rows * tensors[SCALES]
    else:
        assert SCALES not in tensors
    largest = expected.abs().amax((1, 2), keepdim=True)
    # Beside a row's largest value small ones may be off by more, relatively.
    allowed = bound * expected.abs() + 2.0**-8 * bound * largest + 1e-5
    if model_dtype == "bfloat16":
        allowed = bound * largest
    assert ((rows - expected).abs() <= allowed).all()


@pytest.mark.parametrize("length", [1, 2, 63, 200])
def test_files(stored, make_prompt, reference_rows, length):
    llm, model_dtype, storage_dtype, bound = stored
    prompt = make_prompt(length)
    (output,) = llm.generate([prompt], sampling())
    path = output.kv_transfer_params["hidden_states_path"]
    tensors = load_hidden_states(path, timeout=30, verify=True)
    expected = reference_rows(prompt["prompt_token_ids"])[:, LAYER_IDS]
    check(tensors, expected, model_dtype, storage_dtype, bound)
    assert tensors["token_ids"].tolist() == prompt["prompt_token_ids"]
    if (model_dtype, storage_dtype) == ("float32", "float8_e4m3"):
        torch.testing.assert_close(
            tensors[SCALES], expected_scales(expected), rtol=1e-4, atol=0
        )
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["dtype"] == model_dtype
    assert metadata["storage_dtype"] == str(dtype_of(storage_dtype)).split(".")[1]
    loaded = load_hidden_states(path, dequantize=True)
    assert set(loaded) == {"hidden_states", "token_ids"}
    assert loaded["hidden_states"].dtype == getattr(torch, model_dtype)
    again = {**tensors, "hidden_states": loaded["hidden_states"]}
    again.pop(SCALES, None)
    if storage_dtype == "float8_e4m3":
        check(again, expected, model_dtype, model_dtype, bound + 2**-8)
    else:
        stored_rows = tensors["hidden_states"].to(loaded["hidden_states"].dtype)
        assert torch.equal(loaded["hidden_states"], stored_rows)


def test_some_layers_and_output(stored, make_prompt, reference_rows):
    """The scale of a row is that of all the server's layers, whichever are asked."""
    llm, model_dtype, storage_dtype, bound = stored
    prompt = make_prompt(70)
    options = {"hidden_states_layers": [3], "include_output_tokens": True}
    whole, some = llm.generate([prompt, prompt], [sampling(5), sampling(5, **options)])
    path = some.kv_transfer_params["hidden_states_path"]
    tensors = load_hidden_states(path, timeout=30)
    token_ids = [*prompt["prompt_token_ids"], *some.outputs[0].token_ids[:-1]]
    assert tensors["token_ids"].tolist() == token_ids
    all_layers = load_hidden_states(whole.kv_transfer_params["hidden_states_path"], 30)
    assert torch.equal(
        tensors["hidden_states"][:70].view(torch.uint8),
        all_layers["hidden_states"][:, 2:].contiguous().view(torch.uint8),
    )
    if storage_dtype == "float8_e4m3":
        assert torch.equal(tensors[SCALES][:70], all_layers[SCALES])
        assert len(tensors[SCALES]) == 74
    if model_dtype == "float32":
        expected = reference_rows(token_ids)[:, LAYER_IDS]
        rows = tensors["hidden_states"].float() * tensors.get(SCALES, 1)
        error = (rows - expected[:, 2:]).abs().amax((1, 2))
        assert (error <= bound * expected.abs().amax((1, 2)) + 1e-5).all()


def test_in_the_response(stored, make_prompt):
    llm, model_dtype, storage_dtype, _ = stored
    prompt = make_prompt(90)
    file, inline = llm.generate(
        [prompt, prompt], [sampling(), sampling(return_inline=True)]
    )
    path = file.kv_transfer_params["hidden_states_path"]
    for dequantize in (False, True):
        loaded = load_hidden_states(path, 30, dequantize=dequantize)
        found = hidden_states(inline, dequantize=dequantize)
        assert set(found) == set(loaded)
        for name, tensor in loaded.items():
            assert torch.equal(
                found[name].contiguous().view(torch.uint8), tensor.view(torch.uint8)
            ), name
    told = inline.kv_transfer_params["hidden_states"]
    assert ("scales" in told) == (storage_dtype == "float8_e4m3")
    assert told["model_dtype"] == model_dtype


# Without an engine.


@pytest.mark.parametrize("dtype", [torch.float16, FLOAT8])
@pytest.mark.parametrize("value", [1e6, float("inf"), float("nan"), 65504.0, -70000.0])
def test_a_value_out_of_range_is_an_error(tmp_path, dtype, value):
    """What a narrower type cannot hold is never stored as something else."""
    path = str(tmp_path / "a.safetensors")
    ring = Ring(1, (4, 2, 8), dtype, torch.device("cpu"))
    request = SinkRequest(
        "request", path, np.arange(4), 4, (0, 1), 8, dtype, {}, torch.float32
    )
    layers = [torch.ones(4, 8), torch.ones(4, 8)]
    layers[1][2, 3] = value
    with ThreadPoolExecutor(1) as pool:
        sink = partial(FileSink, options=FileOptions())
        writer = RequestWriter(pool, request, sink)
        writer.open().result()
        slot = ring.acquire()
        span = Span("request", 0, 0, 4)
        slot.fill(layers, [span])
        writer.write(span, slot, 0)
        writer.finish(np.arange(4))
        writer.drain()
    assert ring.num_free == 1
    is_lost = not np.isfinite(value) or (dtype == torch.float16 and abs(value) > 65519)
    if not is_lost:
        loaded = load_hidden_states(path, dequantize=True)
        assert loaded["hidden_states"][2, 1, 3].item() == pytest.approx(value, rel=1e-6)
        return
    with pytest.raises(HiddenStatesError, match="out of the range of storage_dtype"):
        load_hidden_states(path)
    if dtype == torch.float16:
        assert "'bfloat16', 'float32' or 'auto'" in str(writer.failure)


def test_a_file_of_the_models_dtype_may_hold_anything(tmp_path):
    """Values that are not finite are the model's own, and stand as they are."""
    path = str(tmp_path / "a.safetensors")
    request = SinkRequest(
        "request", path, np.arange(1), 1, (0,), 8, torch.float16, {}, torch.float16
    )
    assert not request.is_narrower
