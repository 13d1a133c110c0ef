"""Predicted time of a kernel: work, bytes and calls times what each took when it was measured.

Shipped data (``rates.json``), never timed at run time, so that a choice is the same on every run. The rates were fitted
on two x86-64 cores with AVX-512 and are used as ratios between kernels, not as forecasts for a machine;
``python -m benchmarks.cost_model`` fits them anew, and checks AUTO's choices on calls that the fit has not seen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atb_modules.kernels.half_units import cpu_has_half_units

RATES_FILE = Path(__file__).with_name("rates.json")


@dataclass(frozen=True)
class Cost:
    """What a call takes: floating point operations, bytes moved, and kernel launches or library calls."""

    operations: float = 0.0
    bytes: float = 0.0
    calls: float = 1.0


@dataclass(frozen=True)
class Rates:
    """Seconds that an operation, a byte and a call take."""

    operation: float
    byte: float
    call: float

    def seconds(self, cost: Cost) -> float:
        return cost.operations * self.operation + cost.bytes * self.byte + cost.calls * self.call


#: Strategy -> rates of kernels that have not been fitted: the oracle, what compiles, whole layers.
_GENERAL = {
    "reference": Rates(1e-9, 1e-9, 60e-6),
    "eager": Rates(2.5e-11, 2e-10, 6e-6),
    "torch": Rates(9e-12, 1.7e-10, 6e-6),
    "sdpa": Rates(1.25e-11, 1e-10, 15e-6),
    "blocked": Rates(2.4e-11, 2e-10, 6e-6),
    "flex": Rates(2.5e-11, 2e-10, 15e-6),
    "modules": Rates(2.5e-11, 1.25e-10, 25e-6),
    "cpu": Rates(1.25e-11, 7e-11, 10e-6),
}


def key(op: str, strategy: str, traits: Any) -> str:
    """The name in ``rates.json`` of a kernel's rates for such a call: by dtype, and with gradients apart."""
    name = f"{op}/{strategy}/{str(traits.dtype).removeprefix('torch.')}"
    if cpu_has_half_units(traits.dtype):
        name += "+units"
    return name + "/grad" if traits.requires_grad else name


def _fitted() -> dict[tuple[str, str, torch.dtype, bool], Rates]:
    """The file's rates by (op, strategy, dtype, with gradients), those for this processor."""
    table = {}
    for name, values in json.loads(RATES_FILE.read_text()).items():
        op, strategy, dtype_name, *grad = name.split("/")
        dtype = getattr(torch, dtype_name.removesuffix("+units"))
        if cpu_has_half_units(dtype) == dtype_name.endswith("+units"):
            table[op, strategy, dtype, bool(grad)] = Rates(*values)
    return table


_FITTED = _fitted()


def predicted_seconds(op: str, strategy: str, traits: Any, cost: Cost) -> float:
    """Seconds that ``cost`` is predicted to take by the kernel of (op, strategy)."""
    rates = _FITTED.get((op, strategy, traits.dtype, traits.requires_grad)) or _GENERAL[strategy]
    return rates.seconds(cost)
