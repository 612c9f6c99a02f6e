# SPDX-License-Identifier: Apache-2.0
"""The last hidden state through vLLM's Rust front end: same request, same response.

Its program comes with the stock CUDA wheel and needs no GPU; the engine is this one.
"""

import zipfile
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import torch

from series.stock import find_stock
from vllm.v1.hidden_states.client import last_hidden_state

pytestmark = [
    pytest.mark.last_hidden_state,
    pytest.mark.starts_processes,
    pytest.mark.soak_in("V1 compiled", "V2 eager"),
]

TEXT = "A river starts as rain on a hill."
CHAT = [{"role": "user", "content": TEXT}]
FLAG = "return_last_hidden_state"
PROGRAM = "vllm/vllm-rs"


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """The front end, out of the stock CUDA wheel of this release."""
    folder = tmp_path_factory.mktemp("rust")
    with zipfile.ZipFile(find_stock("cuda")) as wheel:
        path = Path(wheel.extract(PROGRAM, folder))
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def served(column, program, engines, tiny_model, tmp_path_factory):
    server = engines.import_file(Path(__file__).with_name("server.py"))
    folder = tmp_path_factory.mktemp("served")
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    if column.startswith("V2"):
        variables = engines.columns.v2_environment(folder / "stub")
    options = ["--enforce-eager"] if column.endswith("eager") else []
    variables |= {
        "VLLM_USE_RUST_FRONTEND": "1",
        "VLLM_RUST_FRONTEND_PATH": str(program),
    }
    with server.serving(tiny_model, folder, *options, **variables) as running:
        assert "RustFrontend" in running.log.read_text(errors="replace")
        yield SimpleNamespace(
            client=openai.OpenAI(
                base_url=f"http://localhost:{running.port}/v1",
                api_key="EMPTY",
                max_retries=0,
            ),
            server=running,
            model=tiny_model,
        )


@pytest.fixture
def ask(served):
    """A completion, or a chat completion where there is no prompt."""

    def ask(options, prompt=None, **fields):
        client = served.client
        fields = {"model": served.model, "max_tokens": 1, "temperature": 0} | fields
        body = {"kv_transfer_params": options, "return_token_ids": True}
        if prompt is None:
            return client.chat.completions.create(
                messages=CHAT, extra_body=body, **fields
            )
        return client.completions.create(prompt=prompt, extra_body=body, **fields)

    return ask


@pytest.mark.scenario("Rust front end: same request, same response")
@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_same_response(ask, reference_last, encoding_format):
    options = {FLAG: True, "encoding_format": encoding_format}
    limits = {"max_tokens": 9, "max_completion_tokens": 1}
    token_ids = list(range(7, 107))
    cases = [
        (chat := ask(options), chat.prompt_token_ids),
        (chat := ask(options, **limits), chat.prompt_token_ids),
        (text := ask(options, TEXT), text.choices[0].prompt_token_ids),
        (ask(options, token_ids), token_ids),
    ]
    for response, prompt in cases:
        vector = torch.from_numpy(last_hidden_state(response))
        torch.testing.assert_close(
            vector, reference_last(list(prompt)), atol=1e-4, rtol=1e-4
        )
        told = response.model_extra["kv_transfer_params"]
        assert told["last_hidden_state_metadata"] == {
            "position": len(prompt) - 1,
            "layer": 6,
            "representation": "post_norm",
            "normalized": False,
            "dtype": "float32",
            "encoding_format": encoding_format,
            "hidden_size": 128,
        }
        assert response.choices[0].finish_reason == "length"


@pytest.mark.scenario("Rust front end: ordinary requests")
def test_ordinary_requests(served, ask):
    for flag in (False, None, 0):
        response = ask({FLAG: flag}, TEXT, max_tokens=3)
        assert response.usage.completion_tokens == 3
        assert response.model_extra["kv_transfer_params"] is None
    assert "no KVConnector found" not in served.server.log.read_text(errors="replace")


@pytest.mark.scenario("Rust front end: the engine refuses, in the same words")
@pytest.mark.refused
@pytest.mark.parametrize(
    ("options", "fields", "words"),
    [
        ({FLAG: 1}, {}, "return_last_hidden_state 1: not a boolean; valid: true"),
        ({FLAG: True, "encoding_format": "x"}, {}, "encoding_format 'x': valid: 'floa"),
        ({FLAG: True, "normalize": 1}, {}, "normalize 1: not a boolean"),
        ({FLAG: True}, {"max_tokens": 5}, "max_tokens 5: .*valid: 1"),
        ({"return_last_hidden": True}, {}, "did you mean 'return_last_hidden_state'"),
    ],
)
def test_refusals(served, ask, options, fields, words):
    """It passes an error on as a failed request without a word, so the request ends
    as if aborted, with the words where the vector would be."""
    for prompt in (None, TEXT):
        response = ask(options, prompt, **fields)
        assert response.choices[0].finish_reason == "abort"
        assert response.usage.completion_tokens == 0
        with pytest.raises(LookupError, match=words):
            last_hidden_state(response)
    served.server.get("/health")
    assert ask({}, TEXT).usage.completion_tokens == 1


@pytest.mark.scenario("Rust front end: several choices")
@pytest.mark.refused
def test_several_choices(ask):
    with pytest.raises(openai.BadRequestError, match="n=1"):
        ask({FLAG: True}, n=2)
