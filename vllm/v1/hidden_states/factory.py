# SPDX-License-Identifier: Apache-2.0
"""Builds a worker's captures from the engine's configuration.

The one module of this package that needs vLLM, and only when it is called.
"""

import ast
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vllm.v1.hidden_states.capture import HiddenStateCapture, RowReceiver
from vllm.v1.hidden_states.dtypes import FLOAT8
from vllm.v1.hidden_states.last import LastHiddenStateCapture
from vllm.v1.hidden_states.last_request import wants_last
from vllm.v1.hidden_states.runner import RunnerCapture

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.hidden_states import HiddenStatesConfig

INTERFACE = "SupportsEagle3"

# Classes of vLLM 0.32.0 that have the interface and hand over other rows than the
# residual stream's. Read in their sources; none of them runs on a CPU.
UNSOUND = {
    "vllm.models.deepseek_v32": "hands over rows of one tensor-parallel rank's part of "
    "the sum, and never those of the last layer",
    "vllm.models.glm5next": "writes over the rows that it has handed over",
    "vllm.models.kimi_k3": "writes over the embeddings that it has handed over",
}


def create_capture(vllm_config: "VllmConfig", device: torch.device) -> RunnerCapture:
    """The captures of this worker's model runner.

    Raises:
        ValueError: if layers are to be extracted, and the model's family cannot
            expose them, or no rank would see all rows.
    """
    return RunnerCapture(
        create_extraction(vllm_config, device), create_last(vllm_config, device)
    )


def create_last(
    vllm_config: "VllmConfig", device: torch.device
) -> LastHiddenStateCapture | None:
    """What takes last hidden states in this worker; None where none are asked for."""
    from vllm.distributed.parallel_state import get_pp_group

    model_config = vllm_config.model_config
    if model_config.runner_type != "generate" or not get_pp_group().is_last_rank:
        return None
    return LastHiddenStateCapture(
        is_wanted=wants_last,
        hidden_size=model_config.get_hidden_size(),
        layer=model_config.get_total_num_hidden_layers(),
        max_requests=vllm_config.scheduler_config.max_num_seqs,
        device=device,
        dtype=model_dtype(vllm_config),
        is_writer=is_writer(),
    )


def create_extraction(
    vllm_config: "VllmConfig", device: torch.device
) -> HiddenStateCapture | None:
    """The capture of this worker's layers; None where nothing is extracted.

    Raises:
        ValueError: see ``create_capture``.
    """
    config = vllm_config.hidden_states_config
    if config is None:
        return None
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.logger import init_logger

    init_logger(__name__).info_once(
        "Extracting hidden states of layers %s into %s (ring of %d slots of %d rows); "
        "nothing is drafted for it",
        config.layer_ids,  # hashed, to say it once
        config.shared_storage_path,
        config.num_ring_slots,
        vllm_config.scheduler_config.max_num_batched_tokens,
    )
    take_over_process(vllm_config)
    refuse_unsupported_family(vllm_config.model_config)
    refuse_missing_tokens(vllm_config.parallel_config, vllm_config.cache_config)
    return HiddenStateCapture(
        layer_ids=config.layer_ids,
        hidden_size=vllm_config.model_config.get_hidden_size(),
        dtype=stored_dtype(vllm_config),
        max_rows=vllm_config.scheduler_config.max_num_batched_tokens,
        num_slots=config.num_ring_slots,
        device=device,
        is_last_stage=get_pp_group().is_last_rank,
        is_writer=is_writer(),
        find_receiver=partial(find_receiver, config),
        positions_on_device=(
            vllm_config.speculative_config is not None
            and bool(vllm_config.scheduler_config.async_scheduling)
        ),
        connect_stages=partial(
            connect_stages, vllm_config.model_config.get_total_num_hidden_layers()
        ),
    )


def is_writer() -> bool:
    """Whether this worker writes files: where the layers are all there, and once.

    Every tensor-parallel rank has all of a row.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0


def refuse_missing_tokens(parallel_config: Any, cache_config: Any) -> None:
    """Raise where a rank, or a layer, computes some of a step's tokens only.

    Raises:
        ValueError: naming the option.
    """
    num_ranks = parallel_config.prefill_context_parallel_size
    if num_ranks > 1:
        raise ValueError(
            f"prefill_context_parallel_size {num_ranks}: each of its ranks has the "
            "hidden states of some tokens only; valid with extraction: 1"
        )
    if cache_config.kv_sharing_fast_prefill:
        raise ValueError(
            "kv_sharing_fast_prefill: the later layers compute the last token of a "
            "prompt only; valid with extraction: false"
        )


def connect_stages(num_layers: int, model: Any, layer_ids: Sequence[int]) -> None:
    """Have the layers of earlier pipeline stages relayed to the last one.

    vLLM has a relay for some families, by names in the tensors that stages pass on,
    and sets it up for the drafters of the V2 runner alone. Works with both runners.

    Args:
        num_layers: Decoder layers of all stages.
        model: This stage's part; has been asked for its layers.
        layer_ids: What it was asked for, of all stages.

    Raises:
        ValueError: naming the family, if layers would not reach the last stage.
    """
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.distributed.utils import get_pp_indices

    num_stages = get_pp_group().world_size
    if num_stages == 1:
        return
    from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

    decoder: Any = eagle3_utils._inner_decoder(model)
    if getattr(decoder, "supports_aux_hidden_states_over_pp", False):
        eagle3_utils.reserve_aux_intermediate_tensor_slots(model)
        keys = eagle3_utils.aux_hidden_state_relay_keys(model)
        if keys:  # a stage in the middle: its model passes on its own layers only
            model.register_forward_hook(partial(_relay, keys), with_kwargs=True)
        return
    first, end = get_pp_indices(num_layers, num_stages - 1, num_stages)
    # The layer on the boundary is the earlier stage's output. And some families count
    # the layers of each stage from 0: ids that such a count reaches would be taken
    # for others; the ids beyond it are missing then, which the warm-up run sees.
    boundary = max(first, end - first)
    missing = [layer_id for layer_id in layer_ids if layer_id <= boundary]
    if missing:
        raise ValueError(
            f"{type(model).__name__} cannot hand over layers {missing} with "
            f"pipeline_parallel_size {num_stages}: the last stage writes, and this "
            "family does not relay what earlier stages compute (Llama and Qwen3, among "
            f"others, do). Valid: layers {boundary + 1} to {num_layers}, or "
            "pipeline_parallel_size 1 (tensor parallelism has no such limit)"
        )


def _relay(
    keys: Sequence[str], model: Any, args: Any, kwargs: dict[str, Any], output: Any
) -> Any:
    received = kwargs["intermediate_tensors"]
    output.tensors.update({key: received[key] for key in keys})
    return output


def model_dtype(vllm_config: "VllmConfig") -> torch.dtype:
    """The dtype of rows as the model computes them."""
    dtype = vllm_config.model_config.dtype
    assert isinstance(dtype, torch.dtype)  # resolved from its name long before
    return dtype


def stored_dtype(vllm_config: "VllmConfig") -> torch.dtype:
    """The dtype of rows as they are stored."""
    config = vllm_config.hidden_states_config
    if config is None or config.storage_dtype == "auto":
        return model_dtype(vllm_config)
    if config.storage_dtype == "float8_e4m3":
        return FLOAT8
    dtype: torch.dtype = getattr(torch, config.storage_dtype)
    return dtype


def take_over_process(vllm_config: "VllmConfig") -> None:
    """Make sure that this worker will have a KV connector of its own.

    vLLM keeps one per process, and gives a second engine the first one's: its path,
    its layers. An engine that failed at start-up leaves its own behind, too.

    Raises:
        RuntimeError: if the first engine is alive.
    """
    from vllm.distributed.kv_transfer import (
        ensure_kv_transfer_shutdown,
        has_kv_transfer_group,
    )

    if not has_kv_transfer_group():
        return
    for connector in _connectors():
        if getattr(connector, "is_registered", True):
            raise RuntimeError(
                "two engines of one process cannot both have a KV connector, and "
                "extraction needs one: vLLM keeps one per process. Give each engine a "
                "process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1, the default)"
            )
    ensure_kv_transfer_shutdown()


def find_receiver(config: "HiddenStatesConfig") -> RowReceiver | None:
    """The worker's connector, where it writes files; None on ranks that do not.

    Raises:
        RuntimeError: if the process has no connector of this configuration.
    """
    for connector in _connectors():
        if getattr(connector, "config", None) == config:
            return connector if connector.is_writer else None
    raise RuntimeError("the worker has no connector that takes its hidden states")


def _connectors() -> list[Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return list(getattr(connector, "sub_connectors", [connector]))


def refuse_unsupported_family(model_config: Any) -> None:
    """Raise for a model class that cannot be asked for its layers.

    Raises:
        ValueError: naming the family, and those that would do.
    """
    from vllm.model_executor.model_loader.utils import get_model_architecture
    from vllm.model_executor.models.interfaces import supports_eagle3

    model_class, architecture = get_model_architecture(model_config)
    why = _unsound(model_class.__module__)
    if why is not None:
        raise ValueError(
            f"hidden states of {architecture} would be wrong: its class in vLLM {why}. "
            f"Families that can: {', '.join(supported_families())}"
        )
    if architecture.startswith("TransformersMultiModal"):
        raise ValueError(
            f"{architecture} cannot expose the hidden states of its layers: of models "
            "with several parts Transformers' implementation hands over none. Valid: "
            "vLLM's own class (model_impl='vllm', --model-impl vllm) of a family that "
            f"can: {', '.join(supported_families())}"
        )
    if supports_eagle3(model_class):
        return
    raise ValueError(
        f"{architecture} cannot expose the hidden states of its layers (its class in "
        f"vLLM lacks {INTERFACE}). Its Transformers implementation may: try "
        "model_impl='transformers' (--model-impl transformers). Families that can: "
        f"{', '.join(supported_families())}"
    )


def supported_families() -> list[str]:
    """Architectures of generating models whose layers can be extracted.

    Read from the sources of vLLM's models: to import all of them takes minutes.
    """
    from vllm.model_executor.models import ModelRegistry, registry

    class_names = {
        architecture: model.class_name
        for architecture, model in ModelRegistry.models.items()
        if isinstance(model, registry._LazyRegisteredModel)
        and _unsound(model.module_name) is None
    }
    generating = registry._TEXT_GENERATION_MODELS | registry._MULTIMODAL_MODELS
    bases = _base_classes()

    def can_expose(name: str, seen: frozenset[str] = frozenset()) -> bool:
        return name == INTERFACE or any(
            can_expose(base, seen | {name}) for base in bases.get(name, set()) - seen
        )

    return sorted(
        architecture
        for architecture, class_name in class_names.items()
        if architecture in generating and can_expose(class_name)
    )


def _unsound(module: str) -> str | None:
    """What is wrong with the rows of a module's model; None where nothing is."""
    for name, why in UNSOUND.items():
        if module == name or module.startswith(f"{name}."):
            return why
    return None


def _base_classes() -> dict[str, set[str]]:
    """Names of base classes by name of class, over all of vLLM's model files."""
    from pathlib import Path

    import vllm

    root = Path(vllm.__file__).parent
    bases: dict[str, set[str]] = {}
    for folder in (root / "model_executor" / "models", root / "models"):
        for path in folder.rglob("*.py"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    names = {
                        ast.unparse(base).split("[")[0].rpartition(".")[2]
                        for base in node.bases
                    }
                    bases.setdefault(node.name, set()).update(names)
    return bases
