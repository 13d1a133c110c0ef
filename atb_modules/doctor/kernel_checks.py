"""Every kernel that can run here, run once on a small call against its reference; the others with their reasons."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from atb_modules.doctor.calls import SLOW_CALLS, SMALL_CALLS, Inputs, SmallCall
from atb_modules.doctor.data import KernelCheck, NativeLibrary, PlannedKernel, Status
from atb_modules.doctor.software import is_emulated
from atb_modules.kernels.ascend.availability import assume_soc
from atb_modules.kernels.ascend.socs import Soc
from atb_modules.kernels.cpu import library
from atb_modules.kernels.registry import kernels
from atb_modules.strategies import OP_FAMILIES

#: the largest error, relative to the largest number of the reference: wide enough for every order of summation and
#: rounding between steps, and far below what a wrong formula makes. The parity harness is stricter.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "npu": (torch.float32, torch.bfloat16, torch.float16)}
_COMPILES = "compiles for each call; --slow (slow=True) runs it"


def native_library() -> NativeLibrary:
    """The C++ library of the CPU kernels, as this process loaded it."""
    problem = library.unavailable_reason()
    if problem is not None:
        return NativeLibrary(problem)
    return NativeLibrary(None, library.available_isas(), library.current_isa(), library.cpu_has_bf16_units())


def devices() -> tuple[str, ...]:
    """Kinds of devices to check: the CPU, and the NPU where there is one."""
    npu = getattr(torch, "npu", None)
    try:
        return ("cpu", "npu") if npu is not None and npu.is_available() else ("cpu",)
    except Exception:  # whatever the driver says; the report tells it under SoC
        return ("cpu",)


def unchecked_ops() -> tuple[str, ...]:
    """Ops with kernels but without a small call."""
    return tuple(op for op in OP_FAMILIES if op not in SMALL_CALLS and kernels(op))


def check_kernels(slow: bool = False) -> tuple[KernelCheck, ...]:
    """Run them all; ``slow`` those too that compile for each call."""
    checks: list[KernelCheck] = []
    for device in devices():
        with torch.no_grad(), torch.autocast(device, enabled=False), torch.device("cpu"), _computing(device):
            for call in SMALL_CALLS.values():
                for dtype in _DTYPES[device]:
                    checks += _check_call(call, device, dtype, slow)
    return tuple(checks)


@contextlib.contextmanager
def _computing(device: str) -> Iterator[None]:
    """An emulated NPU computes inside ``EmulatedNPU`` alone; anything else computes by itself."""
    if device == "npu" and is_emulated():
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        from atb_modules.testing.npu import EmulatedNPU

        if not any(isinstance(mode, EmulatedNPU) for mode in _get_current_dispatch_mode_stack()):
            with EmulatedNPU():
                yield
            return
    yield


def _check_call(call: SmallCall, device: str, dtype: torch.dtype, slow: bool) -> Iterator[KernelCheck]:
    golden: dict[SmallCall, tuple[Tensor, ...]] = {}
    name = str(dtype).removeprefix("torch.")
    try:
        explanation = call.explain(Inputs(dtype, device))
    except Exception as raised:  # a device that does not compute, a kernel whose rules raise
        yield KernelCheck(call.op, "all", device, name, Status.FAILS, why=(f"cannot be asked: {_first(raised)}",))
        return
    for kernel in kernels(call.op):
        if kernel.device_types and device not in kernel.device_types and "cpu" in kernel.device_types:
            continue  # of the CPU, on another device: not worth a line
        check = KernelCheck(call.op, kernel.strategy.value, device, name, Status.CANNOT)
        own = SLOW_CALLS.get((call.op, kernel.strategy.value), call)
        if own is not call and not slow:
            yield dataclasses.replace(check, status=Status.NOT_RUN, why=(_COMPILES,))
            continue
        table = explanation if own is call else own.explain(Inputs(dtype, device))
        reasons = next(row.reasons for row in table.rows if row.strategy == kernel.strategy.value)
        if reasons:
            yield dataclasses.replace(check, why=reasons)
            continue
        try:
            if own not in golden:
                golden[own] = own.golden(dtype)
        except Exception as raised:  # what a broken reference raises is no reason to end here
            yield dataclasses.replace(check, status=Status.FAILS, why=(f"its reference raised {_first(raised)}",))
            continue
        yield _run(check, own, Inputs(dtype, device), golden[own])


def _run(check: KernelCheck, call: SmallCall, inputs: Inputs, golden: tuple[Tensor, ...]) -> KernelCheck:
    allowed = ALLOWED[inputs.dtype]
    try:
        found = call.run(inputs, check.strategy)
        error = _largest_error(found, golden)
    except Exception as raised:  # whatever a broken kernel raises is what the report is for
        if is_emulated() and check.device == "npu" and _not_emulated(raised):
            gap = f"the emulation does not compute it: {_first(raised)}"
            return dataclasses.replace(check, status=Status.NOT_RUN, why=(gap,))
        return dataclasses.replace(check, status=Status.FAILS, why=(_first(raised),))
    agrees = error <= allowed
    why = () if agrees else (f"off by {error:.1e} of the largest number, allowed {allowed:.0e}",)
    status = Status.AGREES if agrees else Status.FAILS
    return dataclasses.replace(check, status=status, largest_error=error, allowed=allowed, why=why)


def _not_emulated(raised: Exception) -> bool:
    """Whether a call fell through the emulation: it has no reference, or reached the stubs, which compute nothing."""
    return type(raised).__name__ == "NoReferenceError" or "NPU function error: call aclnn" in str(raised)


def _first(raised: Exception) -> str:
    """Its kind and first line."""
    return f"{type(raised).__name__}: {(str(raised).strip().splitlines() or [''])[0][:300]}"


def _largest_error(found: tuple[Tensor, ...], golden: tuple[Tensor, ...]) -> float:
    """Over all results; infinite where a number is missing, a shape or the count of results is another."""
    if len(found) != len(golden):
        raise ValueError(f"the kernel returned {len(found)} results, its reference {len(golden)}")
    largest = 0.0
    for mine, truth in zip(found, golden, strict=True):
        if mine.shape != truth.shape:
            raise ValueError(f"the kernel returned {tuple(mine.shape)}, its reference {tuple(truth.shape)}")
        error = (mine.cpu().double() - truth).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
        scale = max(float(truth.abs().max()), torch.finfo(torch.float32).tiny)
        largest = max(largest, float(error.max()) / scale)
    return largest


def plan_kernels(soc: Soc) -> tuple[PlannedKernel, ...]:
    """Whether the NPU kernels would take the small calls on ``soc``; nothing runs."""
    planned = []
    with torch.no_grad(), assume_soc(soc):
        for call in SMALL_CALLS.values():
            of_npu = [kernel for kernel in kernels(call.op) if "npu" in kernel.device_types]
            for dtype in _DTYPES["npu"] if of_npu else ():
                here = call.explain(Inputs(dtype))
                traits = dataclasses.replace(here.traits, device_type="npu")
                for kernel in of_npu:
                    reasons = kernel.reasons_against(here.spec, traits)
                    name = str(dtype).removeprefix("torch.")
                    planned.append(PlannedKernel(call.op, kernel.strategy.value, name, reasons))
    return tuple(planned)
