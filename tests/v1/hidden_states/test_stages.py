# SPDX-License-Identifier: Apache-2.0
"""Which layers reach the last pipeline stage: by vLLM's relay, or not at all."""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.sequence import IntermediateTensors
from vllm.v1.hidden_states.factory import connect_stages, refuse_missing_tokens

NUM_LAYERS = 9
H = 4


class Decoder(torch.nn.Module, EagleModelMixin):
    """One stage's part of a family that relays."""

    supports_aux_hidden_states_over_pp = True
    config = SimpleNamespace(hidden_size=H)

    def __init__(self, start_layer, end_layer):
        super().__init__()
        self.start_layer, self.end_layer = start_layer, end_layer


class StageForCausalLM(torch.nn.Module):
    """A stage that adds 1 per layer; as vLLM's Llama does with what is asked."""

    def __init__(self, decoder):
        super().__init__()
        self.model = decoder

    def make_empty_intermediate_tensors(self, batch_size, dtype, device):
        rows = torch.zeros(batch_size, H, dtype=dtype, device=device)
        return IntermediateTensors({"hidden_states": rows})

    def forward(self, hidden_states=None, intermediate_tensors=None):
        decoder, layers = self.model, []
        if intermediate_tensors is not None:
            hidden_states = intermediate_tensors["hidden_states"]
        remote = decoder.collect_remote_aux_hidden_states(intermediate_tensors)
        if decoder.start_layer == 0:
            decoder._maybe_add_hidden_state(layers, 0, hidden_states, None)
        for layer in range(decoder.start_layer, decoder.end_layer):
            hidden_states = hidden_states + 1
            decoder._maybe_add_hidden_state(layers, layer + 1, hidden_states, None)
        if decoder.end_layer < NUM_LAYERS:
            packed = decoder.pack_local_aux_hidden_states(layers)
            return IntermediateTensors({"hidden_states": hidden_states, **packed})
        return hidden_states, remote + layers


@pytest.fixture
def stage_of(monkeypatch):
    """Pretends to be stage ``rank`` of ``size``."""

    def pretend(rank, size):
        group = SimpleNamespace(
            world_size=size, is_first_rank=rank == 0, is_last_rank=rank == size - 1
        )
        path = "vllm.distributed.parallel_state."
        monkeypatch.setattr(f"{path}get_pp_group", lambda: group)
        monkeypatch.setattr(f"{path}model_parallel_is_initialized", lambda: True)

    return pretend


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "layer_ids", [(0,), (9,), (0, 3, 9), (1, 2), (3, 4, 6, 7), tuple(range(10))]
)
def test_layers_of_all_stages_arrive(stage_of, size, layer_ids):
    """Through each stage's buffers, as a runner has them, and a stage in between."""
    from vllm.distributed.utils import get_pp_indices

    passed_on = None
    for rank in range(size):
        stage_of(rank, size)
        model = StageForCausalLM(Decoder(*get_pp_indices(NUM_LAYERS, rank, size)))
        model.model._set_aux_hidden_state_layers(layer_ids)
        connect_stages(NUM_LAYERS, model, layer_ids)
        if passed_on is None:
            passed_on = model(hidden_states=torch.zeros(2, H))
            continue
        buffers = model.make_empty_intermediate_tensors(2, torch.float32, "cpu")
        assert set(buffers.tensors) == set(passed_on.tensors)
        passed_on = model(intermediate_tensors=passed_on)
    _, layers = passed_on
    assert [layer[0, 0].item() for layer in layers] == list(layer_ids)


def without_relay():
    decoder = Decoder(0, NUM_LAYERS)
    decoder.supports_aux_hidden_states_over_pp = False
    return StageForCausalLM(decoder)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_layers_that_would_not_arrive_are_refused_on_every_rank(stage_of, rank):
    """The boundary (6 of 9, in three stages) is the earlier stage's output."""
    stage_of(rank, 3)
    with pytest.raises(ValueError, match="StageForCausalLM") as error:
        connect_stages(NUM_LAYERS, without_relay(), [0, 6, 7])
    assert "layers [0, 6] with pipeline_parallel_size 3" in str(error.value)
    assert "Valid: layers 7 to 9" in str(error.value)
    connect_stages(NUM_LAYERS, without_relay(), [7, 9])


def test_a_count_of_the_stages_own_layers_cannot_be_taken_for_ids(
    stage_of, monkeypatch
):
    """A long last stage, in a family that counts its layers from 0: up to id 6 the
    wrong layer would come, as many as were asked for."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,6")
    stage_of(1, 2)
    with pytest.raises(ValueError, match=r"layers \[4, 6\] .* Valid: layers 7 to 9"):
        connect_stages(NUM_LAYERS, without_relay(), [4, 6, 8])


def test_one_stage_has_no_limit(stage_of):
    stage_of(0, 1)
    connect_stages(NUM_LAYERS, without_relay(), [0, 5, 9])


def test_tokens_split_over_ranks_are_refused():
    whole = SimpleNamespace(kv_sharing_fast_prefill=False)
    refuse_missing_tokens(SimpleNamespace(prefill_context_parallel_size=1), whole)
    with pytest.raises(ValueError, match="prefill_context_parallel_size 2: .*valid.*1"):
        refuse_missing_tokens(SimpleNamespace(prefill_context_parallel_size=2), whole)


def test_layers_that_skip_tokens_are_refused():
    skipping = SimpleNamespace(kv_sharing_fast_prefill=True)
    with pytest.raises(ValueError, match="kv_sharing_fast_prefill: .*valid.*false"):
        refuse_missing_tokens(
            SimpleNamespace(prefill_context_parallel_size=1), skipping
        )
