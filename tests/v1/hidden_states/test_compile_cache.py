# SPDX-License-Identifier: Apache-2.0
"""Two compiled engines with different layer ids, in one cache directory."""

import torch

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    load_hidden_states,
)


def test_engines_with_other_layers_do_not_share_a_graph(
    engines, constant_layers, make_prompt, tmp_path, monkeypatch
):
    """Both ask for one layer: a graph of the first would return its layer."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    model = constant_layers.make_constant_layers_model(tmp_path / "model")
    prompt = make_prompt(50)
    token_ids = torch.tensor(prompt["prompt_token_ids"])
    for layer in (1, 4):
        with engines.running_engine(
            model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=False,
            **engines.extraction([layer], tmp_path),
        ) as llm:
            (output,) = llm.generate(
                [prompt], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False
            )
        loaded = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
        known = constant_layers.known_rows(layer, torch.arange(50), token_ids)
        assert torch.equal(loaded["hidden_states"][:, 0], known)
