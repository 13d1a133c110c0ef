"""What a report holds: frozen data, readable by ``str()``, JSON-able by ``as_dict()``."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How much a finding matters."""

    MISMATCH = "mismatch"  # will not work as it is
    WARNING = "warning"  # is known to trouble others
    NOTE = "note"  # worth knowing


class Verdict(StrEnum):
    """How the parts of an Ascend installation go together."""

    COMPATIBLE = "compatible"  # released for each other, nothing found against them
    MISMATCHED = "mismatched"  # something is known not to work
    UNKNOWN = "unknown"  # not in the matrix, which is no proof of anything


class Status(StrEnum):
    """What became of one kernel on one small call."""

    AGREES = "agrees"  # ran, and is within the bound of its reference
    FAILS = "fails"  # ran, and is not; or raised
    CANNOT = "cannot"  # has reasons against the call
    NOT_RUN = "not run"  # could run, but was left out


@dataclass(frozen=True)
class Found:
    """A version that was looked for: ``value`` None where there is none, ``source`` where it was read."""

    value: str | None = None
    source: str = ""


@dataclass(frozen=True)
class Software:
    """Versions. ``torch_abi``, ``atb_abi``: ``_GLIBCXX_USE_CXX11_ABI`` of torch and of ATB (nnal), their C++ ABI."""

    python: str
    atb_modules: str
    torch: str
    numpy: Found = Found()
    torch_npu: Found = Found()
    torch_pin: str | None = None  # what torch_npu's metadata asks of torch
    cann: Found = Found()
    cann_home: str | None = None
    atb: Found = Found()
    ascend_c: Found = Found()  # our own kernels, as built with CANN
    driver: Found = Found()
    firmware: Found = Found()
    soc: Found = Found()
    torch_abi: int = 1
    atb_abi: int | None = None
    emulated: bool = False


@dataclass(frozen=True)
class Finding:
    """Something about the environment: what it is about, what was found, what to do."""

    level: Level
    subject: str
    text: str
    next_step: str = ""


@dataclass(frozen=True)
class NativeLibrary:
    """The C++ library of the CPU kernels: ``problem`` says why it is not there."""

    problem: str | None
    instruction_sets: tuple[str, ...] = ()
    in_use: str | None = None
    bfloat16_units: bool = False


@dataclass(frozen=True)
class KernelCheck:
    """One kernel on one small call: ``largest_error`` is relative to the largest number of the reference."""

    op: str
    strategy: str
    device: str
    dtype: str
    status: Status
    largest_error: float | None = None
    allowed: float | None = None
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedKernel:
    """Whether an NPU kernel would take the small call on the chip that was asked about; empty ``reasons``: yes."""

    op: str
    strategy: str
    dtype: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All that the doctor found. ``ok`` is False for a mismatch or a kernel that fails."""

    software: Software
    variables: tuple[tuple[str, str], ...]
    verdict: Verdict
    verdict_reason: str
    findings: tuple[Finding, ...]
    native: NativeLibrary
    checked: tuple[KernelCheck, ...] = ()
    unchecked_ops: tuple[str, ...] = ()  # ops of the registry for which no small call is known
    planned_soc: str | None = None
    planned: tuple[PlannedKernel, ...] = ()
    seconds: float = 0.0

    @property
    def failed(self) -> tuple[KernelCheck, ...]:
        return tuple(check for check in self.checked if check.status is Status.FAILS)

    @property
    def ok(self) -> bool:
        return not self.failed and not any(finding.level is Level.MISMATCH for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and finite numbers; an error that is not finite is the word for it."""
        plain = _plain(dataclasses.asdict(self))
        plain["variables"] = dict(self.variables)
        return {"ok": self.ok, **plain}

    def __str__(self) -> str:
        from atb_modules.doctor.text import report_text

        return report_text(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
