"""Tensors that are computed from other tensors once and kept as long as those live: masks, slots and angles of a step.

All layers of a step get the same lengths, slots and angles; what an operator wants made of them is made for the first
layer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from atb_modules.kernels.host_values import write_count

T = TypeVar("T")

_DERIVED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_CONSTANTS: dict[Hashable, Tensor] = {}
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def _not_to_keep(tensor: Tensor) -> bool:
    """Whether results must not be kept: traced, fake, or recorded for a gradient."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor) or tensor.requires_grad


def derived(source: Tensor, what: Hashable, make: Callable[[], T]) -> T:
    """``make()``, or what it returned for the same ``source``, unchanged since, and the same ``what``.

    Of a tensor that gradients may be recorded with, so is what is made, even where inference mode asks first.
    """
    count = None if _not_to_keep(source) else write_count(source)
    if count is None:
        return make()
    table = _DERIVED.get(source)
    if table is None or table[0] != count:
        table = (count, {})
        _DERIVED[source] = table
    kept = table[1]
    if what not in kept:
        inference = torch.is_inference_mode_enabled() and source.is_inference()
        with torch.inference_mode(inference), torch.no_grad():
            kept[what] = make()
    return kept[what]


def constant(what: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """``make()``, a tensor on ``device`` that never changes, made once a device; anew where tensors are fake."""
    key = (what, device)
    if not torch.compiler.is_compiling() and torch._C._get_dispatch_mode(_FAKE) is not None:
        return make()
    if key in _CONSTANTS:
        return _CONSTANTS[key]
    with torch.inference_mode(False), torch.no_grad():
        made = make()
    if not (torch.compiler.is_compiling() or isinstance(made, FakeTensor)):
        _CONSTANTS[key] = made
    return made
