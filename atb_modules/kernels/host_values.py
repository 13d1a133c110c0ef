"""Numbers of small integer tensors on the host, read once: lengths and boundaries that operators want as a list.

A cache knows the lengths it writes to the device and says so with ``remember``; then nobody waits for the device. What
nobody said is read from the device once, and kept for as long as the tensor lives and is not written to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _version(tensor: Tensor) -> int:
    """How often it was written to; inference tensors do not count, and what is known of them is trusted."""
    return -1 if tensor.is_inference() else tensor._version


def remember(tensor: Tensor, values: Sequence[int]) -> Tensor:
    """Say what ``tensor``, one axis of integers, holds; returns it."""
    if tuple(tensor.shape) != (len(values),):
        raise ValueError(f"values has {len(values)} numbers; tensor has shape {tuple(tensor.shape)}")
    _KNOWN[tensor] = (_version(tensor), tuple(int(value) for value in values))
    return tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on ``device``. A device copies from pinned memory alone without the host waiting for it."""
    if device.type in ("cpu", "meta"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def host_values(tensor: Tensor) -> tuple[int, ...]:
    """What ``tensor`` holds. Waits for the device where nobody has said it and it was not read before."""
    known = _KNOWN.get(tensor)
    if known is not None and known[0] == _version(tensor):
        return known[1]
    values = tuple(int(value) for value in tensor.tolist())
    _KNOWN[tensor] = (_version(tensor), values)
    return values
