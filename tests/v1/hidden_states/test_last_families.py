# SPDX-License-Identifier: Apache-2.0
"""The last hidden state of models of which no layers can be extracted, in another
dtype, and beside a drafter that is a layer of the model's own.

Families that are extracted too are in test_families.py.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm import SamplingParams
from vllm.v1.hidden_states.client import last_hidden_state

pytestmark = [
    pytest.mark.last_hidden_state,
    # `model_impl="transformers"`, in test_families.py, changes Transformers' classes
    # for the whole process: the references here would not run.
    pytest.mark.own_process("last families"),
    pytest.mark.soak_in("V1 compiled", "V2 eager"),
]

# Prompts of one token, of a chunk, of several.
LENGTHS = [1, 20, 70, 33]
DRAFTER = {"method": "mtp", "num_speculative_tokens": 1}


def case(row: str, family: str, *marks: Any, **settings: Any) -> Any:
    return pytest.param(
        (family, settings), id=row, marks=[pytest.mark.scenario(row), *marks]
    )


CASES = [
    case(
        "family: Gemma3, whose layers cannot be extracted", "Gemma3", pytest.mark.soak
    ),
    case("family: MiMo, which norms on the way to its head", "MiMo"),
    case("bfloat16", "Qwen3", dtype="bfloat16"),
    case("`mtp` speculation", "GLM4-MoE", speculative_config=DRAFTER),
]


@pytest.fixture(scope="module", params=CASES)
def engine(request, column, engines, families, tmp_path_factory):
    name, settings = request.param
    path = families.make_family(name, tmp_path_factory.mktemp("model"))
    reference = families.load_reference(name, path)
    if "speculative_config" in settings:
        families.add_mtp_layer(path, reference.num_layers)
    with engines.running_engine(
        path,
        skip_tokenizer_init=True,
        max_num_batched_tokens=32,
        **engines.column_settings(column),
        **settings,
    ) as llm:
        yield SimpleNamespace(
            llm=llm,
            reference=reference,
            is_exact="dtype" not in settings,
            drafts="speculative_config" in settings,
        )


def test_the_vector_is_that_of_transformers(engine, make_prompt):
    prompts = [
        [token % 500 for token in make_prompt(length)["prompt_token_ids"]]
        for length in LENGTHS
        for _ in range(2)
    ]
    # Ordinary requests stand beside, for which the drafter drafts.
    sampling = [
        SamplingParams(
            max_tokens=8 if number % 2 else 1,
            temperature=0,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            extra_args={
                "kv_transfer_params": {"return_last_hidden_state": number % 2 == 0}
            },
        )
        for number in range(len(prompts))
    ]
    drafted = []
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    note = scheduler.make_spec_decoding_stats

    def make_spec_decoding_stats(*args, **kwargs):
        drafted.append(kwargs["num_draft_tokens"])
        return note(*args, **kwargs)

    scheduler.make_spec_decoding_stats = make_spec_decoding_stats
    outputs = engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    assert bool(drafted) == engine.drafts
    head, norm = engine.reference.model.lm_head, engine.reference.norm
    for prompt, output in list(zip(prompts, outputs, strict=True))[::2]:
        vector = torch.from_numpy(last_hidden_state(output))
        expected = norm(engine.reference.rows(prompt)[-1, -1]).detach()
        cosine = torch.cosine_similarity(vector, expected, dim=0)
        ((token, own),) = output.outputs[0].logprobs[0].items()
        logprob = torch.log_softmax(head(vector).detach(), dim=-1)[token].item()
        if engine.is_exact:
            torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-4)
            assert cosine > 0.99999
            assert logprob == pytest.approx(own.logprob, abs=1e-4)
        else:
            assert cosine > 0.999
            assert logprob == pytest.approx(own.logprob, abs=0.05)
    for _, output in list(zip(prompts, outputs, strict=True))[1::2]:
        assert len(output.outputs[0].token_ids) == 8
        assert output.kv_transfer_params is None
