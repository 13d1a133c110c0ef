"""Checks of options at the edge: each raises a TypeError or ValueError with the name, what came and what is allowed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

#: Greatest length, position or window: what the kernels count in.
LARGEST_COUNT = 2**31 - 1
_LARGEST_FLOAT = sys.float_info.max
#: Dtypes that every op computes in; torch has narrower floating ones, which are for storage alone.
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_int(name: str, value: object, least: int = 1, most: int = LARGEST_COUNT, *, optional: bool = False) -> None:
    """An int (no bool) of ``least`` to ``most``; also None, if ``optional``."""
    if optional and value is None:
        return
    kind = "a positive int" if least == 1 else f"an int of at least {least}"
    allowed = f"{kind} up to {most}{' or None' if optional else ''}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); allowed: {allowed}")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; allowed: {allowed}")


def check_number(
    name: str,
    value: object,
    allowed: str = "a finite number",
    fits: Callable[[float], bool] | None = None,
    *,
    optional: bool = False,
) -> None:
    """A finite int or float (no bool) that ``fits``; ``allowed`` says so in words. Also None, if ``optional``."""
    if optional:
        if value is None:
            return
        allowed += ", or None"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); allowed: {allowed}")
    # Compared, not converted: an int may be greater than any float. NaN compares false.
    if not abs(value) <= _LARGEST_FLOAT or (fits is not None and not fits(value)):
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")


def check_positive(name: str, value: object, *, optional: bool = False) -> None:
    """A finite number above 0."""
    check_number(name, value, "a positive number (finite)", lambda number: number > 0, optional=optional)


def check_probability(name: str, value: object) -> None:
    """A number in [0, 1): the share that is dropped."""
    check_number(name, value, f"0 <= {name} < 1", lambda number: 0 <= number < 1)


def check_bool(name: str, value: object, *, optional: bool = False) -> None:
    if value is not True and value is not False and not (optional and value is None):
        allowed = "True, False, None" if optional else "True, False"
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); allowed: {allowed}")


def check_type(name: str, value: object, kind: type, *, optional: bool = False) -> None:
    """An instance of ``kind``; also None, if ``optional``."""
    if not isinstance(value, kind) and not (optional and value is None):
        allowed = f"{kind.__name__} or None" if optional else kind.__name__
        shown = " ".join(repr(value).split())
        raise TypeError(f"{name} is {shown:.80} ({type(value).__name__}); allowed: {allowed}")


def check_tensor(name: str, value: object, what: str = "a tensor") -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {type(value).__name__}; allowed: {what}")


def check_path(name: str, value: object) -> None:
    """A str or what stands for a path (``pathlib.Path``)."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} is {value!r:.80} ({type(value).__name__}); allowed: a str or pathlib.Path")


def check_floating(name: str, value: object, what: str = "a tensor", *, optional: bool = False) -> None:
    """A dense tensor of one of the ``FLOATING`` dtypes; also None, if ``optional``."""
    if optional:
        if value is None:
            return
        what += " or None"
    check_tensor(name, value, what)
    assert isinstance(value, torch.Tensor)
    if value.dtype not in FLOATING:
        raise TypeError(
            f"{name} is {value.dtype}; allowed: a floating dtype ({', '.join(str(d).split('.')[1] for d in FLOATING)})"
        )
    if value.layout is not torch.strided:
        raise TypeError(f"{name} is a tensor of layout {value.layout}; allowed: a dense one (torch.strided)")


def is_floating(value: object) -> bool:
    """Whether ``check_floating`` lets it through."""
    return isinstance(value, torch.Tensor) and value.dtype in FLOATING and value.layout is torch.strided


def check_parameter_dtype(dtype: object) -> None:
    """The dtype of parameters: None for torch's default, or a floating one."""
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r} ({type(dtype).__name__}); allowed: a floating torch.dtype or None")
    if dtype not in FLOATING:
        raise ValueError(f"dtype is {dtype}; allowed: a floating torch.dtype or None")


def check_device(device: object) -> None:
    """None, a ``torch.device``, or what names one."""
    if device is None or isinstance(device, torch.device):
        return
    if isinstance(device, bool) or not isinstance(device, (str, int)):
        raise TypeError(
            f"device is {device!r:.80} ({type(device).__name__}); allowed: a torch.device, its name, or None"
        )
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; allowed: a torch.device, its name, or None ({error})") from None


def numbers(name: str, value: Any, *, optional: bool = False) -> tuple[float, ...] | None:
    """A list or tuple of positive finite numbers, as a tuple; also None, if ``optional``."""
    if optional and value is None:
        return None
    if not isinstance(value, (list, tuple)):
        extra = ", or None" if optional else ""
        raise TypeError(
            f"{name} is {value!r:.80} ({type(value).__name__}); allowed: a list or tuple of positive numbers{extra}"
        )
    for index, entry in enumerate(value):
        check_positive(f"{name}[{index}]", entry)
    return tuple(value)
