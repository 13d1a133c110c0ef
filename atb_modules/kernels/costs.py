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

from atb_modules.kernels.half_units import cpu_has_half_tiles, cpu_has_half_units

RATES_FILE = Path(__file__).with_name("rates.json")


@dataclass(frozen=True)
class Cost:
    """What a call takes.

    Args:
        operations: floating point operations.
        bytes: moved between memory and the processor.
        calls: kernel launches or library calls.
        scores: elements of attention scores that a softmax goes over.
        cells: elements of masks that are built or read.
        steps: inner products, tiles or blocks, each with an overhead of its own.
    """

    operations: float = 0.0
    bytes: float = 0.0
    calls: float = 1.0
    scores: float = 0.0
    cells: float = 0.0
    steps: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Seconds that one of each takes."""

    operation: float
    byte: float
    call: float
    score: float = 0.0
    cell: float = 0.0
    step: float = 0.0

    def seconds(self, cost: Cost) -> float:
        return (
            cost.operations * self.operation
            + cost.bytes * self.byte
            + cost.calls * self.call
            + cost.scores * self.score
            + cost.cells * self.cell
            + cost.steps * self.step
        )


def uneven(items: int) -> float:
    """How much longer equal items take on two threads than if they could be halved."""
    return -(-items // 2) * 2 / items if 0 < items < 16 else 1.0


#: Strategy -> rates of kernels that have not been fitted: whole layers, what compiles, and the oracle, which is there
#: to be asked for and costs more than any other.
_GENERAL = {
    "reference": Rates(1e-9, 1e-9, 1e-2),
    "eager": Rates(2.5e-11, 2e-10, 6e-6, score=5e-9, cell=1e-9),
    "torch": Rates(9e-12, 1.7e-10, 6e-6),
    "sdpa": Rates(1.25e-11, 1e-10, 15e-6, score=1e-10, cell=1e-9),
    "blocked": Rates(2.4e-11, 2e-10, 6e-6, score=1e-9, cell=1e-9, step=3e-4),
    "flex": Rates(2.5e-11, 2e-10, 15e-6),
    "modules": Rates(2.5e-11, 1.25e-10, 25e-6),
    "cpu": Rates(1.25e-11, 7e-11, 10e-6, score=1e-10),
}


def key(op: str, strategy: str, spec: Any, traits: Any) -> str:
    """The name in ``rates.json`` of a kernel's rates for such a call: by dtype and kind."""
    kind = _kind(op, spec, traits)
    name = f"{op}/{strategy}/{str(traits.dtype).removeprefix('torch.')}"
    return name + _units(op, strategy, traits.dtype) + f"/{kind}" * bool(kind)


#: Kernels of attention that are made of PyTorch's fused one.
_TORCH_FUSED = ("sdpa", "blocked")


def _units(op: str, strategy: str, dtype: torch.dtype) -> str:
    """What multiplies matrices of ``dtype`` in such a kernel on this CPU, as the names of rates say it.

    "+units" is tiles or, where a kernel makes use of them, dot products; "+dots" is that it makes no use of them.
    """
    if not cpu_has_half_units(dtype):
        return ""
    fused = op == "attention" and strategy in _TORCH_FUSED
    return "+dots" if fused and not cpu_has_half_tiles(dtype) else "+units"


def _kind(op: str, spec: Any, traits: Any) -> str:
    """Calls that a kernel serves in different ways: by what hides keys, one query apart, gradients apart."""
    if op != "attention":
        return "grad" if traits.requires_grad else ""
    if traits.q_len == 1:
        structure = "one query"
    elif traits.segments:
        structure = "packed"
    elif traits.has_overlays or traits.seen is not None:
        structure = "overlaid"
    elif traits.mask != "none":
        structure = "masked"
    else:
        structure = "causal" if spec.is_causal or spec.window is not None else "full"
    return structure + " grad" * traits.requires_grad


def _fitted() -> dict[tuple[str, str, torch.dtype, str], Rates]:
    """The file's rates by (op, strategy, dtype, kind), those for this processor.

    Half precision without use of the processor's units is as fast as float32, as long as nothing else is measured.
    """
    table = {}
    for name, values in json.loads(RATES_FILE.read_text()).items():
        op, strategy, dtype_name, *kind = name.split("/")
        plain, plus, units = dtype_name.partition("+")
        dtype = getattr(torch, plain)
        if _units(op, strategy, dtype) == plus + units:
            table[op, strategy, dtype, kind[0] if kind else ""] = Rates(*values)
    for (op, strategy, dtype, kind_of), rates in list(table.items()):
        if dtype == torch.float32 and _units(op, strategy, torch.bfloat16) == "+dots":
            table.setdefault((op, strategy, torch.bfloat16, kind_of), rates)
    return table


_FITTED = _fitted()


def predicted_seconds(op: str, strategy: str, spec: Any, traits: Any, cost: Cost) -> float:
    """Seconds that ``cost`` is predicted to take by the kernel of (op, strategy)."""
    rates = _FITTED.get((op, strategy, traits.dtype, _kind(op, spec, traits))) or _GENERAL[strategy]
    return rates.seconds(cost)
