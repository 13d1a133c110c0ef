"""Device memory seen from the host: CPU tensors over the memory of emulated NPU tensors, and the way back."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_npu(value: Any) -> bool:
    """Whether ``value`` is a tensor on an emulated NPU; fake tensors, which have no memory, are none."""
    return isinstance(value, Tensor) and value.device.type == "npu" and not isinstance(value, FakeTensor)


def alias(tensor: Tensor) -> Tensor:
    """The same memory as a CPU tensor, with the same sizes and strides. It does not keep the memory alive."""
    storage = tensor.untyped_storage()
    itemsize = tensor.element_size()
    elements = storage.nbytes() // itemsize
    if elements == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * (elements * itemsize)).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset())


def to_device(result: Tensor, device: torch.device) -> Tensor:
    """A new tensor on ``device`` with the values and the strides of a CPU tensor."""
    if torch._debug_has_internal_overlap(result) != 0:
        result = result.contiguous()
    there = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=device)
    if result.numel():
        alias(there).copy_(result)
    return there
