# SPDX-License-Identifier: Apache-2.0
"""The driver: there is a CPU, and it is active."""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):
    """What the interpreter and vLLM ask a driver for."""

    def __init__(self) -> None:
        """No library is loaded."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_benchmarker(self) -> Any:
        return lambda *arguments, **options: [0.0]

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty
