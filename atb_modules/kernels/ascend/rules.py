"""Sentences against a call, shared by the records of the NPU kernels; each follows a documented rule of an operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from atb_modules.kernels.ascend.availability import current_soc, missing_soc
from atb_modules.kernels.ascend.socs import Soc

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def chip_and_dtype(traits: Any, operator: str, allowed: tuple[torch.dtype, ...], on_310p: bool = True) -> Iterator[str]:
    """No known chip, a dtype that the operator or the chip does not take, a chip that the operator does not run on."""
    soc = current_soc()
    if soc is None:
        yield f"no Ascend chip is known: {missing_soc()}"
        return
    if traits.dtype not in allowed:
        yield f"{operator} takes {', '.join(map(short, allowed))}, the call is {short(traits.dtype)}"
    elif not soc.takes(traits.dtype):
        yield f"{soc.version} does not compute in {short(traits.dtype)}"
    if not on_310p and is_310p(soc):
        yield f"{operator} does not run on {soc.version}"


def is_310p(soc: Soc | None = None) -> bool:
    """Whether ``soc``, by default the chip whose rules hold, is a 310P."""
    soc = soc or current_soc()
    return soc is not None and soc.name == "ascend310p"


def whole_blocks(traits: Any) -> Iterator[str]:
    """Rows of our kernels that a 310P, which has no DataCopyPad, cannot copy; ``AtbCheckRows`` of the tilings."""
    soc, row = current_soc(), traits.width * traits.dtype.itemsize
    if soc is not None and is_310p(soc) and row % 32:
        yield f"{soc.version} copies multiples of 32 bytes, a row has {row}"


def recorded(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records what is computed of these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
