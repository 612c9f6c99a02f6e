# SPDX-License-Identifier: Apache-2.0
"""A connector of the kind that reads the stock KV group of hidden states.

Such connectors are made for vLLM without this series. They rely on the speculative
method ``extract_hidden_states``: on a cache-only layer of a dummy draft model, whose
blocks they read when a request has ended.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # noqa: E501
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec


@dataclass
class EndedRequest:
    request_id: str
    token_ids: list[int]
    block_ids: list[int]
    path: str


@dataclass
class EndedRequests(KVConnectorMetadata):
    requests: list[EndedRequest] = field(default_factory=list)


def hidden_states_group(kv_cache_config) -> tuple[int, int]:
    """Index and block size of the group with the cache-only layer.

    It has a group of its own, or shares the only one with a model of full attention.
    """
    groups = kv_cache_config.kv_cache_groups
    found = [
        index
        for index, group in enumerate(groups)
        if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)
    ] or list(range(len(groups)))
    (index,) = found
    return index, groups[index].kv_cache_spec.block_size


class KVGroupConnector(KVConnectorBase_V1, SupportsHMA):
    """Writes the rows of each request's prompt, when it has ended."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        config = vllm_config.speculative_config
        if config is None or config.method != "extract_hidden_states":
            raise ValueError("needs the speculative method extract_hidden_states")
        self.folder = Path(self._kv_transfer_config.get_from_extra_config("folder", ""))
        self.group, self.block_size = hidden_states_group(kv_cache_config)
        self.ended: list[EndedRequest] = []

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return ExampleHiddenStatesConnector.get_required_kvcache_layout(vllm_config)

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        ended, self.ended = self.ended, []
        return EndedRequests(ended)

    def request_finished(self, request, block_ids):
        ended = EndedRequest(
            request.request_id,
            list(request.prompt_token_ids),
            list(block_ids),
            str(self.folder / f"{request.request_id}.safetensors"),
        )
        self.ended.append(ended)
        return True, {"group_path": ended.path}  # blocks stay until they are read

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, block_ids[self.group])

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]):
        (name,) = get_layers_from_vllm_config(
            self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)
        )
        self.cache = kv_caches[name]  # [blocks, layers, block size, hidden size]

    def start_load_kv(self, forward_context, **kwargs: Any):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs: Any):
        pass

    def wait_for_save(self):
        pass

    def get_finished(self, finished_req_ids):
        sent = set()
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, EndedRequests)
            for ended in metadata.requests:
                self.write(ended)
                sent.add(ended.request_id)
        return sent or None, None

    def write(self, ended: EndedRequest) -> None:
        blocks = torch.tensor(ended.block_ids)[:, None] * self.block_size
        slots = (blocks + torch.arange(self.block_size)).flatten()
        rows = extract_from_kv_cache(self.cache, slots, len(ended.token_ids))
        tensors = {
            "hidden_states": rows.contiguous(),
            "token_ids": torch.tensor(ended.token_ids),
        }
        save_file(tensors, ended.path + ".new")
        Path(ended.path + ".new").rename(ended.path)
