"""Which tensors share memory: whether a result may take the place of an argument while others are still read."""

from __future__ import annotations

from torch import Tensor


def row_layout(x: Tensor) -> tuple[int, int] | None:
    """(width, row stride) of x as rows of dense elements a fixed stride apart, None where it is not made so."""
    if x.is_contiguous():
        width = x.shape[-1]
        return width, width
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return None
    stride, step = None, 1
    for size, axis_stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if stride is None:
            stride = axis_stride
        elif axis_stride != stride * step:
            return None
        step *= size
    return x.shape[-1], x.shape[-1] if stride is None else stride


def elements_apart(x: Tensor) -> bool:
    """Whether no two elements of x can share memory."""
    if x.is_contiguous():
        return True
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach += stride * (size - 1)
    return True


def apart(x: Tensor, other: Tensor) -> bool:
    """Whether x and other share no memory: one ends before the other begins, or their rows interleave."""
    begin, other_begin = x.data_ptr(), other.data_ptr()
    if begin + _extent(x) <= other_begin or other_begin + _extent(other) <= begin:
        return True
    rows = row_layout(x)
    if rows is None or x.shape != other.shape or x.dtype != other.dtype or rows != row_layout(other):
        return False
    width, stride = rows[0] * x.element_size(), rows[1] * x.element_size()
    # Two rows of width w, at offsets d and a multiple of the stride away, touch unless w <= d mod stride <= stride - w.
    return stride > 0 and width <= (other_begin - begin) % stride <= stride - width


def may_take(x: Tensor, *others: Tensor | None) -> bool:
    """Whether an elementwise result may be written into x while ``others`` are read at the same places."""
    if not elements_apart(x):
        return False
    for other in others:
        if other is None or apart(x, other):
            continue
        same = x.data_ptr() == other.data_ptr() and x.stride() == other.stride() and x.dtype == other.dtype
        if not same or x.shape != other.shape:
            return False
    return True


def _extent(x: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if not x.numel():
        return 0
    return x.element_size() * (1 + sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True)))
