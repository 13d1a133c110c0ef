"""The table of references, by operator and overload."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_REFERENCES: dict[str, Callable[..., Any]] = {}
_LOADED = False


def reference(*names: str) -> Callable[[Function], Function]:
    """Register the decorated function for operators by name: "npu::npu_rms_norm", with ".overload" if it has one."""

    def register(function: Function) -> Function:
        for name in names:
            if name in _REFERENCES:
                raise ValueError(f"a reference for {name} is registered already")
            _REFERENCES[name] = function
        return function

    return register


def find_reference(name: str) -> Callable[..., Any] | None:
    """The reference of an operator, None where none is written."""
    _load()
    return _REFERENCES.get(name)


def reference_names() -> list[str]:
    """All operators that have a reference."""
    _load()
    return sorted(_REFERENCES)


def _load() -> None:
    global _LOADED
    if _LOADED:
        return
    package = importlib.import_module("atb_modules.testing.npu.references")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    _LOADED = True
