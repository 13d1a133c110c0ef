"""The plan: the cheapest way to cut a layer into kernels, what each cut saves, and why other fusions were rejected.

A kernel takes the longer of its products at the chip's peak and its bytes at the memory's, and 10 us for its launch:
labelled priors (``Soc``), to be calibrated on hardware. Bytes are those of device memory with every buffer of a kernel
read or written once, as the emulation of the kernels counts them. What a kernel reads again for its next block of rows
is expected in the L2 cache and counted once; what that cache keeps from one kernel to the next is not reckoned with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atb_modules.checks import check_type
from atb_modules.fusions import Fusion
from atb_modules.kernels.ascend.socs import Soc, find_soc
from atb_modules.layer import TransformerLayer
from atb_modules.optimize.planner.rules import L2_SHARE, RULES, Rule, layout_change, refusal, workspace
from atb_modules.optimize.planner.shapes import LayerShape
from atb_modules.optimize.planner.steps import Step, layer_steps

#: seconds that a small kernel takes whatever it does
LAUNCH = 1e-5


@dataclass(frozen=True)
class Group:
    """One kernel of a plan: the steps it serves, its bytes of device memory, and its predicted time."""

    steps: tuple[str, ...]
    fusion: str
    kernel: str
    bytes: int
    operations: float
    seconds: float
    bytes_apart: int

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / max(self.bytes, 1)


@dataclass(frozen=True)
class Rejection:
    """A fusion that was considered and not taken: why, and what it would have saved."""

    steps: tuple[str, ...]
    fusion: str
    reason: str
    bytes_saved: int


@dataclass(frozen=True)
class FusionPlan:
    """What runs as one kernel, for one shape on one chip. Plain data: ``as_dict`` and ``from_dict`` are exact."""

    soc: str
    groups: tuple[Group, ...]
    rejected: tuple[Rejection, ...]

    @property
    def fusions(self) -> frozenset[Fusion]:
        return frozenset(Fusion(group.fusion) for group in self.groups if group.fusion)

    @property
    def bytes(self) -> int:
        """Of device memory, with the plan."""
        return sum(group.bytes for group in self.groups)

    @property
    def bytes_apart(self) -> int:
        """Of device memory, with every step a kernel of its own."""
        return sum(group.bytes_apart for group in self.groups)

    @property
    def seconds(self) -> float:
        return sum(group.seconds for group in self.groups)

    def fused_groups(self, fusion: Fusion | str) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.fusion == fusion)

    def apply(self, layer: TransformerLayer) -> TransformerLayer:
        """Let ``layer`` run as planned, and return it. What a plan leaves apart runs apart; results stay the same.

        A fusion that a plan takes in some places of a layer and not in others is left to the kernels of the place, and
        so is attention where the chip has no fused kernel: in PyTorch's operators it goes by blocks of keys, too.
        """
        check_type("layer", layer, TransformerLayer)
        layer.use_fusions(self.fusions | {Fusion.ATTENTION})
        return layer

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FusionPlan:
        groups = (Group(**{**group, "steps": tuple(group["steps"])}) for group in values["groups"])
        rejected = (Rejection(**{**one, "steps": tuple(one["steps"])}) for one in values["rejected"])
        return cls(values["soc"], tuple(groups), tuple(rejected))

    def __str__(self) -> str:
        lines = [f"fusion plan on {self.soc} (predicted, not measured)"]
        for group in self.groups:
            lines.append(
                f"  {' + '.join(group.steps):<46} {group.kernel or group.steps[0]:<17} {_size(group.bytes):>10}"
                f" of {_size(group.bytes_apart):>10} {group.intensity:8.1f} op/B {1e6 * group.seconds:9.1f} us"
            )
        saved = 1 - self.bytes / max(self.bytes_apart, 1)
        lines.append(f"  total: {_size(self.bytes)} instead of {_size(self.bytes_apart)} ({saved:.0%} less)")
        for one in self.rejected:
            name = one.fusion or "no kernel"
            lines.append(f"  not {' + '.join(one.steps)} ({name}, {_size(one.bytes_saved)}): {one.reason}")
        return "\n".join(lines)


def plan_layer(shape: LayerShape, soc: str | Soc) -> FusionPlan:
    """The plan of a layer's call on a chip.

    Raises:
        ValueError, TypeError: for an unknown chip, or a dtype that it does not compute in.
    """
    check_type("shape", shape, LayerShape)
    chip = soc if isinstance(soc, Soc) else find_soc(soc)
    if not chip.takes(shape.dtype):
        raise ValueError(f"shape.dtype is {shape.dtype}; {chip.version} does not compute in it")
    return plan_steps(layer_steps(shape, chip), shape, chip)


def plan_steps(steps: Sequence[Step], shape: LayerShape, soc: Soc) -> FusionPlan:
    """The plan of any line of steps: the cut of the least predicted time, by dynamic programming from the left."""
    steps = tuple(steps)
    allowed: dict[tuple[int, int], Rule] = {}
    rejected: list[Rejection] = []
    for rule in RULES:
        length = len(rule.kinds)
        for begin in range(len(steps) - length + 1):
            run = steps[begin : begin + length]
            if not rule.matches(run):
                continue
            reason = _objection(rule, run, shape, soc)
            if reason:
                saved = _apart(run) - _together(run, steps)
                rejected.append(Rejection(_names(run), rule.fusion or "", reason, saved))
            else:
                allowed[begin, begin + length] = rule
    chosen = _cheapest_cut(steps, allowed, soc)
    for (begin, end), rule in allowed.items():
        if (begin, end) not in chosen:
            run = steps[begin:end]
            rival = next(cut for cut in chosen if cut[0] < end and begin < cut[1] and cut[1] - cut[0] > 1)
            saved = _apart(run) - _together(run, steps)
            gain = _apart(steps[slice(*rival)]) - _together(steps[slice(*rival)], steps)
            reason = f"overlaps {' + '.join(_names(steps[slice(*rival)]))}, which saves {_size(gain)}"
            rejected.append(Rejection(_names(run), rule.fusion or "", reason, saved))
    groups = []
    for begin, end in chosen:
        run, used = steps[begin:end], allowed.get((begin, end))
        fusion = used.fusion.value if used is not None and used.fusion is not None else ""
        moved, operations = _together(run, steps), sum(step.operations for step in run)
        groups.append(
            Group(
                _names(run),
                fusion,
                used.kernel if used is not None else "",
                moved,
                operations,
                _seconds(run, moved, soc),
                _apart(run),
            )
        )
    return FusionPlan(soc.name, tuple(groups), tuple(rejected))


def _objection(rule: Rule, run: tuple[Step, ...], shape: LayerShape, soc: Soc) -> str:
    """Why a matching fusion cannot be taken; empty if it can."""
    if rule.fusion is None:
        return rule.why_not
    need = rule.unified_buffer(run, shape, soc)
    if need > soc.ub:
        return f"would spill: needs {_size(need)} of the unified buffer, a core of {soc.version} has {_size(soc.ub)}"
    change = layout_change(run)
    if change is not None:
        return f"a layout change from {change[0]} to {change[1]} lies between them on {soc.version}"
    lacking = refusal(rule, run, shape, soc)
    if lacking:
        return lacking
    between = workspace(rule, shape, soc)
    if between > L2_SHARE * soc.l2:
        return f"its workspace of {_size(between)} does not stay in an L2 cache of {_size(soc.l2)}"
    return ""


def _cheapest_cut(steps: tuple[Step, ...], allowed: dict[tuple[int, int], Rule], soc: Soc) -> list[tuple[int, int]]:
    best: list[tuple[float, list[tuple[int, int]]]] = [(0.0, [])]
    for end in range(1, len(steps) + 1):
        options = []
        for begin in range(end):
            if end - begin > 1 and (begin, end) not in allowed:
                continue
            run = steps[begin:end]
            seconds, cuts = best[begin]
            options.append((seconds + _seconds(run, _together(run, steps), soc), [*cuts, (begin, end)]))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]


def _together(run: tuple[Step, ...], steps: tuple[Step, ...]) -> int:
    """Bytes that one kernel moves for ``run``: what it reads from outside, and what others read of its results."""
    inside = {buffer for step in run for buffer in step.writes}
    reads = {buffer for step in run for buffer in step.reads} - inside
    outside = {buffer for step in steps if step not in run for buffer in step.reads}
    last = run[-1] is steps[-1]
    writes = {b for b in inside if b.kept or b in outside or (last and b in run[-1].writes)}
    return sum(buffer.bytes for buffer in reads | writes)


def _apart(run: tuple[Step, ...]) -> int:
    """Bytes of the same steps as kernels of their own."""
    return sum(sum(b.bytes for b in {*step.reads, *step.writes}) for step in run)


def _seconds(run: tuple[Step, ...], moved: int, soc: Soc) -> float:
    products = sum(step.operations for step in run if step.kind in ("matmul", "scores", "values"))
    return max(products / (soc.tera_flops * 1e12), moved / (soc.tera_bytes * 1e12)) + LAUNCH


def _names(run: tuple[Step, ...]) -> tuple[str, ...]:
    return tuple(step.name for step in run)


def _size(count: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
