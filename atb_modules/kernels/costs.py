"""Predicted time of a kernel: work, bytes and calls over the speed that its strategy reached when measured.

Shipped data, never timed at run time, so that a choice is the same on every run. The rates are medians on two x86-64
cores with AVX2 and are used as ratios between strategies, not as forecasts for a machine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What a call takes: floating point operations, bytes moved, and kernel launches or library calls."""

    operations: float = 0.0
    bytes: float = 0.0
    calls: float = 1.0


@dataclass(frozen=True)
class Rates:
    """Operations and bytes a second, and seconds a call."""

    operations: float
    bytes: float
    call: float

    def seconds(self, cost: Cost) -> float:
        return cost.operations / self.operations + cost.bytes / self.bytes + cost.calls * self.call


#: strategy word -> rates. The reference is float64-capable einsum; eager and torch are plain PyTorch operators.
#: blocked is 0.53 of sdpa for a window of 1,024 in 8,192 tokens, the ratio on two AVX-512 cores.
RATES: dict[str, Rates] = {
    "reference": Rates(operations=1e9, bytes=1e9, call=60e-6),
    "eager": Rates(operations=40e9, bytes=5e9, call=6e-6),
    "torch": Rates(operations=110e9, bytes=6e9, call=6e-6),
    "sdpa": Rates(operations=80e9, bytes=10e9, call=15e-6),
    "blocked": Rates(operations=42e9, bytes=5e9, call=6e-6),
    "flex": Rates(operations=40e9, bytes=5e9, call=15e-6),
    "modules": Rates(operations=40e9, bytes=8e9, call=25e-6),
    "cpu": Rates(operations=80e9, bytes=15e9, call=10e-6),
}


def predicted_seconds(strategy: str, cost: Cost) -> float:
    """Seconds that ``cost`` is predicted to take by ``strategy``."""
    return RATES[strategy].seconds(cost)
