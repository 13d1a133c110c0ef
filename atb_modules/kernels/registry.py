"""Which kernel serves a call, and why not the others.

A kernel is a record: op, strategy, device types, ``reasons`` (empty = it can), ``cost``, and the function. ``resolve``
picks one: an explicit strategy runs or raises one error with its reasons; AUTO takes the cheapest of those without a
reason against them. Nothing falls back in silence: every distinct choice is logged once (logger
``atb_modules.kernels``), and ``explain_choice`` returns the whole table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch.autograd import forward_ad

from atb_modules.kernels.costs import Cost, predicted_seconds
from atb_modules.kernels.traits import Traits
from atb_modules.strategies import OP_FAMILIES, effective_strategy

logger = logging.getLogger("atb_modules.kernels")

Reasons = Callable[[Any, Any], tuple[str, ...]]
CostFunction = Callable[[Any, Any], Cost]


@dataclass(frozen=True)
class Kernel:
    """One implementation of one op.

    Args:
        op: the op's name, a key of ``strategies.OP_FAMILIES``.
        strategy: the strategy that selects it.
        function: the implementation; all kernels of an op take the same arguments.
        reasons: ``(spec, traits) -> tuple of sentences``: why it cannot serve such a call; empty if it can.
        cost: ``(spec, traits) -> Cost``, compared by AUTO.
        device_types: torch device types it runs on; empty for any.
        needs_contiguous: whether the front must hand it contiguous tensors; the copy is part of its cost.
        transformable: whether torch.func transforms and forward-mode derivatives pass through it.
        inplace: the same with the result in the memory of its first argument, for callers that no longer need it.
    """

    op: str
    strategy: StrEnum
    function: Callable[..., Any] = field(compare=False)
    reasons: Reasons = field(compare=False)
    cost: CostFunction = field(compare=False)
    device_types: tuple[str, ...] = ()
    needs_contiguous: bool = False
    inplace: Callable[..., Any] | None = field(default=None, compare=False)
    transformable: bool = True

    def reasons_against(self, spec: Any, traits: Traits) -> tuple[str, ...]:
        """Every sentence that speaks against this kernel for such a call."""
        if self.device_types and traits.device_type not in self.device_types:
            return (f"runs on {', '.join(self.device_types)}, the tensors are on {traits.device_type}",)
        reasons = self.reasons(spec, traits)
        if not self.transformable and _transforming():
            reasons = (*reasons, "has no forward-mode derivative and no rule for torch.func transforms")
        return reasons

    def choose_function(self, overwrite: bool, traits: Traits) -> Callable[..., Any]:
        """``inplace`` where the caller allows it, nothing is differentiated and nothing is traced."""
        if overwrite and self.inplace and not traits.requires_grad and not torch.compiler.is_compiling():
            return self.inplace
        return self.function

    def full_cost(self, spec: Any, traits: Traits) -> Cost:
        """``cost``, and the copy to contiguous memory where the call needs one."""
        cost = self.cost(spec, traits)
        if self.needs_contiguous and not traits.contiguous:
            cost = dataclasses.replace(cost, bytes=cost.bytes * 2, calls=cost.calls + 1)
        return cost

    def predicted_seconds(self, spec: Any, traits: Traits) -> float:
        return predicted_seconds(self.op, self.strategy.value, spec, traits, self.full_cost(spec, traits))


@dataclass(frozen=True)
class ExplanationRow:
    """What the registry thinks of one kernel for one call."""

    strategy: str
    chosen: bool
    reasons: tuple[str, ...]
    predicted_seconds: float | None


@dataclass(frozen=True)
class Explanation:
    """The table behind a choice: ``rows`` as data, ``str()`` as text."""

    op: str
    spec: Any
    traits: Traits
    asked: str
    rows: tuple[ExplanationRow, ...]

    @property
    def chosen(self) -> str | None:
        """The strategy that runs, None where none can."""
        return next((row.strategy for row in self.rows if row.chosen), None)

    def __str__(self) -> str:
        lines = [f"{self.op} (asked: {self.asked})"]
        for row in self.rows:
            verdict = "chosen" if row.chosen else "can" if not row.reasons else "cannot"
            predicted = "" if row.predicted_seconds is None else f"{row.predicted_seconds * 1e6:10.1f} us predicted"
            why = "; ".join(row.reasons)
            lines.append(f"  {row.strategy:<10} {verdict:<7} {predicted:>23}  {why}".rstrip())
        return "\n".join(lines)


def _transforming() -> bool:
    """Whether the call stands inside a torch.func transform or a forward-mode level."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


_KERNELS: dict[str, list[Kernel]] = {op: [] for op in OP_FAMILIES}
_LOGGED: set[tuple[Any, ...]] = set()
#: What was chosen for a call: spec and traits alone decide, and asking every kernel takes longer than a small call.
_CHOICES: dict[tuple[str, StrEnum, Any, Traits], Kernel] = {}
_MOST_CHOICES = 4096
#: called by ``forget_choices``: those who keep what they made of choices
WHEN_FORGOTTEN: list[Callable[[], None]] = []
_RECORDING: ContextVar[dict[tuple[str, str], Explanation] | None] = ContextVar("atb_modules_choices", default=None)
_EXPLAINING: ContextVar[bool] = ContextVar("atb_modules_explaining", default=False)


class Explained(Exception):
    """Carries the explanation out of a call that ``explain_call`` stops before its kernel runs."""

    def __init__(self, explanation: Explanation) -> None:
        super().__init__(explanation.op)
        self.explanation = explanation


def register(kernel: Kernel) -> Kernel:
    """Add a kernel to the registry. Order of registration breaks ties. Raises where (op, strategy) is taken."""
    if kernel.op not in _KERNELS:
        raise ValueError(f"op is {kernel.op!r}; allowed: {', '.join(_KERNELS)}")
    if not isinstance(kernel.strategy, OP_FAMILIES[kernel.op]) or kernel.strategy.value == "auto":
        raise ValueError(f"strategy is {kernel.strategy!r}; {kernel.op} takes members of {OP_FAMILIES[kernel.op]}")
    if any(other.strategy is kernel.strategy for other in _KERNELS[kernel.op]):
        raise ValueError(f"a kernel for ({kernel.op}, {kernel.strategy.value}) is registered already")
    _KERNELS[kernel.op].append(kernel)
    _CHOICES.clear()
    return kernel


def forget_choices() -> None:
    """Ask every kernel again at the next call: what ``reasons()`` depend on beside spec and traits has changed."""
    _CHOICES.clear()
    for forget in WHEN_FORGOTTEN:
        forget()


def kernels(op: str) -> tuple[Kernel, ...]:
    """The registered kernels of ``op`` in order of registration."""
    if op not in _KERNELS:
        raise ValueError(f"op is {op!r}; allowed: {', '.join(_KERNELS)}")
    return tuple(_KERNELS[op])


def resolve(op: str, spec: Any, traits: Traits, strategy: str | StrEnum = "auto") -> Kernel:
    """The kernel that serves such a call.

    Raises:
        ValueError: where an explicit strategy cannot serve the call (with all its reasons), where it has no kernel
            for this op, or where no kernel at all can serve it.
    """
    asked = effective_strategy(op, strategy)
    if _EXPLAINING.get():
        raise Explained(explain_choice(op, spec, traits, strategy))
    if torch.compiler.is_compiling() or _transforming():
        chosen = _choose(op, spec, traits, asked)
    else:
        chosen = _remembered(op, spec, traits, asked)
    if chosen is None:
        raise ValueError(_refusal(op, spec, traits, asked))
    if not torch.compiler.is_compiling():
        _note_choice(op, spec, traits, asked, chosen)
    return chosen


def explain_choice(op: str, spec: Any, traits: Traits, strategy: str | StrEnum = "auto") -> Explanation:
    """The table of all kernels of ``op`` for such a call: who is chosen, who cannot and why, predicted times."""
    asked = effective_strategy(op, strategy)
    chosen = _choose(op, spec, traits, asked)
    rows = []
    for kernel in _KERNELS[op]:
        reasons = kernel.reasons_against(spec, traits)
        seconds = None if reasons else kernel.predicted_seconds(spec, traits)
        rows.append(ExplanationRow(kernel.strategy.value, kernel is chosen, reasons, seconds))
    return Explanation(op, spec, traits, asked.value, tuple(rows))


def explain_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What the first resolution inside ``function(*args, **kwargs)`` would choose; no kernel runs."""
    token = _EXPLAINING.set(True)
    try:
        function(*args, **kwargs)
    except Explained as explained:
        return explained.explanation
    finally:
        _EXPLAINING.reset(token)
    raise ValueError(f"{function.__name__} needs no kernel for these arguments (an empty tensor?)")


@contextlib.contextmanager
def record_choices() -> Iterator[dict[tuple[str, str], Explanation]]:
    """Collect the choices made inside the block: ``(op, strategy) -> Explanation`` of its first call."""
    choices: dict[tuple[str, str], Explanation] = {}
    token = _RECORDING.set(choices)
    try:
        yield choices
    finally:
        _RECORDING.reset(token)


def _remembered(op: str, spec: Any, traits: Traits, asked: StrEnum) -> Kernel | None:
    key = op, asked, spec, traits
    chosen = _CHOICES.get(key)
    if chosen is None:
        chosen = _choose(op, spec, traits, asked)
        if len(_CHOICES) >= _MOST_CHOICES:
            _CHOICES.clear()
        if chosen is not None:
            _CHOICES[key] = chosen
    return chosen


def _choose(op: str, spec: Any, traits: Traits, asked: StrEnum) -> Kernel | None:
    """The kernel asked for, or the cheapest; where a call is traced for every length, the first that can serve it."""
    best: Kernel | None = None
    best_seconds = float("inf")
    candidates = _KERNELS[op]
    if torch.compiler.is_compiling():  # those of the device alone before those of any
        own = (traits.device_type,)
        candidates = [k for k in candidates if k.device_types == own] + [k for k in candidates if k.device_types != own]
    for kernel in candidates:
        if asked.value != "auto" and kernel.strategy is not asked:
            continue
        if kernel.reasons_against(spec, traits):
            continue
        if asked.value != "auto" or torch.compiler.is_compiling():
            return kernel
        seconds = kernel.predicted_seconds(spec, traits)
        if best is None or seconds < best_seconds:
            best, best_seconds = kernel, seconds
    return best


def _refusal(op: str, spec: Any, traits: Traits, asked: StrEnum) -> str:
    asked_kernels = [k for k in _KERNELS[op] if asked.value in ("auto", k.strategy.value)]
    if not asked_kernels:
        there = ", ".join(k.strategy.value for k in _KERNELS[op])
        return f"strategy is {asked.value!r}, which has no kernel for {op}; allowed: auto, {there}"
    why = " | ".join(f"{k.strategy.value}: {'; '.join(k.reasons_against(spec, traits))}" for k in asked_kernels)
    return f"strategy is {asked.value!r}, which cannot serve this {op} call: {why}"


def note_detour(op: str, strategy: StrEnum | str, instead: str, why: str) -> None:
    """Log, once, that a kernel which was chosen serves such a call in another way than it is known for."""
    key = ("detour", op, str(strategy), instead, why)
    if torch.compiler.is_compiling() or not logger.isEnabledFor(logging.INFO) or key in _LOGGED:
        return
    _LOGGED.add(key)
    logger.info("%s -> %s goes by %s: %s", op, strategy, instead, why)


def _note_choice(op: str, spec: Any, traits: Traits, asked: StrEnum, chosen: Kernel) -> None:
    recording = _RECORDING.get()
    if recording is not None and (op, chosen.strategy.value) not in recording:
        recording[op, chosen.strategy.value] = explain_choice(op, spec, traits, asked)
    if not logger.isEnabledFor(logging.INFO):
        return
    against = tuple((k.strategy.value, k.reasons_against(spec, traits)) for k in _KERNELS[op] if k is not chosen)
    copied = chosen.needs_contiguous and not traits.contiguous
    key = (op, spec, asked, chosen.strategy, traits.device_type, copied, against)
    if key in _LOGGED:
        return
    _LOGGED.add(key)
    rejected = "; ".join(f"{name}: {', '.join(why) or 'costs more'}" for name, why in against)
    copy_note = " (copies its inputs to contiguous memory)" if copied else ""
    logger.info("%s -> %s%s [asked %s; %s; %s]", op, chosen.strategy.value, copy_note, asked.value, traits, rejected)
