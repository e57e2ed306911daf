"""Import-only stand-in for Triton on hosts where it is not installed.

Reason: SGLang 0.5.23 imports triton unconditionally and decorates kernels at import; on CPU none is launched.
The real package works too but weighs 700 MB. Every submodule and attribute exists, decorators return the
function they get, capitalised names are classes that may be derived from. Upstream: sglang 0.5.23.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "3.0.0"
__path__: list[str] = []


class _Base:
    """What a capitalised attribute becomes: usable as a base class or annotation."""

    def __init_subclass__(cls, **_kwargs: object) -> None:
        super().__init_subclass__()


class _Stub(ModuleType):
    """A module that has every attribute and is falsy, empty and callable."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__package__ = name

    def __getattr__(self, name: str) -> Any:
        value = _attribute(self.__name__, name)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve both ``@jit`` and ``@jit(...)``."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __contains__(self, _item: object) -> bool:
        return False


def _attribute(owner: str, name: str) -> Any:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    full = f"{owner}.{name}"
    if full in sys.modules:
        return sys.modules[full]
    if name[:1].isupper():
        return type(name, (_Base,), {"__module__": owner})
    module = _Stub(full)
    module.__spec__ = ModuleSpec(full, None, is_package=True)
    sys.modules[full] = module
    return module


class _Finder(MetaPathFinder, Loader):
    """Answers every import below ``triton``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith("triton.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the stub is complete when created."""


sys.meta_path.insert(0, _Finder())


def cdiv(numerator: int, denominator: int) -> int:
    """Ceiling division."""
    return -(numerator // -denominator)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


class Config:
    """A launch configuration; kept, never used."""

    def __init__(self, kwargs: dict[str, Any] | None = None, num_warps: int = 4, num_stages: int = 2, **_: Any) -> None:
        self.kwargs = kwargs or {}
        self.num_warps = num_warps
        self.num_stages = num_stages


def autotune(*_args: Any, **_kwargs: Any) -> Callable[[Any], Any]:
    """Return the kernel as it is."""
    return lambda function: function


def __getattr__(name: str) -> Any:
    return _attribute("triton", name)
