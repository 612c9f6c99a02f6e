# SPDX-License-Identifier: Apache-2.0
"""LoRA: the rows of a request with an adapter are those of the adapted model.

Two adapters and none in one batch, against Transformers with the adapters' products
added to its weights. Layer id 0 is adapted too: one of the adapters changes the
embeddings.
"""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    load_hidden_states,
)
from vllm.lora.request import LoRARequest
from vllm.v1.hidden_states.client import last_hidden_state

# Compiled, and by Triton's interpreter, it takes minutes.
pytestmark = pytest.mark.soak_in("V1 compiled", "V2 eager")

ROW = pytest.mark.scenario("LoRA: rows are the adapted model's")

RANK = 4
ALPHA = 8
LINEAR = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EMBEDDINGS = "embed_tokens"
ADAPTERS = {"layers": LINEAR, "layers and embeddings": [*LINEAR, EMBEDDINGS]}


def make_adapter(path: Path, model: Any, targets: list[str], seed: int) -> Any:
    """Write a random adapter in PEFT's format; returns the model with it merged in."""
    generator = torch.Generator().manual_seed(seed)
    adapted = copy.deepcopy(model)
    weights = {}
    for name, module in adapted.named_modules():
        if name.rpartition(".")[2] not in targets:
            continue
        is_embedding = name.endswith(EMBEDDINGS)
        num_in, num_out = module.weight.shape if is_embedding else module.weight.T.shape
        down = torch.randn(RANK, num_in, generator=generator) * 0.3
        up = torch.randn(num_out, RANK, generator=generator) * 0.1
        infix = "lora_embedding_" if is_embedding else "lora_"
        suffix = "" if is_embedding else ".weight"
        weights[f"base_model.model.{name}.{infix}A{suffix}"] = down
        weights[f"base_model.model.{name}.{infix}B{suffix}"] = up
        product = up @ down * (ALPHA / RANK)  # [num_out, num_in]
        module.weight.data += product.T if is_embedding else product
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": RANK,
                "lora_alpha": ALPHA,
                "target_modules": targets,
                "bias": "none",
            }
        )
    )
    return adapted


@pytest.fixture(scope="module")
def adapters(families, tmp_path_factory):
    """By name: path and merged model; under "" the model without an adapter."""
    folder = tmp_path_factory.mktemp("lora")
    path = families.make_family("Qwen3", folder / "model")
    plain = families.load_reference("Qwen3", path)
    found = {"": SimpleNamespace(path=path, reference=plain)}
    for seed, (name, targets) in enumerate(ADAPTERS.items()):
        adapter = folder / f"adapter{seed}"
        adapted = make_adapter(adapter, plain.model, targets, seed)
        found[name] = SimpleNamespace(
            path=str(adapter), reference=families.Reference(adapted)
        )
    return found


@pytest.fixture(scope="module")
def engine(column, engines, adapters, tmp_path_factory):
    layer_ids = [3, 0, 1]
    with engines.running_engine(
        adapters[""].path,
        skip_tokenizer_init=True,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        max_num_batched_tokens=32,
        **engines.extraction(layer_ids, tmp_path_factory.mktemp("storage")),
        **engines.column_settings(column),
    ) as llm:
        yield SimpleNamespace(llm=llm, layer_ids=layer_ids)


@ROW
def test_rows_are_those_of_the_adapted_model(engine, adapters, make_prompt):
    """The same prompts with each adapter and with none, in chunks, side by side."""
    names = [name for name in ["", *ADAPTERS] for _ in range(2)]
    prompts = [
        {"prompt_token_ids": [token % 500 for token in prompt["prompt_token_ids"]]}
        for prompt in [make_prompt(10), make_prompt(50)] * 3
    ]
    requests = [
        LoRARequest(name, 1 + list(ADAPTERS).index(name), adapters[name].path)
        if name
        else None
        for name in names
    ]
    outputs = engine.llm.generate(
        prompts,
        SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, detokenize=False),
        lora_request=requests,
        use_tqdm=False,
    )
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        token_ids = prompt["prompt_token_ids"]
        rows = load_hidden_states(
            output.kv_transfer_params["hidden_states_path"], timeout=10
        )["hidden_states"]
        expected = {
            other: adapter.reference.rows(token_ids)[:, engine.layer_ids]
            for other, adapter in adapters.items()
        }
        torch.testing.assert_close(rows, expected[name], atol=1e-4, rtol=1e-4)
        # The other models' rows are far from these.
        for other in set(adapters) - {name}:
            difference = (expected[other] - rows).abs().amax(dim=(0, 2))
            assert difference[0] > 0.1 and difference[2] > 0.1
            with_embeddings = "embeddings" in name or "embeddings" in other
            assert (difference[1] > 0.1) == with_embeddings


@pytest.mark.last_hidden_state
@pytest.mark.scenario("LoRA: the vector is the adapted model's")
def test_the_last_hidden_state_is_the_adapted_models(engine, adapters, make_prompt):
    prompt = [token % 500 for token in make_prompt(50)["prompt_token_ids"]]
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0,
        detokenize=False,
        extra_args={"kv_transfer_params": {"return_last_hidden_state": True}},
    )
    requests = [
        LoRARequest(name, number, adapters[name].path)
        for number, name in enumerate(ADAPTERS, 1)
    ]
    # Not in one batch: on a CPU, stock vLLM gives the tokens of a request without an
    # adapter that of the last slot (index -1), as soon as one is there.
    outputs = [
        output
        for batch in ([None], requests)
        for output in engine.llm.generate(
            [{"prompt_token_ids": prompt}] * len(batch),
            sampling,
            lora_request=batch,
            use_tqdm=False,
        )
    ]
    names = ["", *ADAPTERS]
    vectors = [torch.from_numpy(last_hidden_state(output)) for output in outputs]
    for name, vector in zip(names, vectors, strict=True):
        reference = adapters[name].reference
        expected = reference.norm(reference.rows(prompt)[-1, -1]).detach()
        torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-4)
    assert (vectors[0] - vectors[1]).abs().max() > 0.1
