# SPDX-License-Identifier: Apache-2.0
"""On a GPU the fused add and norm writes into its inputs. The residual that it writes
into was the first layer's input: layer id 0 must have been saved from it.

No such kernel runs on a CPU, so an in-place implementation is registered here."""

import pytest
import torch

from vllm import SamplingParams, ir
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    load_hidden_states,
)

NAME = "in_place_for_tests"


@pytest.fixture(scope="module")
def in_place_norm():
    operation = ir.ops.fused_add_rms_norm
    native = operation.impls["native"].impl_fn

    calls = []

    @operation.register_impl(NAME, inplace=True)
    def in_place(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, residual = native(x, x_residual, weight, epsilon, variance_size)
        calls.append(len(x))
        x.copy_(output)
        x_residual.copy_(residual)
        return x, x_residual

    yield calls
    del operation.impls[NAME]


@pytest.mark.parametrize(
    "enforce_eager",
    [True, pytest.param(False, marks=pytest.mark.soak)],
    ids=["eager", "compiled"],
)
def test_the_embeddings_are_saved_from_the_first_norm(
    engines,
    tiny_model,
    tmp_path,
    make_prompt,
    reference_rows,
    in_place_norm,
    enforce_eager,
):
    with engines.running_engine(
        tiny_model,
        enforce_eager=enforce_eager,
        kernel_config={"ir_op_priority": {"fused_add_rms_norm": [NAME, "native"]}},
        **engines.extraction([0, 1, 6], tmp_path),
    ) as llm:
        prompt = make_prompt(100)
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    if enforce_eager:
        assert in_place_norm  # it did run
    rows = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
    expected = reference_rows(prompt["prompt_token_ids"])[:, [0, 1, 6]]
    torch.testing.assert_close(rows["hidden_states"], expected, atol=1e-5, rtol=1e-5)
