# SPDX-License-Identifier: Apache-2.0
"""Model families: tiny random checkpoints against the model's own logprobs, and
against Transformers.

Layers are asked for out of order, with the first and the last id; families that
cannot hand over the first (layer id 0, the embeddings) are asked for the others.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import columns
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    load_hidden_states,
)

# Prompts of one token, of one chunk, and of three.
LENGTHS = [1, 20, 70]
CHUNK = 32

# vLLM's class imports torchvision, which is not a dependency of the CPU build.
NEEDS_TORCHVISION = pytest.mark.own_process("torchvision")
COMPILED = ("V1 compiled",)


@dataclass(frozen=True)
class Case:
    """How a family is tested.

    Args:
        name: In tests/models/tiny_families.py.
        row: Of the table of scenarios, where it is not the name.
        tolerance: Of rows against Transformers.
        has_embeddings: Whether layer id 0 can be asked for.
        settings: Of the engine.
        marks: Of its tests.
        soak: Columns that `make soak` runs, to keep the time of `make test`.
    """

    name: str
    row: str = ""
    tolerance: float = 1e-4
    has_embeddings: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    marks: tuple[Any, ...] = ()
    soak: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether it computes in float32."""
        return "dtype" not in self.settings


CASES = [
    Case("Llama", soak=COMPILED),
    Case("Qwen2", soak=COMPILED),
    Case("Qwen3"),
    Case(
        "Gemma3",
        row="Gemma3 (`model_impl=transformers`)",
        has_embeddings=False,
        settings={"model_impl": "transformers"},
        soak=COMPILED,
    ),
    Case("gpt-oss", soak=COMPILED),
    Case("Qwen3-MoE"),
    # Transformers differs by more than rounding, the logprobs do not.
    Case("DeepSeek-V2", "DeepSeek-V2 (MLA)", 0.1, has_embeddings=False, soak=COMPILED),
    Case("DeepSeek-V3", "DeepSeek-V3 (MLA)", 0.1, has_embeddings=False),
    # On a CPU the gated delta net "requires BF16".
    Case(
        "Qwen3-Next",
        "Qwen3-Next (hybrid)",
        0.1,
        settings={"dtype": "bfloat16"},
        soak=COMPILED,
    ),
    Case(
        "Qwen3.5",
        "Qwen3.5 (hybrid)",
        0.1,
        settings={"dtype": "bfloat16"},
        marks=(NEEDS_TORCHVISION,),
        soak=COMPILED,
    ),
    Case("NemotronH", "NemotronH (Mamba2 and attention)"),
    Case(
        "LLaVA",
        "LLaVA, an image in the prompt",
        settings={"skip_tokenizer_init": False},
        marks=(NEEDS_TORCHVISION,),
        soak=COMPILED,
    ),
]


def pytest_generate_tests(metafunc: Any) -> None:
    """Families times columns; not by two fixtures, since marks are of the pair."""
    if "engine" not in metafunc.fixturenames:
        return
    pairs = []
    for case in CASES:
        for column in columns.COLUMNS:
            marks = [pytest.mark.scenario(f"family: {case.row or case.name}")]
            marks += case.marks
            if column == "V2 compiled":
                marks.append(columns.GPU_ONLY)
            if column in case.soak:
                marks.append(pytest.mark.soak)
            pairs.append(
                pytest.param(case, column, id=f"{case.name} {column}", marks=marks)
            )
    metafunc.parametrize(("engine", "column"), pairs, indirect=True, scope="module")


@pytest.fixture(scope="session")
def families(engines):
    """The module that makes the checkpoints."""
    return engines.import_file(engines.ROOT / "tests/models/tiny_families.py")


@pytest.fixture(scope="session")
def prepare(families, tmp_path_factory):
    """A family's checkpoint, its prompts, and what Transformers makes of them.

    Once a process and before its engine: ``model_impl="transformers"`` changes
    Transformers' classes, so that they run within vLLM alone.
    """
    prepared: dict[str, SimpleNamespace] = {}

    def prepare_family(name):
        if name in prepared:
            return prepared[name]
        path = families.make_family(name, tmp_path_factory.mktemp("model"))
        has_images = families.FAMILIES[name].has_images
        if has_images:
            families.import_torchvision()
        reference = families.Reference(name, path)
        prompts, token_ids, rows = [], [], []
        for seed, length in enumerate(LENGTHS):
            generator = torch.Generator().manual_seed(seed)
            text = torch.randint(
                len(families.SPECIAL_TOKENS),
                families.VOCAB_SIZE,
                (length,),
                generator=generator,
            ).tolist()
            prompt: dict[str, Any] = {"prompt_token_ids": text}
            image = families.make_image(seed) if has_images and length > 1 else None
            expanded = text
            if image is not None:
                before, after = text[: length // 2], text[length // 2 :]
                place = [families.IMAGE_TOKEN_ID]
                prompt["prompt_token_ids"] = before + place + after
                prompt["multi_modal_data"] = {"image": image}
                expanded = before + place * families.TOKENS_PER_IMAGE + after
            prompts.append(prompt)
            token_ids.append(expanded)
            rows.append(reference.rows(expanded, image))
        prepared[name] = SimpleNamespace(
            path=path,
            reference=reference,
            prompts=prompts,
            token_ids=token_ids,
            rows=rows,
        )
        return prepared[name]

    return prepare_family


@pytest.fixture(scope="module")
def column(request):
    return request.param


@pytest.fixture(scope="module")
def engine(request, column, engines, families, prepare, tmp_path_factory):
    """What came of a batch of prompts."""
    case = request.param
    if NEEDS_TORCHVISION in case.marks:
        families.import_torchvision()
    family = prepare(case.name)
    last = family.reference.num_layers
    layer_ids = [last, 0, 2, 1] if case.has_embeddings else [last, 2, 1]
    settings = {
        "max_num_batched_tokens": CHUNK,
        "skip_tokenizer_init": True,
        **engines.extraction(layer_ids, tmp_path_factory.mktemp("storage")),
        **engines.column_settings(column),
        **case.settings,
    }
    with engines.running_engine(family.path, **settings) as llm:
        assert llm.llm_engine.vllm_config.use_v2_model_runner == ("V2" in column)
        # Decode tokens of the short prompts stand beside the chunks of the long one.
        outputs = llm.generate(
            family.prompts,
            SamplingParams(
                max_tokens=3,
                temperature=0,
                ignore_eos=True,
                prompt_logprobs=0,
                logprobs=0,
                detokenize=False,
            ),
            use_tqdm=False,
        )
        files = [
            load_hidden_states(
                output.kv_transfer_params["hidden_states_path"], timeout=10
            )
            for output in outputs
        ]
    return SimpleNamespace(
        case=case, family=family, layer_ids=layer_ids, outputs=outputs, files=files
    )


def test_rows_are_those_of_transformers(engine):
    worst = max(
        (file["hidden_states"].float() - rows[:, engine.layer_ids]).abs().max().item()
        for rows, file in zip(engine.family.rows, engine.files, strict=True)
    )
    print("ROWS", engine.case.name, worst)
    for token_ids, rows, file in zip(
        engine.family.token_ids, engine.family.rows, engine.files, strict=True
    ):
        assert file["token_ids"].tolist() == token_ids
        torch.testing.assert_close(
            file["hidden_states"].float(),
            rows[:, engine.layer_ids],
            atol=engine.case.tolerance,
            rtol=engine.case.tolerance,
        )


def test_last_rows_give_the_models_own_logprobs(engine):
    tolerance = 1e-4 if engine.case.is_exact else 0.05
    worst = 0
    for output, file in zip(engine.outputs, engine.files, strict=True):
        logprobs = engine.family.reference.logprobs(file["hidden_states"][:, 0].float())
        token_ids = [*output.prompt_token_ids, output.outputs[0].token_ids[0]]
        own = [*output.prompt_logprobs, output.outputs[0].logprobs[0]]
        assert len(logprobs) == len(token_ids) - 1
        for position, (token, entries) in enumerate(
            zip(token_ids[1:], own[1:], strict=True)
        ):
            worst = max(
                worst, abs(logprobs[position, token].item() - entries[token].logprob)
            )
            assert logprobs[position, token].item() == pytest.approx(
                entries[token].logprob, abs=tolerance
            )
    print("LOGP", engine.case.name, worst)
