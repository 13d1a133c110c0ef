"""On which kind of device the parity tests run: the CPU, unless a suite says otherwise while it collects them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from enum import StrEnum

from atb_modules.kernels.registry import kernels

_UNDER_TEST: ContextVar[tuple[str, str | None]] = ContextVar("atb_modules_under_test", default=("cpu", None))


@contextlib.contextmanager
def device_under_test(device_type: str, strategy: str | None = None) -> Iterator[None]:
    """Inside, ``strategies_under_test`` are those of this kind of device, or one of them; a suite collects within."""
    token = _UNDER_TEST.set((device_type, strategy))
    try:
        yield
    finally:
        _UNDER_TEST.reset(token)


def strategies_under_test(op: str) -> list[StrEnum]:
    """The strategies of ``op`` that the parity tests run: on the CPU all with a kernel for it, else its own alone."""
    device_type, strategy = _UNDER_TEST.get()
    if device_type == "cpu":
        return [k.strategy for k in kernels(op) if not k.device_types or "cpu" in k.device_types]
    return [k.strategy for k in kernels(op) if device_type in k.device_types and strategy in (None, k.strategy.value)]
