"""The doctor: what can run on this machine, why not the rest, and what a known error text means.

``python -m atb_modules.doctor`` prints the report, ``report()`` returns it as data. Everything heavy is imported when
it is called, so that importing this package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atb_modules.doctor.data import Report
    from atb_modules.doctor.log import LogExplanation, explain_log
    from atb_modules.doctor.places import Places

__all__ = ["LogExplanation", "Places", "Report", "explain_log", "report"]

_HOMES = {"LogExplanation": "log", "Places": "places", "Report": "data", "explain_log": "log"}


def report(soc: str | None = None, *, places: Places | None = None, kernels: bool = True, slow: bool = False) -> Report:
    """Look at this machine: versions, environment, and every kernel of the registry run once against its reference.

    Args:
        soc: an Ascend chip to plan for, a key of ``kernels.ascend.socs.SOCS`` or a version of one: the report then says
            which NPU kernels would take the small calls there. Nothing runs for that.
        places: where to look for software; default this machine and process.
        kernels: whether to run kernels; without, the report is about software and environment alone.
        slow: whether kernels that compile for each call run too.

    Raises:
        ValueError, TypeError: for a chip that is not known, or an argument of another kind.
    """
    from atb_modules.doctor.examine import examine

    return examine(soc, places, kernels, slow)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
