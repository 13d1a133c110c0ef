"""On which kind of device the parity tests run: the CPU, unless a suite says otherwise while it collects them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from enum import StrEnum

from atb_modules.kernels.registry import kernels

_DEVICE_TYPE: ContextVar[str] = ContextVar("atb_modules_device_under_test", default="cpu")


@contextlib.contextmanager
def device_under_test(device_type: str) -> Iterator[None]:
    """Inside, ``strategies_under_test`` are those of this kind of device; a suite collects its tests within."""
    token = _DEVICE_TYPE.set(device_type)
    try:
        yield
    finally:
        _DEVICE_TYPE.reset(token)


def strategies_under_test(op: str) -> list[StrEnum]:
    """The strategies of ``op`` that the parity tests run: on the CPU all with a kernel for it, else its own alone."""
    device_type = _DEVICE_TYPE.get()
    if device_type == "cpu":
        return [k.strategy for k in kernels(op) if not k.device_types or "cpu" in k.device_types]
    return [k.strategy for k in kernels(op) if device_type in k.device_types]
