# SPDX-License-Identifier: Apache-2.0
"""The pages' and the examples' clients, all of one server that a page starts."""

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

ONLINE = "examples/features/speculative_decoding/extract_hidden_states_online.py"
CLIENT = "examples/online_serving/last_hidden_state_client.py"


@pytest.fixture(autouse=True)
def leave_no_files(runner: Any) -> Iterator[None]:
    """This server extracts; who asks for a vector alone does not read the file."""
    before = set(runner.files.glob("*cmpl-*"))
    yield
    for path in set(runner.files.glob("*cmpl-*")) - before:
        path.unlink()


def test_online_program_of_the_feature(docs: Any, server: Any) -> None:
    block = next(b for b in docs.read_blocks(docs.FEATURE_PAGE) if "OpenAI" in b.text)
    assert "torch.Size([9, 4, 128])" in server.run_python(block)
    assert not list(server.files.glob("cmpl-*")), "the program has cleaned up"


def test_rows_in_the_response(docs: Any, server: Any) -> None:
    (block,) = (b for b in docs.read_blocks(docs.FEATURE_PAGE) if "_inline" in b.text)
    assert server.run_python(block) == "torch.Size([9, 4, 128])\n"


def test_online_example(docs: Any, server: Any) -> None:
    command = [sys.executable, str(docs.ROOT / ONLINE)]
    url = f"http://localhost:{server.port}/v1"
    output = server.run([*command, "--base-url", url], "the online example")
    assert output.count("4, 128] torch.") == 3
    assert "chat: 'Where does the river end?'" in output
    assert not list(server.files.glob("*cmpl-*")), "the example has cleaned up"


def test_client_programs_of_the_last_hidden_state(docs: Any, server: Any) -> None:
    """One with vLLM's function, one without; here from a server that extracts too."""
    with_vllm, without = (
        block for block in docs.read_blocks(docs.LAST_PAGE) if "OpenAI" in block.text
    )
    output = server.run_python(with_vllm)
    assert output.startswith("(128,)\n{'position': ")
    assert "'representation': 'post_norm'" in output
    assert re.search(r"^\[\[ ?(1\.|0\.99)", output, re.M)
    assert server.run_python(without) == "(128,)\n"


def test_client_of_the_last_hidden_state(docs: Any, server: Any) -> None:
    command = [sys.executable, str(docs.ROOT / CLIENT)]
    url = f"http://localhost:{server.port}/v1"
    output = server.run([*command, "--base-url", url], "the client")
    assert output.count("(128,) of position") == 2
    assert re.search(r"^cosines of 3 texts:\n\[\[ ?1\.", output, re.M)
