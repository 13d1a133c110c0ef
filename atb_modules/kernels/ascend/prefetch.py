"""Weights into the NPU's second-level cache before they are needed."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.checks import check_int, check_tensor
from atb_modules.kernels.ascend.availability import current_soc
from atb_modules.kernels.ascend.rules import is_310p

_NPU = torch.ops.npu


def prefetch(tensor: Tensor, after: Tensor, max_bytes: int | None = None) -> None:
    """Have ``tensor`` read from device memory into the L2 cache; a hint, which changes no number.

    ``npu_prefetch`` is queued on the current stream, behind the kernel that computes ``after``, and the host goes on at
    once. Under a stream of its own that waits for ``after`` it reads while the next kernels of the main stream compute;
    worth it where those leave memory idle and the weight fits the cache beside their data. Does nothing for tensors of
    other devices, empty ones, and on chips without the operator (310P).

    Args:
        tensor: what will be read, say a weight; dense (contiguous, or a permutation of what is).
        after: the tensor whose computation comes first, on the same device.
        max_bytes: bytes to read at most, from the beginning; None for all.

    Raises:
        ValueError, TypeError: where tensors are on two devices, tensor is strided or max_bytes is below 1.
    """
    check_tensor("tensor", tensor)
    check_tensor("after", after)
    check_int("max_bytes", max_bytes, optional=True)
    if after.device != tensor.device:
        raise ValueError(f"after is on {after.device}; tensor is on {tensor.device}, they must be equal")
    if not _dense(tensor):
        raise ValueError(
            f"tensor has shape {tuple(tensor.shape)} and strides {tensor.stride()}; allowed: a dense one, whose bytes "
            "lie side by side"
        )
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "npu" or not size or current_soc() is None or is_310p():
        return
    _NPU.npu_prefetch(tensor, after, size if max_bytes is None else min(size, max_bytes))


def _dense(tensor: Tensor) -> bool:
    """Whether its elements fill their memory without gaps, in any order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return not tensor.numel()
        expected *= size
    return True
