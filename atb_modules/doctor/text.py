"""A report as text for a terminal: software, what to do, and a line for each op."""

from __future__ import annotations

from collections.abc import Iterator

from atb_modules.doctor.data import Found, KernelCheck, Level, PlannedKernel, Report, Status
from atb_modules.doctor.log import explain_lines

_MARKS = {Level.MISMATCH: "!!", Level.WARNING: "! ", Level.NOTE: "  "}
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def report_text(report: Report) -> str:
    """The whole report."""
    blocks = [_software(report), _environment(report), _kernels(report), _plan(report), _end(report)]
    return "\n".join(line for block in blocks for line in block)


def _software(report: Report) -> Iterator[str]:
    software = report.software
    yield "Software"
    yield f"  atb_modules  {software.atb_modules}"
    yield f"  Python       {software.python}"
    yield f"  torch        {software.torch} (C++ ABI {software.torch_abi})"
    parts = (
        ("numpy", software.numpy),
        ("torch_npu", software.torch_npu),
        ("CANN", software.cann),
        ("ATB", software.atb),
        ("Ascend C", software.ascend_c),
        ("driver", software.driver),
        ("firmware", software.firmware),
        ("SoC", software.soc),
    )
    missing = [name for name, found in parts if not found.value and not found.source]
    for name, found in parts:
        if name not in missing:
            yield f"  {name:<12} {_found(found)}"
    if missing:
        yield f"  not here     {', '.join(missing)}"
    native = report.native
    if native.problem is not None:
        yield f"  C++ kernels  {native.problem}"
    else:
        units = "with" if native.bfloat16_units else "without"
        sets = ", ".join(native.instruction_sets)
        yield f"  C++ kernels  {native.in_use} in use, of {sets}; a processor {units} bfloat16 units"


def _found(found: Found) -> str:
    return f"{found.value or 'unknown'}{f' ({found.source})' if found.source else ''}"


def _environment(report: Report) -> Iterator[str]:
    if report.variables:
        yield "Environment"
        width = max(len(name) for name, _ in report.variables)
        for name, value in report.variables:
            yield f"  {name:<{width}}  {value}"
    yield f"Ascend: {report.verdict.value}"
    yield f"  {report.verdict_reason}"
    order = list(_MARKS)
    for finding in sorted(report.findings, key=lambda finding: order.index(finding.level)):
        yield f"{_MARKS[finding.level]}{finding.subject}: {finding.text}"
        if finding.next_step:
            yield f"    -> {finding.next_step}"


def _kernels(report: Report) -> Iterator[str]:
    for device in dict.fromkeys(check.device for check in report.checked):
        emulated = " (emulated)" if device == "npu" and report.software.emulated else ""
        checks = [check for check in report.checked if check.device == device]
        dtypes = "/".join(dict.fromkeys(_SHORT.get(check.dtype, check.dtype) for check in checks))
        yield f"Kernels on {device}{emulated}: largest error against the reference, {dtypes}"
        for op in dict.fromkeys(check.op for check in checks):
            yield from _op(op, [check for check in checks if check.op == op])
        yield from _reasons(checks)
    for op in report.unchecked_ops:
        yield f"  {op}: not checked, the doctor knows no call of it"


def _op(op: str, checks: list[KernelCheck]) -> Iterator[str]:
    """The kernels that ran, and below them those that failed, with what they did."""
    dtypes, ran = dict.fromkeys(check.dtype for check in checks), []
    for strategy in dict.fromkeys(check.strategy for check in checks):
        own = [c for c in checks if c.strategy == strategy and c.status in (Status.AGREES, Status.FAILS)]
        if own:
            errors = {check.dtype: _error(check) for check in own}
            ran.append(f"{strategy} {'/'.join(errors.get(dtype, '-') for dtype in dtypes)}")
    yield f"  {op:<24} {', '.join(ran) or 'none'}"
    failures: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for check in checks:
        if check.status is Status.FAILS:
            failures.setdefault((check.strategy, check.why), []).append(_SHORT.get(check.dtype, check.dtype))
    for (strategy, why), failing in failures.items():
        yield f"!!  {strategy} FAILS in {', '.join(failing)}: {'; '.join(why)}"
        for cause in explain_lines(why).causes[:1]:
            yield f"    -> {cause.name}: {cause.meaning}"


def _error(check: KernelCheck) -> str:
    return "raised" if check.largest_error is None else f"{check.largest_error:.0e}"


def _reasons(checks: list[KernelCheck]) -> Iterator[str]:
    """Why the others did not run: one line a reason, with the kernels that it holds for."""
    held: dict[str, dict[str, dict[str, None]]] = {}
    for check in checks:
        if check.status in (Status.CANNOT, Status.NOT_RUN):
            for reason in check.why:
                held.setdefault(reason, {}).setdefault(check.strategy, {})[check.op] = None
    for reason, strategies in held.items():
        for strategy, ops in strategies.items():
            named = ", ".join(ops) if len(ops) <= 3 else f"{len(ops)} ops"
            yield f"  not run: {strategy} ({named}): {reason}"


def _plan(report: Report) -> Iterator[str]:
    if report.planned_soc is None:
        return
    yield f"NPU kernels on {report.planned_soc}, by their documented rules (nothing ran)"
    for op in dict.fromkeys(row.op for row in report.planned):
        rows = [row for row in report.planned if row.op == op]
        taken = [_SHORT.get(row.dtype, row.dtype) for row in rows if not row.reasons]
        yield f"  {op:<24} {', '.join(taken) or 'none'}"
        yield from _refusals(rows)


def _refusals(rows: list[PlannedKernel]) -> Iterator[str]:
    for reason in dict.fromkeys(reason for row in rows for reason in row.reasons):
        dtypes = ", ".join(_SHORT.get(row.dtype, row.dtype) for row in rows if reason in row.reasons)
        yield f"    not {dtypes}: {reason}"


def _end(report: Report) -> Iterator[str]:
    agree = sum(check.status is Status.AGREES for check in report.checked)
    failed = len(report.failed)
    if report.checked:
        kernels = f"{agree} checks of kernels agree" + (f", {failed} FAIL" if failed else "")
    else:
        kernels = "kernels were not run"
    mismatches = sum(finding.level is Level.MISMATCH for finding in report.findings)
    yield f"{'fine' if report.ok else 'NOT FINE'}: {kernels}, {mismatches} mismatch(es), {report.seconds:.1f} s"
