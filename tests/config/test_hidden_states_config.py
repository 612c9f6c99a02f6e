# SPDX-License-Identifier: Apache-2.0
"""A bad configuration is an error at start-up that names what would be valid."""

import json
import os

import pytest

from vllm.engine.arg_utils import EngineArgs

CONNECTOR = "ExampleHiddenStatesConnector"


def speculation(layer_ids) -> dict:
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}
        },
    }


@pytest.fixture(scope="module")
def make_config(tiny_model):
    from vllm.config import KVTransferConfig

    def make(speculative_config=None, options=None, model=tiny_model, **settings):
        kv_transfer = {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": options or {},
        } | settings.pop("kv_transfer", {})
        return EngineArgs(
            model=model,
            max_model_len=512,
            enforce_eager=True,
            speculative_config=speculative_config,
            kv_transfer_config=KVTransferConfig(**kv_transfer),
            **settings,
        ).create_engine_config()

    return make


def test_extraction_replaces_speculation(make_config):
    config = make_config(speculation([3, 0, 6]), {"shared_storage_path": "/tmp/x"})
    assert config.speculative_config is None
    assert config.num_speculative_tokens == 0
    assert config.hidden_states_config.layer_ids == (3, 0, 6)
    assert config.hidden_states_config.shared_storage_path == "/tmp/x"


def test_layer_ids_of_the_connector_leave_speculation_alone(make_config):
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    config = make_config(ngram, {"layer_ids": [1, 2]})
    assert config.speculative_config.method == "ngram"
    assert config.hidden_states_config.layer_ids == (1, 2)
    assert make_config(None, {"layer_ids": [1]}).speculative_config is None


def test_defaults(make_config):
    config = make_config(speculation([1])).hidden_states_config
    assert config.shared_storage_path == "/tmp"
    num_processors = len(os.sched_getaffinity(0))
    assert config.num_writer_threads == min(8, max(2, num_processors))
    assert config.use_synchronization_lock is True


def test_a_connector_of_the_stock_kv_group_keeps_the_stock_path(make_config):
    config = make_config(
        speculation([1, 2]), kv_transfer={"kv_connector": "ExampleConnector"}
    )
    assert config.hidden_states_config is None
    assert config.speculative_config.method == "extract_hidden_states"


def test_a_plain_engine_has_no_hidden_states_config(tiny_model):
    config = EngineArgs(model=tiny_model, max_model_len=512).create_engine_config()
    assert config.hidden_states_config is None


def test_extraction_within_multi_connector(make_config):
    children = [
        {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
        {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"num_ring_slots": 3},
        },
    ]
    multi = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": children},
    }
    config = make_config(speculation([1]), kv_transfer=multi)
    assert config.hidden_states_config.num_ring_slots == 3
    assert config.speculative_config is None
    multi["kv_connector_extra_config"] = {"connectors": [children[1], children[1]]}
    with pytest.raises(ValueError, match="more than one connector"):
        make_config(speculation([1]), kv_transfer=multi)


def test_ids_and_their_order_are_in_the_compile_cache_key(make_config):
    hashes = [
        make_config(speculation(ids)).compute_hash()
        for ids in ([1, 2], [2, 1], [1, 3], [1, 2])
    ]
    assert hashes[0] == hashes[3]
    assert len(set(hashes)) == 3
    # What does not change the graph is not in the key.
    other_path = make_config(speculation([1, 2]), {"shared_storage_path": "/tmp/x"})
    assert other_path.compute_hash() == hashes[0]


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [
        ([7], r"layer id 7 is out of range; valid: distinct integers from 0 .*to 6 "),
        ([-1], r"layer id -1 is out of range"),
        ([1, 2, 1], r"layer id 1 is given twice"),
        ([1.5], r"layer id 1.5 is not an integer"),
        ([True], r"layer id True is not an integer"),
        (["1"], r"layer id '1' is not an integer"),
        ([], r"layer ids \[\] are not a non-empty list"),
        (3, r"layer ids 3 are not a non-empty list"),
        ("1,2", r"layer ids '1,2' are not a non-empty list"),
        ({"a": 1}, r"layer ids \{'a': 1\} are not a non-empty list"),
        (None, r"names no layers: .*eagle_aux_hidden_state_layer_ids"),
    ],
    ids=repr,
)
def test_bad_layer_ids(make_config, layer_ids, message):
    with pytest.raises(ValueError, match=message):
        make_config(speculation(layer_ids))
    if layer_ids is not None:
        with pytest.raises(ValueError, match=message):
            make_config(None, {"layer_ids": layer_ids})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_writer_thread": 2},
            "unknown option 'num_writer_thread'.*did you mean 'num_writer_threads'",
        ),
        ({"colour": 1}, "unknown option 'colour'.*valid: .*shared_storage_path"),
        (
            {"num_writer_threads": 0},
            "(?s)num_writer_threads.*greater than or equal to 1",
        ),
        ({"num_writer_threads": "many"}, "(?s)num_writer_threads.*integer"),
        ({"num_writer_threads": True}, "(?s)num_writer_threads.*integer"),
        ({"num_ring_slots": 0}, "(?s)num_ring_slots.*greater than or equal to 1"),
        ({"use_synchronization_lock": "perhaps"}, "(?s)use_synchronization_lock.*bool"),
        ({"shared_storage_path": ""}, "shared_storage_path ''"),
        ({"shared_storage_path": 3}, "(?s)shared_storage_path.*string"),
        ({"custom_save_roots": "/tmp"}, "(?s)custom_save_roots '/tmp'.*a list"),
        ({"custom_save_roots": ["a"]}, "(?s)custom_save_roots.*'a' is no absolute"),
        ({"file_mode": "0400"}, "(?s)file_mode '0400'.*read and write"),
        ({"file_mode": 600}, "(?s)file_mode"),
        ({"file_mode": "rw"}, "(?s)file_mode 'rw'.*octal"),
        ({"checksum": "md5"}, "(?s)checksum.*'crc32' or 'xxh3'"),
        ({"max_stored_bytes": 0}, "(?s)max_stored_bytes.*greater than or equal to 1"),
        ({"max_stored_bytes": "1G"}, "(?s)max_stored_bytes.*integer"),
        ({"when_full": "drop"}, "(?s)when_full.*'refuse' or 'wait'"),
        ({"max_age_s": 0}, "(?s)max_age_s.*greater than 0"),
        ({"shutdown_timeout_s": -1}, "(?s)shutdown_timeout_s.*greater than"),
        ({"max_inline_bytes": -1}, "(?s)max_inline_bytes.*greater than"),
        ({"sink": "nowhere"}, "(?s)sink 'nowhere'.*package.module:function"),
        ({"layer_ids": [2]}, r"layer_ids \[2\] .* and .* \[1\] .* differ"),
    ],
    ids=json.dumps,
)
def test_bad_options(make_config, options, message):
    with pytest.raises(ValueError, match=message):
        make_config(speculation([1]), options)


def test_nothing_says_which_layers(make_config):
    with pytest.raises(ValueError, match="needs to know which layers.*layer_ids"):
        make_config()


def test_a_consumer_role_makes_no_sense(make_config):
    with pytest.raises(ValueError, match="kv_role 'kv_consumer'.*valid: 'kv_producer'"):
        make_config(speculation([1]), kv_transfer={"kv_role": "kv_consumer"})
    assert make_config(speculation([1]), kv_transfer={"kv_role": "kv_both"})


def test_more_than_one_draft_token_makes_no_sense(make_config):
    with pytest.raises(ValueError, match="num_speculative_tokens 4.*valid: 1"):
        make_config(speculation([1]) | {"num_speculative_tokens": 4})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("num_speculatve_tokens", "did you mean 'num_speculative_tokens'"),
        ("colour", "unknown option 'colour' in speculative_config"),
    ],
)
def test_unknown_keys_of_the_speculative_config(make_config, key, message):
    with pytest.raises(ValueError, match=message):
        make_config(speculation([1]) | {key: 1})


def test_layer_ids_in_both_places_may_agree(make_config):
    config = make_config(speculation([1, 2]), {"layer_ids": (1, 2)})
    assert config.hidden_states_config.layer_ids == (1, 2)


def test_the_home_directory(make_config, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config = make_config(speculation([1]), {"shared_storage_path": "~/rows"})
    assert config.hidden_states_config.shared_storage_path == "/home/somebody/rows"


@pytest.mark.parametrize("connector", ["ExampleConnector", CONNECTOR])
def test_the_connectors_config_may_be_a_dict(tiny_model, connector):
    options = {"layer_ids": [1]} if connector == CONNECTOR else {}
    config = EngineArgs(
        model=tiny_model,
        max_model_len=512,
        kv_transfer_config={
            "kv_connector": connector,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": options,
        },
    ).create_engine_config()
    assert (config.hidden_states_config is None) == (connector != CONNECTOR)


def test_keys_may_have_dashes_like_other_speculative_configs(make_config):
    dashed = {key.replace("_", "-"): value for key, value in speculation([2]).items()}
    config = make_config(dashed)
    assert config.hidden_states_config.layer_ids == (2,)
    assert config.speculative_config is None


@pytest.mark.scenario("a pooling model")
@pytest.mark.refused
def test_pooling_models_are_refused(make_config):
    with pytest.raises(ValueError, match="cannot serve the pooling model"):
        make_config(speculation([1]), runner="pooling")


@pytest.mark.scenario("an encoder-decoder model")
@pytest.mark.refused
def test_encoder_decoder_models_are_refused(make_config, tmp_path):
    from transformers import WhisperConfig

    WhisperConfig(
        architectures=["WhisperForConditionalGeneration"],
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
        max_target_positions=512,
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot serve the encoder-decoder model"):
        make_config(speculation([1]), model=str(tmp_path), skip_tokenizer_init=True)


def test_families_are_refused_by_name(tiny_model):
    """Of what the sources say: no class is imported but the one that is asked for."""
    from vllm.config import ModelConfig
    from vllm.v1.hidden_states.factory import (
        refuse_unsupported_family,
        supported_families,
    )

    families = supported_families()
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM", "NemotronHForCausalLM"} <= set(
        families
    )
    assert not {"Gemma3ForCausalLM", "OPTForCausalLM", "LlamaModel"} & set(families)
    assert not {"DeepseekV32ForCausalLM", "Glm5NextForCausalLM"} & set(families)
    config = ModelConfig(tiny_model, max_model_len=512)
    refuse_unsupported_family(config)
    config.hf_config.architectures = ["OPTForCausalLM"]
    with pytest.raises(ValueError, match="OPTForCausalLM cannot .*LlamaForCausalLM"):
        refuse_unsupported_family(config)


@pytest.mark.parametrize(
    ("architecture", "module", "error"),
    [
        ("DeepseekV32ForCausalLM", "vllm.models.deepseek_v32.nvidia.model", "would be"),
        pytest.param(
            "Glm5NextForCausalLM",
            "vllm.models.glm5next.common.model",
            "would be wrong",
            marks=pytest.mark.soak,
        ),
        ("TransformersMultiModalForCausalLM", "transformers", "--model-impl vllm"),
    ],
)
@pytest.mark.scenario("a family whose class would hand over wrong rows")
@pytest.mark.refused
def test_families_that_would_be_wrong(monkeypatch, architecture, module, error):
    """Their classes cannot be imported here: what they are called is enough."""
    from vllm.model_executor.model_loader import utils
    from vllm.v1.hidden_states.factory import refuse_unsupported_family

    model_class = type(architecture, (), {"__module__": module})
    monkeypatch.setattr(
        utils, "get_model_architecture", lambda config: (model_class, architecture)
    )
    with pytest.raises(ValueError, match=f"{architecture} .*{error}"):
        refuse_unsupported_family(None)
