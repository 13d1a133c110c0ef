"""The CPU's parity tests, collected once more for the NPU: their calls go to the emulated device and back."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch.utils._pytree import tree_map

from atb_modules import ops
from atb_modules.kernels.pages import QuantizedPages
from atb_modules.testing.devices import device_under_test

#: ops that write to their arguments
WRITERS = ("cache_append", "rotary_append")
TESTS = Path(__file__).parents[1]


def _moved(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, QuantizedPages):
        return QuantizedPages(value.codes.to(device), value.scales.to(device))
    return value


def on_npu(function):
    """``function`` with its tensors on npu:0 and its results back on the host; gradients flow through the copies.

    Tensors that the function writes to are written on the host, too.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        pairs = []

        def there(value):
            moved = _moved(value, "npu:0")
            if isinstance(value, torch.Tensor) and not value.requires_grad:
                pairs.append((value, moved))
            return moved

        is_leaf = lambda value: isinstance(value, QuantizedPages)  # noqa: E731
        args, kwargs = tree_map(there, (args, kwargs), is_leaf=is_leaf)
        result = function(*args, **kwargs)
        if function.__name__ in WRITERS:
            with torch.no_grad():
                for host, device in pairs:
                    host.copy_(device.cpu())
        return tree_map(lambda value: _moved(value, "cpu"), result)

    return call


def borrow(path: str, names: tuple[str, ...], strategy: str = "ascend") -> ModuleType:
    """The test module at ``path`` below tests/ for ``strategy``, the ops ``names`` (and all of ``ops``) on the NPU."""
    file = TESTS / path
    spec = importlib.util.spec_from_file_location(f"borrowed_{file.stem}_{file.parent.name}_{strategy}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with device_under_test("npu", strategy):
        spec.loader.exec_module(module)
    for name in names:
        setattr(module, name, on_npu(getattr(ops, name)))
    if hasattr(module, "poisoned_memory"):  # the emulated NPU poisons fresh memory itself
        module.poisoned_memory = contextlib.nullcontext
    if hasattr(module, "ops"):
        wrapped = {n: on_npu(f) for n, f in vars(ops).items() if callable(f) and not isinstance(f, type)}
        module.ops = SimpleNamespace(**{**vars(ops), **wrapped})
    return module


def parity_tests(module: ModuleType, without: tuple[str, ...] = ()) -> dict[str, object]:
    """Its tests by name, but for ``without`` and for those of ops that the device has no kernel of its own for."""
    return {n: f for n, f in vars(module).items() if n.startswith("test_") and n not in without and _has_cases(f)}


def _has_cases(test) -> bool:
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    return all(len(mark.args[1]) for mark in marks)
