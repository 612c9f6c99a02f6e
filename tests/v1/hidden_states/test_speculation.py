# SPDX-License-Identifier: Apache-2.0
"""A real speculative method beside extraction: rows are those of accepted tokens.

The target has a vocabulary of eight tokens and often repeats itself, so that drafts are
right at times and wrong at times.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    load_hidden_states,
)
from vllm.v1.hidden_states.client import last_hidden_state

# The wiring is the same for all, and these columns take minutes.
pytestmark = pytest.mark.soak_in("V1 compiled", "V2 eager")

VOCAB_SIZE = 8
# The draft's layers are 1, 3 and 5: one is extracted too, two are not.
LAYER_IDS = [6, 3, 0, 4]
DRAFT_LAYERS = (1, 3, 5)
NUM_DRAFTED = 3
LENGTHS = [5, 64, 130, 9, 11]


def method(row: str, name: str, *marks: Any, asynchronous: bool = False) -> Any:
    return pytest.param(
        (name, asynchronous), id=row, marks=[pytest.mark.scenario(row), *marks]
    )


METHODS = [
    method("`eagle3` beside", "eagle3", pytest.mark.soak),
    method(
        "`eagle3` beside, asynchronous scheduling",
        "eagle3",
        asynchronous=True,
    ),
    method(
        "`ngram` beside, a real model",
        "ngram",
        pytest.mark.soak,
        pytest.mark.own_process("ngram"),  # see test_schedules.py
        pytest.mark.without(
            "V2 eager",
            "Triton's interpreter does not run vLLM's ngram kernel: "
            "InterpreterError: ValueError('mask has unsupported dtype')",
        ),
    ),
]


@pytest.fixture(scope="module")
def target(engines, tmp_path_factory):
    make = engines.import_file(engines.EXAMPLES / "tiny_model.py").make_tiny_model
    return str(make(tmp_path_factory.mktemp("target"), vocab_size=VOCAB_SIZE))


@pytest.fixture(scope="module")
def draft(engines, target, tmp_path_factory):
    file = engines.ROOT / "tests" / "models" / "eagle3_draft.py"
    make = engines.import_file(file).make_eagle3_draft
    return make(tmp_path_factory.mktemp("draft"), target, DRAFT_LAYERS)


def generate(llm, make_prompt, **kv_transfer_params):
    prompts = [
        {
            "prompt_token_ids": [
                token % VOCAB_SIZE for token in make_prompt(length)["prompt_token_ids"]
            ]
        }
        for length in LENGTHS
    ]
    sampling = SamplingParams(
        temperature=0,
        max_tokens=24,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": kv_transfer_params},
    )
    return llm.generate(prompts, sampling, use_tqdm=False)


def generate_last(llm, make_prompt):
    """Requests for a vector, each between two ordinary ones that are drafted for."""
    prompts = [
        {
            "prompt_token_ids": [
                token % VOCAB_SIZE for token in make_prompt(length)["prompt_token_ids"]
            ]
        }
        for length in LENGTHS
        for _ in range(2)
    ]
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=1 if asks else 24,
            ignore_eos=True,
            detokenize=False,
            extra_args={
                "kv_transfer_params": {
                    "return_last_hidden_state": asks,
                    "extract_hidden_states": False,
                }
            },
        )
        for _ in LENGTHS
        for asks in (True, False)
    ]
    return llm.generate(prompts, sampling, use_tqdm=False)


def count_drafts(llm) -> list[tuple[int, int]]:
    """Notes, for each draft that is checked from now on: drafted, accepted."""
    drafts: list[tuple[int, int]] = []
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    note = scheduler.make_spec_decoding_stats

    def make_spec_decoding_stats(*args, **kwargs):
        drafts.append((kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"]))
        return note(*args, **kwargs)

    scheduler.make_spec_decoding_stats = make_spec_decoding_stats
    return drafts


@pytest.fixture(scope="module", params=METHODS)
def runs(
    request,
    column,
    engines,
    target,
    draft,
    make_prompt,
    reference_of,
    reference_last_of,
    tmp_path_factory,
):
    """The same prompts with the method alone, and with extraction beside it."""
    name, asynchronous = request.param
    speculative = {"method": name, "num_speculative_tokens": NUM_DRAFTED}
    if name == "eagle3":
        speculative["model"] = draft
    else:
        speculative |= {"prompt_lookup_max": 3}
    settings = engines.column_settings(column) | {
        "skip_tokenizer_init": True,
        "speculative_config": speculative,
    }
    extracting = engines.extraction(LAYER_IDS, tmp_path_factory.mktemp("storage"))
    options = extracting["kv_transfer_config"]["kv_connector_extra_config"]
    options["layer_ids"] = LAYER_IDS
    with contextlib.ExitStack() as stack:
        if asynchronous:
            stack.enter_context(engines.asynchronous_scheduling())
        with engines.running_engine(target, **(extracting | settings)) as llm:
            assert llm.llm_engine.vllm_config.speculative_config.method == name
            drafts = count_drafts(llm)
            prompt_only = generate(llm, make_prompt)
            with_output = generate(llm, make_prompt, include_output_tokens=True)
            last = generate_last(llm, make_prompt)
        plain = None
        if "ngram" not in name:  # a second engine cannot start beside numba
            with engines.running_engine(target, **settings) as llm:
                plain = generate(llm, make_prompt)
    return SimpleNamespace(
        prompt_only=prompt_only,
        with_output=with_output,
        last=last,
        plain=plain,
        reference_last=reference_last_of(target),
        drafts=drafts,
        rows=reference_of(target),
    )


def check(output, token_ids, rows) -> None:
    loaded = load_hidden_states(
        output.kv_transfer_params["hidden_states_path"], timeout=10
    )
    assert loaded["token_ids"].tolist() == token_ids
    expected = rows(token_ids)[:, LAYER_IDS]
    torch.testing.assert_close(loaded["hidden_states"], expected, atol=1e-5, rtol=1e-5)


def test_rows_are_those_of_accepted_tokens(runs):
    for output in runs.with_output:
        token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
        check(output, token_ids, runs.rows)
    for output in runs.prompt_only:
        check(output, output.prompt_token_ids, runs.rows)


def test_drafts_were_accepted_and_rejected(runs):
    """Otherwise the test above would show nothing."""
    drafted = sum(num_drafted for num_drafted, _ in runs.drafts)
    accepted = sum(num_accepted for _, num_accepted in runs.drafts)
    assert 0 < accepted < drafted


def test_output_is_that_of_the_method_alone(runs):
    expected = runs.plain or runs.prompt_only
    for output, other in zip(runs.with_output, expected, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.last_hidden_state
def test_last_hidden_states_are_the_targets_own(runs):
    """Of the step that computed the prompt's last token, before anything is drafted."""
    for number, output in enumerate(runs.last):
        if number % 2:
            expected = runs.prompt_only[number // 2].outputs[0].token_ids
            assert output.outputs[0].token_ids == expected
            continue
        vector = torch.from_numpy(last_hidden_state(output))
        expected = runs.reference_last(list(output.prompt_token_ids))
        torch.testing.assert_close(vector, expected, atol=1e-5, rtol=1e-5)
