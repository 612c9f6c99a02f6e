# SPDX-License-Identifier: Apache-2.0
"""Configuration of hidden-state extraction.

Extraction is asked for in one of two ways, both with a KV connector that takes
streamed rows (``takes_hidden_states_rows``):

- ``speculative_config={"method": "extract_hidden_states", ...}``, the layer ids
  in ``draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids``. Nothing
  is drafted: the engine runs without a speculative config.
- the connector's extra config ``layer_ids``, with any speculative config or none.

Either way the result is one ``HiddenStatesConfig``, validated before the engine
starts. With a connector that reads the stock KV group instead, the stock path is
left as it is.
"""

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from vllm.config.utils import config
from vllm.utils.hashing import safe_hash

if TYPE_CHECKING:
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.config.model import ModelConfig

METHOD = "extract_hidden_states"
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"


def default_writer_threads() -> int:
    """Eight where there are as many processors: more than that wait for each other.

    Two at least: one may wait for a disk.
    """
    if hasattr(os, "sched_getaffinity"):
        num_processors = len(os.sched_getaffinity(0))
    else:
        num_processors = os.cpu_count() or 1
    return min(8, max(2, num_processors))


@config
class HiddenStatesConfig:
    """What is extracted, and where it goes.

    Every field but ``layer_ids`` is an option of the connector, by the same name
    in ``kv_connector_extra_config``.
    """

    layer_ids: tuple[int, ...]
    """Layers in the order of the file's columns. Id ``k`` is the residual stream
    entering decoder layer ``k``; ``num_hidden_layers`` is the last layer's output
    before the final norm."""

    shared_storage_path: str = "/tmp"
    """Directory of the files; made (mode 0700) where it does not exist. ``~`` is the
    home directory."""

    num_writer_threads: int = Field(
        default_factory=default_writer_threads, ge=1, le=256, strict=True
    )
    """Threads that write rows to files; by default as many as there are processors,
    2 to 8."""

    use_synchronization_lock: bool = True
    """Hold ``<path>.lock`` with an exclusive ``flock`` until the file is complete."""

    keep_lock_files: bool = False
    """Leave ``<path>.lock`` of a complete file, without its ``flock``, for readers that
    insist on one; otherwise it is removed within two minutes."""

    allow_custom_save_path: bool = False
    """Let clients choose where their file goes (``hidden_states_path``): below
    ``shared_storage_path``, or one of ``custom_save_roots``."""

    custom_save_roots: tuple[str, ...] = ()
    """Further directories below which clients may have their files."""

    file_mode: str = "0600"
    """Permissions of files, in octal. Directories that are made can be searched by
    those who may read the files."""

    storage_dtype: Literal["auto", "float16", "bfloat16", "float32", "float8_e4m3"] = (
        "auto"
    )
    """What rows are stored in; the model's own dtype by ``"auto"``. Beside float8_e4m3
    rows stands a scale of each."""

    fsync: bool = False
    """Show a file only when it is on the disk, and would outlive a power failure."""

    checksum: Literal["crc32", "xxh3"] | None = None
    """Of each file, in its metadata, for ``load_hidden_states(verify=True)``."""

    max_stored_bytes: int | None = Field(default=None, ge=1, strict=True)
    """The most that files may take, those of requests that run included. Beyond it,
    requests that extract are refused (HTTP 503) or wait, as ``when_full`` says."""

    when_full: Literal["refuse", "wait"] = "refuse"
    """What a request does for which there is no room within ``max_stored_bytes``."""

    max_age_s: float | None = Field(default=None, gt=0)
    """Seconds after which a complete file is removed, read or not."""

    shutdown_timeout_s: float = Field(default=3.0, ge=0, le=3600)
    """How long a shutdown waits for writers; then what is not complete is withdrawn.
    vLLM itself ends workers that take longer than some four seconds."""

    max_inline_bytes: int = Field(default=8 << 20, ge=0, strict=True)
    """The most that one response may carry by ``return_inline``."""

    sink: str | None = None
    """``"package.module:function"`` that takes the rows in place of files."""

    extract_by_default: bool = True
    """Extract requests that do not say ``extract_hidden_states`` themselves."""

    num_ring_slots: int = Field(default=2, ge=1, le=64, strict=True)
    """Slots of the ring, each of ``max_num_batched_tokens`` rows: the whole of the
    memory that extraction takes, and how many steps the writers may lag behind."""

    @field_validator("shared_storage_path")
    @classmethod
    def _storage_path_is_usable(cls, path: str) -> str:
        if not path or "\0" in path or not _is_utf_8(path):
            raise ValueError(
                f"shared_storage_path {path!r}: give the path of a directory"
            )
        path = os.path.expanduser(path)
        if os.path.exists(path) and not os.path.isdir(path):
            raise ValueError(f"shared_storage_path {path!r} is no directory")
        return path

    @field_validator("custom_save_roots", mode="before")
    @classmethod
    def _roots_are_directories(cls, roots: Any) -> tuple[str, ...]:
        if not isinstance(roots, (list, tuple)):
            raise ValueError(f"custom_save_roots {roots!r}: give a list of directories")
        expanded = []
        for root in roots:
            if (
                not isinstance(root, str)
                or not os.path.isabs(os.path.expanduser(root))
                or not _is_utf_8(root)
            ):
                raise ValueError(
                    f"custom_save_roots {roots!r}: {root!r} is no absolute path"
                )
            expanded.append(os.path.expanduser(root))
        return tuple(expanded)

    @field_validator("file_mode")
    @classmethod
    def _mode_is_octal(cls, mode: str) -> str:
        if not re.fullmatch("0?[0-7]{3}", mode) or not int(mode, 8) & 0o600 == 0o600:
            raise ValueError(
                f"file_mode {mode!r}: give octal permissions by which the owner may "
                "read and write, such as '0600' or '0640'"
            )
        return mode

    @field_validator("checksum")
    @classmethod
    def _checksum_is_there(cls, checksum: str | None) -> str | None:
        if checksum == "xxh3" and importlib.util.find_spec("xxhash") is None:
            raise ValueError(
                "checksum 'xxh3' needs the package xxhash; valid without: 'crc32'"
            )
        return checksum

    @field_validator("sink")
    @classmethod
    def _sink_is_a_name(cls, sink: str | None) -> str | None:
        if sink is not None and not re.fullmatch(r"[\w.]+:[\w.]+", sink):
            raise ValueError(f"sink {sink!r}: give 'package.module:function'")
        return sink

    @property
    def save_roots(self) -> tuple[str, ...]:
        """The directories below which files may be, made absolute."""
        roots = (self.shared_storage_path, *self.custom_save_roots)
        return tuple(os.path.abspath(root) for root in roots)

    def compute_hash(self) -> str:
        """Hash of what changes the computation graph: the ids and their order."""
        factors = str(("hidden_states", self.layer_ids)).encode()
        return safe_hash(factors, usedforsecurity=False).hexdigest()


def _is_utf_8(path: str) -> bool:
    # Paths are handed out in responses; a name on a disk may be any bytes.
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def extracts_hidden_states(
    speculative_config: Mapping[str, Any] | None,
    kv_transfer_config: "KVTransferConfig | None",
) -> bool:
    """Whether this speculative config means streamed extraction, not drafting."""
    return (
        speculative_config is not None
        and speculative_config.get("method") == METHOD
        and streamed_connector(kv_transfer_config) is not None
    )


def streamed_connector(
    kv_transfer_config: "KVTransferConfig | Mapping[str, Any] | None",
) -> "KVTransferConfig | None":
    """The configuration of the connector that takes streamed rows, if there is one.

    Looks into ``MultiConnector``.

    Raises:
        ValueError: if more than one connector takes streamed rows.
    """
    if kv_transfer_config is None:
        return None
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if isinstance(kv_transfer_config, Mapping):  # EngineArgs takes it so, too
        kv_transfer_config = KVTransferConfig(**kv_transfer_config)
    if kv_transfer_config.kv_connector is None:
        return None

    candidates = [kv_transfer_config]
    if kv_transfer_config.kv_connector == "MultiConnector":
        children = kv_transfer_config.kv_connector_extra_config.get("connectors", [])
        candidates = [
            KVTransferConfig(**{"kv_role": kv_transfer_config.kv_role, **child})
            for child in children
        ]
    streamed = [
        candidate
        for candidate in candidates
        if getattr(
            KVConnectorFactory.get_connector_class(candidate),
            "takes_hidden_states_rows",
            False,
        )
    ]
    if len(streamed) > 1:
        names = ", ".join(str(candidate.kv_connector) for candidate in streamed)
        raise ValueError(
            "kv_transfer_config names more than one connector that takes hidden "
            f"states ({names}); valid: one"
        )
    return streamed[0] if streamed else None


def create_hidden_states_config(
    speculative_config: Mapping[str, Any] | None,
    kv_transfer_config: "KVTransferConfig | None",
    model_config: "ModelConfig",
) -> HiddenStatesConfig | None:
    """Validated configuration of extraction, or None where nothing is extracted.

    Raises:
        ValueError: naming the field, its value, and what would be valid.
    """
    connector = streamed_connector(kv_transfer_config)
    if connector is None:
        return None
    name = connector.kv_connector
    if not connector.is_kv_producer:
        raise ValueError(
            f"kv_role {connector.kv_role!r}: {name} only writes; valid: "
            "'kv_producer', 'kv_both'"
        )
    if model_config.runner_type == "pooling":
        raise ValueError(
            f"{name} cannot serve the pooling model {model_config.model!r}: valid is a "
            "model that generates (--runner generate)"
        )
    if model_config.is_encoder_decoder:
        raise ValueError(
            f"{name} cannot serve the encoder-decoder model {model_config.model!r}: "
            "valid is a decoder-only model"
        )
    options = dict(connector.kv_connector_extra_config)
    options["layer_ids"] = _checked_layer_ids(
        _requested_layer_ids(speculative_config, options.get("layer_ids"), name),
        model_config,
    )
    _refuse_unknown(
        options,
        (field.name for field in fields(HiddenStatesConfig)),
        f"kv_connector_extra_config of {name}",
    )
    return HiddenStatesConfig(**options)


def _requested_layer_ids(
    speculative_config: Mapping[str, Any] | None, option: Any, connector: str | None
) -> Any:
    if speculative_config is None or speculative_config.get("method") != METHOD:
        if option is None:
            raise ValueError(
                f"{connector} needs to know which layers to extract: give a "
                f"speculative_config with method {METHOD!r} and {LAYER_IDS_KEY}, or "
                "layer_ids in kv_connector_extra_config"
            )
        return option
    from vllm.config.speculative import SpeculativeConfig

    _refuse_unknown(
        speculative_config,
        (field.name for field in fields(SpeculativeConfig)),
        "speculative_config",
    )
    num_speculative_tokens = speculative_config.get("num_speculative_tokens", 1)
    if num_speculative_tokens != 1 or isinstance(num_speculative_tokens, bool):
        raise ValueError(
            f"num_speculative_tokens {num_speculative_tokens!r}: method {METHOD!r} "
            "drafts nothing; valid: 1"
        )
    draft = speculative_config.get("draft_model_config") or {}
    hf_config = _get(draft, "hf_config") or {}
    layer_ids = _get(hf_config, LAYER_IDS_KEY)
    if layer_ids is None:
        layer_ids = option
    elif option is not None and list(option) != list(layer_ids):
        raise ValueError(
            f"layer_ids {option!r} in kv_connector_extra_config and {LAYER_IDS_KEY} "
            f"{layer_ids!r} in speculative_config differ; give one of them"
        )
    if layer_ids is None:
        raise ValueError(
            f"speculative_config with method {METHOD!r} names no layers: put a list "
            f"into draft_model_config.hf_config.{LAYER_IDS_KEY}"
        )
    return layer_ids


def _get(holder: Any, name: str) -> Any:
    # Offline, people pass ready-made config objects where JSON has dicts.
    if isinstance(holder, Mapping):
        return holder.get(name)
    return getattr(holder, name, None)


def _checked_layer_ids(layer_ids: Any, model_config: "ModelConfig") -> tuple[int, ...]:
    num_layers = model_config.get_total_num_hidden_layers()
    valid = (
        f"valid: distinct integers from 0 (the embeddings) to {num_layers} "
        f"(the last layer's output) for {model_config.architecture}"
    )
    if not isinstance(layer_ids, (list, tuple)) or not layer_ids:
        raise ValueError(f"layer ids {layer_ids!r} are not a non-empty list; {valid}")
    seen: set[int] = set()
    for layer_id in layer_ids:
        if isinstance(layer_id, bool) or not isinstance(layer_id, int):
            raise ValueError(f"layer id {layer_id!r} is not an integer; {valid}")
        if not 0 <= layer_id <= num_layers:
            raise ValueError(f"layer id {layer_id} is out of range; {valid}")
        if layer_id in seen:
            raise ValueError(f"layer id {layer_id} is given twice; {valid}")
        seen.add(layer_id)
    return tuple(layer_ids)


def _refuse_unknown(given: Mapping[str, Any], known: Iterable[str], place: str) -> None:
    names = sorted(known)
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"unknown option {key!r} in {place}: {hint}valid: {', '.join(names)}"
            )
