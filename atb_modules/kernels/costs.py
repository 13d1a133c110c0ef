"""Predicted time of a kernel: work, bytes and calls times what each took when it was measured.

Shipped data (``rates/``, a file for each kind of processor), never timed at run time, so that a choice is the same on
every run. The rates were fitted on two x86-64 cores and are used as ratios between kernels, not as forecasts for a
machine; ``python -m benchmarks.cost_model`` fits them anew, and checks AUTO's choices on calls that the fit has not
seen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atb_modules.kernels import half_units

RATES = Path(__file__).with_name("rates")


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


#: On an NPU: the peak rates of a 910B1 (the vendor's numbers, not measured), half of them for products, and what a
#: small kernel takes. The same for every strategy, since all launch kernels of one chip.
_NPU = Rates(5.5e-15, 7e-13, 1e-5, score=2.8e-12, cell=1.4e-12, step=1e-6)
#: What counts as one call of plain PyTorch is several launches there; a prior, too.
_NPU_UNFUSED = 4.0


def key(op: str, strategy: str, spec: Any, traits: Any) -> str:
    """The name of the rates of a kernel's such calls, in the files: by dtype, kind and variant."""
    return _name(op, strategy, traits, _kind(op, spec, traits), _variant(op, traits))


def _name(op: str, strategy: str, traits: Any, *words: str) -> str:
    return "/".join((op, strategy, str(traits.dtype).removeprefix("torch."), *filter(None, words)))


def rates_file() -> Path:
    """The file of this kind of processor: what multiplies matrices in half precision decides which kernel is fast.

    "tiles" (AMX), "dots" (dot products of vectors, AVX-512 BF16) or "plain".
    """
    kind = "tiles" if half_units.BFLOAT16_TILES else "dots" if half_units.BFLOAT16_UNITS else "plain"
    return RATES / f"{kind}.json"


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


def _variant(op: str, traits: Any) -> str:
    """Which of several computations a row op is asked for, where one kernel is good at some of them."""
    if op == "gated_activation":
        return str(traits.kind)
    return "interleaved" if op == "rotary" and traits.interleaved else ""


def _fitted() -> dict[str, Rates]:
    """The rates by :func:`key`; what was not measured on this kind of processor is taken from the others."""
    table = {}
    for file in (RATES / "dots.json", RATES / "plain.json", rates_file()):
        table.update({name: Rates(*values) for name, values in json.loads(file.read_text()).items()})
    return table


_FITTED = _fitted()


def predicted_seconds(op: str, strategy: str, spec: Any, traits: Any, cost: Cost) -> float:
    """Seconds that ``cost`` is predicted to take by the kernel of (op, strategy)."""
    if traits.device_type == "npu":
        if strategy == "reference":  # the oracle, as above; some of it looks at values, for which the host waits
            return _GENERAL[strategy].seconds(cost)
        return _NPU.seconds(cost) * (1.0 if strategy in ("ascend", "ascend_c") else _NPU_UNFUSED)
    rates = _FITTED.get(key(op, strategy, spec, traits))
    rates = rates or _FITTED.get(_name(op, strategy, traits, _kind(op, spec, traits))) or _GENERAL[strategy]
    return rates.seconds(cost)
