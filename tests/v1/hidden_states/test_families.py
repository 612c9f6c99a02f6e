# SPDX-License-Identifier: Apache-2.0
"""Model families: tiny random checkpoints against the model's own logprobs, and
against Transformers.

Layers are asked for out of order, with the first and the last id; families that
cannot hand over the first (layer id 0, the embeddings) are asked for the others.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import columns
from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    load_hidden_states,
)
from vllm.v1.hidden_states.client import last_hidden_state

# Prompts of one token, of one chunk, and of three.
LENGTHS = [1, 20, 70]
CHUNK = 32

# vLLM's class imports torchvision, which is not a dependency of the CPU build.
NEEDS_TORCHVISION = pytest.mark.own_process("torchvision")
# Columns that `make soak` runs, to keep the time of `make test`.
SLOW = ("V1 compiled", "V2 eager")

CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %} <image> {% endif %}"
    "{% endfor %}{% endfor %} word3"
)

# How the rows of vLLM's and of Transformers' implementation agree.
EXACT = "all rows, to 1e-4"
# In bfloat16, where an expert chosen otherwise makes another row.
ROUGH = "the middle one of the rows, to a tenth of its length"
# Their latent attention differs by more than rounding, from the second token on.
FIRST_POSITION = "the first position's rows, to a tenth of their length"


@dataclass(frozen=True)
class Case:
    """How a family is tested.

    Args:
        name: In tests/models/tiny_families.py.
        row: Of the table of scenarios, where it is not the name.
        agreement: With Transformers.
        has_embeddings: Whether layer id 0 can be asked for.
        settings: Of the engine.
        marks: Of its tests.
        has_images: Whether it takes images, and chats about them.
        soak: Columns that `make soak` runs, to keep the time of `make test`.
    """

    name: str
    row: str = ""
    agreement: str = EXACT
    has_embeddings: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    marks: tuple[Any, ...] = ()
    has_images: bool = False
    soak: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether it computes in float32."""
        return "dtype" not in self.settings


CASES = [
    Case("Llama", soak=SLOW),
    Case("Qwen2", soak=("V1 eager", *SLOW)),  # Llama and Qwen3 are like it
    Case("Qwen3", soak=SLOW),
    Case(
        "Gemma3",
        row="Gemma3 (`model_impl=transformers`)",
        has_embeddings=False,
        settings={"model_impl": "transformers"},
        soak=SLOW,
    ),
    Case("gpt-oss", soak=SLOW),
    Case("Qwen3-MoE", soak=SLOW),
    Case(
        "DeepSeek-V2",
        "DeepSeek-V2 (MLA)",
        FIRST_POSITION,
        soak=("V1 eager", *SLOW),
    ),
    Case("DeepSeek-V3", "DeepSeek-V3 (MLA)", FIRST_POSITION, soak=SLOW),
    # On a CPU the gated delta net "requires BF16".
    Case(
        "Qwen3-Next",
        "Qwen3-Next (hybrid)",
        ROUGH,
        settings={"dtype": "bfloat16"},
        soak=SLOW,
    ),
    Case(
        "Qwen3.5",
        "Qwen3.5 (hybrid)",
        ROUGH,
        settings={"dtype": "bfloat16"},
        marks=(NEEDS_TORCHVISION,),
        soak=SLOW,
    ),
    Case("NemotronH", "NemotronH (Mamba2 and attention)", soak=SLOW),
    Case(
        "LLaVA",
        "LLaVA, an image in the prompt",
        settings={"skip_tokenizer_init": False},
        marks=(NEEDS_TORCHVISION,),
        soak=SLOW,
        has_images=True,
    ),
]


def pytest_generate_tests(metafunc: Any) -> None:
    """Rows times columns; not by two fixtures, since marks are of the pair."""
    if "refusal" in metafunc.fixturenames:
        pairs = [
            pytest.param(
                row, column, id=f"{row} {column}", marks=marks_of(row, column, SLOW)
            )
            for row in REFUSALS
            for column in columns.COLUMNS
        ]
        metafunc.parametrize(
            ("refusal", "column"), pairs, indirect=["column"], scope="module"
        )
    elif "engine" in metafunc.fixturenames:
        pairs = [
            pytest.param(
                case,
                column,
                id=f"{case.name} {column}",
                marks=[
                    *marks_of(case.row or case.name, column, case.soak),
                    *case.marks,
                ],
            )
            for case in CASES
            if case.has_images or "chat_outputs" not in metafunc.fixturenames
            for column in columns.COLUMNS
        ]
        metafunc.parametrize(("engine", "column"), pairs, indirect=True, scope="module")


def marks_of(row: str, column: str, soak: tuple[str, ...] = ()) -> list[Any]:
    """The marks of a cell of the table."""
    marks: list[Any] = [pytest.mark.scenario(f"family: {row}")]
    if column == "V2 compiled":
        marks.append(columns.GPU_ONLY)
    if column in soak:
        marks.append(pytest.mark.soak)
    return marks


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
        reference = families.load_reference(name, path)
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
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0,
            logprobs=0,
            detokenize=False,
            extra_args={"kv_transfer_params": {"return_last_hidden_state": True}},
        )
        last_outputs = llm.generate(family.prompts, sampling, use_tqdm=False)
        chat_outputs = []
        if families.FAMILIES[case.name].has_images:
            for image, text in ((True, "word7 word8"), (False, "word7 word8 word9")):
                content = [{"type": "text", "text": text}]
                if image:
                    url = {"url": families.as_url(families.make_image())}
                    content.insert(0, {"type": "image_url", "image_url": url})
                chat_outputs += llm.chat(
                    [{"role": "user", "content": content}],
                    sampling,
                    chat_template=CHAT_TEMPLATE,
                    use_tqdm=False,
                )
    return SimpleNamespace(
        case=case,
        family=family,
        layer_ids=layer_ids,
        outputs=outputs,
        files=files,
        last_outputs=last_outputs,
        chat_outputs=chat_outputs,
        image=families.make_image(),
    )


def test_rows_are_those_of_transformers(engine):
    rows = torch.cat([file["hidden_states"].float() for file in engine.files])
    expected = torch.cat(engine.family.rows)[:, engine.layer_ids]
    token_ids = [file["token_ids"].tolist() for file in engine.files]
    assert token_ids == engine.family.token_ids
    if engine.case.agreement == EXACT:
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)
        return
    # Of each row its distance, in lengths of the row; one layer further it is 0.3.
    errors = (rows - expected).norm(dim=-1) / expected.norm(dim=-1)
    if engine.case.agreement == FIRST_POSITION:
        firsts = [0, *accumulate(len(ids) for ids in token_ids[:-1])]
        assert errors[firsts].max() < 0.1
    else:
        assert errors.median(dim=0).values.max() < 0.1


def test_last_rows_give_the_models_own_logprobs(engine):
    tolerance = 1e-4 if engine.case.is_exact else 0.05
    for output, file in zip(engine.outputs, engine.files, strict=True):
        logprobs = engine.family.reference.logprobs(file["hidden_states"][:, 0].float())
        token_ids = [*output.prompt_token_ids, output.outputs[0].token_ids[0]]
        own = [*output.prompt_logprobs, output.outputs[0].logprobs[0]]
        assert len(logprobs) == len(token_ids) - 1
        for position, (token, entries) in enumerate(
            zip(token_ids[1:], own[1:], strict=True)
        ):
            assert logprobs[position, token].item() == pytest.approx(
                entries[token].logprob, abs=tolerance
            )


@pytest.mark.last_hidden_state
@pytest.mark.scenario("extraction in the same request")
def test_the_last_hidden_state_gives_the_first_tokens_logprob(engine):
    """And is the norm of the last extracted row; both in one request."""
    tolerance = 1e-4 if engine.case.is_exact else 0.05
    reference = engine.family.reference
    for output, rows in zip(engine.last_outputs, engine.family.rows, strict=True):
        vector = torch.from_numpy(last_hidden_state(output))
        logprobs = torch.log_softmax(reference.model.lm_head(vector).detach(), dim=-1)
        ((token, own),) = output.outputs[0].logprobs[0].items()
        assert logprobs[token].item() == pytest.approx(own.logprob, abs=tolerance)
        path = output.kv_transfer_params["hidden_states_path"]
        extracted = load_hidden_states(path, timeout=10)["hidden_states"]
        normed = reference.norm(extracted[-1, 0].float()).detach()
        torch.testing.assert_close(vector, normed, atol=tolerance, rtol=tolerance)
        if engine.case.agreement == EXACT:
            expected = reference.norm(rows[-1, -1]).detach()
            torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-4)
            cosine = torch.cosine_similarity(vector, expected, dim=0)
            assert cosine > 0.99999


@pytest.fixture
def chat_outputs(engine):
    """Of a chat with an image and one without; families without images have none."""
    return engine.chat_outputs


@pytest.mark.soak
@pytest.mark.last_hidden_state
def test_the_last_hidden_state_of_a_chat(engine, chat_outputs):
    """Of the rendered prompt, its image's tokens and the template's among them."""
    for output, image in zip(chat_outputs, (engine.image, None), strict=True):
        token_ids = list(output.prompt_token_ids)
        reference = engine.family.reference
        expected = reference.norm(reference.rows(token_ids, image)[-1, -1]).detach()
        vector = torch.from_numpy(last_hidden_state(output))
        torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-4)


REFUSALS = {
    "Gemma3": ("Gemma3", [1], {}, "Gemma3ForCausalLM cannot expose.*model_impl"),
    "Gemma3 (`model_impl=transformers`), layer id 0": (
        "Gemma3",
        [1, 0],
        {"model_impl": "transformers"},
        r"cannot hand over layers \[0, 1\].*some classes lack the first",
    ),
    "LLaVA (`model_impl=transformers`)": (
        "LLaVA",
        [1],
        {"model_impl": "transformers", "skip_tokenizer_init": False},
        "TransformersMultiModal.*hands over none.*--model-impl vllm",
    ),
}


@pytest.mark.refused
def test_refused_by_name_at_start_up(refusal, column, engines, prepare, tmp_path):
    name, layer_ids, settings, message = REFUSALS[refusal]
    settings = {
        "skip_tokenizer_init": True,
        **engines.extraction(layer_ids, tmp_path / "storage"),
        **engines.column_settings(column),
        **settings,
    }
    try:
        with (
            pytest.raises(ValueError, match=message),
            engines.running_engine(prepare(name).path, **settings),
        ):
            pass
    finally:
        # vLLM leaves the groups of an engine that did not start, and gives them to the
        # next one: without experts, where that one has some.
        cleanup_dist_env_and_memory()
