"""Stands in for packages that SGLang imports and that its cache and scheduler never use on a CPU: GPU kernels and the
like, gigabytes of them. Import this first.

Whatever is asked of such a package is there and does nothing: it can be called, decorate a function and be subclassed.
What would compute with it fails loudly, since its answers are no numbers.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGES = frozenset({"triton", "torchvision", "IPython", "sgl_kernel", "flashinfer", "deep_gemm"})


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Nothing()


class Nothing(metaclass=_Kind):
    """An answer of an absent package."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator it leaves a function as it is.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name == "get_current_target":
            # Who asks which GPU there is takes an exception for an answer: none.
            raise RuntimeError("no GPU")
        return Nothing()

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (object,)


class Absent(types.ModuleType):
    """A module of an absent package."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        # What looks like a class is one: it may be asked for with isinstance.
        return type(name, (Nothing,), {}) if name[:1].isupper() else Nothing()


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


sys.meta_path.append(_Finder())
