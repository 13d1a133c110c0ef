"""Numbers of small integer tensors on the host, read once: lengths and boundaries that operators want as a list.

A cache knows the lengths it writes to the device and says so with ``remember``; then nobody waits for the device. What
nobody said is read from the device once, and kept for as long as the tensor lives and is known not to be written to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_FROZEN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def freeze(*tensors: Tensor) -> None:
    """Promise that nobody writes to ``tensors`` again, as long as they live.

    What is made of a tensor can be kept while it is unchanged. Tensors count their writes, but for those that were made
    in inference mode: of these, only what was promised is kept.
    """
    for tensor in tensors:
        _FROZEN[tensor] = True


def write_count(tensor: Tensor) -> int | None:
    """Equal as long as ``tensor`` is unchanged; None where nobody can tell."""
    if not tensor.is_inference():
        return int(tensor._version)
    return -1 if tensor in _FROZEN else None


def remember(tensor: Tensor, values: Sequence[int]) -> Tensor:
    """Say what ``tensor``, one axis of integers, holds and will hold (see ``freeze``); returns it."""
    if tuple(tensor.shape) != (len(values),):
        raise ValueError(f"values has {len(values)} numbers; tensor has shape {tuple(tensor.shape)}")
    freeze(tensor)
    _KNOWN[tensor] = (write_count(tensor), tuple(int(value) for value in values))
    return tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on ``device``. A device copies from pinned memory alone without the host waiting for it."""
    if device.type in ("cpu", "meta"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def known_values(tensor: Tensor) -> tuple[int, ...] | None:
    """What ``tensor`` holds, where that is known without waiting for the device."""
    known = _KNOWN.get(tensor)
    return known[1] if known is not None and known[0] == write_count(tensor) else None


def host_values(tensor: Tensor) -> tuple[int, ...]:
    """What ``tensor`` holds. Waits for the device where nobody has said it and it was not read before."""
    known, count = known_values(tensor), write_count(tensor)
    if known is not None:
        return known
    values = tuple(int(value) for value in tensor.tolist())
    if count is not None:
        _KNOWN[tensor] = (count, values)
    return values
