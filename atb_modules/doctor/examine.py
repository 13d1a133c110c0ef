"""Put a report together: software, environment, kernels."""

from __future__ import annotations

import time

from atb_modules.checks import check_bool, check_type
from atb_modules.doctor.data import Report
from atb_modules.doctor.environment import check_environment, variables_of
from atb_modules.doctor.places import Places
from atb_modules.doctor.software import find_software
from atb_modules.kernels.ascend.socs import find_soc


def examine(soc: str | None, places: Places | None, kernels: bool, slow: bool) -> Report:
    """See ``atb_modules.doctor.report``."""
    from atb_modules.doctor import kernel_checks

    start = time.perf_counter()
    check_type("places", places, Places, optional=True)
    check_bool("kernels", kernels)
    check_bool("slow", slow)
    chip = None if soc is None else find_soc(soc)
    places = Places() if places is None else places
    software, findings = find_software(places)
    pair, more = check_environment(software, places)
    return Report(
        software=software,
        variables=variables_of(places),
        verdict=pair.verdict,
        verdict_reason=pair.reason,
        findings=(*findings, *more),
        native=kernel_checks.native_library(),
        checked=kernel_checks.check_kernels(slow) if kernels else (),
        unchecked_ops=kernel_checks.unchecked_ops() if kernels else (),
        planned_soc=None if chip is None else chip.name,
        planned=() if chip is None else kernel_checks.plan_kernels(chip),
        seconds=time.perf_counter() - start,
    )
