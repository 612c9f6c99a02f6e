# SPDX-License-Identifier: Apache-2.0
"""The compiler, which the interpreter never calls."""

from typing import Any

from triton.backends.compiler import BaseBackend


class CPUBackend(BaseBackend):
    """Supports the driver's target; has no stages."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: dict[str, Any]) -> Any:
        return options

    def add_stages(self, stages: Any, options: Any, language: Any = None) -> None:
        """There are none."""

    def load_dialects(self, context: Any) -> None:
        """There are none."""

    def get_module_map(self) -> dict[str, Any]:
        return {}
