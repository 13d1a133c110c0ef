"""Which chip the NPU kernels have to reckon with, and whether torch_npu is there at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from atb_modules.kernels.ascend.socs import SOCS, Soc, find_soc

_ASSUMED: ContextVar[Soc | None] = ContextVar("atb_modules_assumed_soc", default=None)


#: the chip's name once one was found; that none was found may change with the next import
_FOUND: list[str] = []


def _found_name() -> str:
    """The name of the first NPU's chip, a key of ``SOCS``; or a sentence, why none is known."""
    if _FOUND:
        return _FOUND[0]
    npu = getattr(torch, "npu", None)
    if npu is None:
        return "torch_npu is not imported"
    try:
        name = npu.get_device_name(0)
    except Exception as error:  # whatever the driver says
        return f"no NPU answers ({error})"
    try:
        _FOUND.append(find_soc(name).name)
    except ValueError:
        return f"the chip {name!r} is not among those whose rules are known"
    return _FOUND[0]


#: torch.compile calls it instead of tracing it: the chip does not change (what assume_constant_result marks)
_found_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def current_soc() -> Soc | None:
    """The chip whose rules hold: the assumed one, else that of the first NPU; None without one."""
    assumed = None if torch.compiler.is_compiling() else _ASSUMED.get()
    return SOCS.get(_found_name()) if assumed is None else assumed


def missing_soc() -> str:
    """Why ``current_soc`` is None."""
    found = _found_name()
    return "" if found in SOCS else found


@contextlib.contextmanager
def assume_soc(soc: str | Soc) -> Iterator[Soc]:
    """Inside, ``reasons()`` of NPU kernels are those of this chip; for planning and tests away from it."""
    from atb_modules.kernels import registry

    chip = soc if isinstance(soc, Soc) else find_soc(soc)
    token = _ASSUMED.set(chip)
    registry.forget_choices()
    try:
        yield chip
    finally:
        _ASSUMED.reset(token)
        registry.forget_choices()
