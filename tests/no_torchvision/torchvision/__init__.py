# SPDX-License-Identifier: Apache-2.0
"""A torchvision that can be imported, and nothing else.

vLLM's classes of families with images import parts of Transformers that import
torchvision, whether they are used or not. The registries' torchvision is built for
CUDA and cannot be imported beside a CPU build of torch; the image processor of the
tests works by Pillow.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0"


class _Unusable(type):
    """What classes and functions are: named and annotated with, but not called."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name

    def __call__(cls, *args: object, **kwargs: object) -> None:
        raise RuntimeError("the tests have no torchvision")


class _Submodules(MetaPathFinder, Loader):
    """Finds every submodule, with whatever is imported from it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(f"{__name__}."):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Unusable(name, (), {})

        vars(module)["__getattr__"] = attribute


sys.meta_path.append(_Submodules())
