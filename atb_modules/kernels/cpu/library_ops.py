"""The torch.library fragment of the CPU ops, and the small conversions that every op needs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import library

LIB = torch.library.Library("atb_modules", "FRAGMENT")


def define(schema: str, cpu: Callable[..., object], meta: Callable[..., object]) -> None:
    """Defines one op or overload with its CPU implementation and its shape function."""
    name = schema.split("(", 1)[0]
    LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIB.impl(name, cpu, "CPU")
    LIB.impl(name, meta, "Meta")


def call(name: str, args: ctypes.Structure) -> None:
    """Calls one kernel of the native library."""
    getattr(library.get(), name)(args)


def threads() -> int:
    """The thread count of the next call: torch's own, read each time."""
    return torch.get_num_threads()


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first element, None for an absent or empty tensor."""
    return None if tensor is None else tensor.data_ptr() or None


def as_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x as (rows, width) with one row stride: (tensor, rows, width, stride).

    A view is read directly where the leading axes have one common stride and the last axis is dense; anything
    else is copied to contiguous memory first.
    """
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    if x.dim() == 1:
        return (x if x.stride(0) == 1 else x.contiguous()), 1, width, width
    dense = x.stride(-1) == 1 or width == 1
    step = 1
    stride = None
    for size, axis_stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if stride is None:
            stride = axis_stride
        elif axis_stride != stride * step:
            dense = False
        step *= size
    if not dense:
        return x.contiguous(), rows, width, width
    return x, rows, width, width if stride is None else stride


def last_dense(x: Tensor) -> Tensor:
    """x itself where its last axis is dense, else a contiguous copy."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def check_same(name: str, tensor: Tensor, other: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises unless a tensor has the shape and dtype that another argument requires."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have the shape {tuple(shape)} of {other}, got {tuple(tensor.shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must have the dtype {dtype} of {other}, got {tensor.dtype}")


def check_vector(name: str, vector: Tensor | None, size: int) -> None:
    """Raises unless an optional weight, bias or per-head vector has `size` elements."""
    if vector is not None and tuple(vector.shape) != (size,):
        raise ValueError(f"{name} must have shape ({size},), got {tuple(vector.shape)}")


def check_out(out: Tensor, like_shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises unless `out` is contiguous and has the result's shape and dtype."""
    check_same("out", out, "the result", like_shape, dtype)
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()} for shape {tuple(out.shape)}")
