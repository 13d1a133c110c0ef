"""Rules that many operators share, as checks that raise ``OperatorError``."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import current_soc, require

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def is_310p() -> bool:
    """Whether the rules of the inference chip 310P hold ("Atlas inference products" in the docs)."""
    return current_soc().name == "ascend310p"


def is_950() -> bool:
    """Whether the rules of the 950 family hold ("Atlas 350", "Ascend 950" in the docs)."""
    return current_soc().name == "ascend950"


def require_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...] = FLOATS) -> None:
    """A dtype among ``allowed``, and one that the SoC computes in."""
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    require(tensor.dtype in allowed, f"{name} is {tensor.dtype}; supported: {names}")
    require(tensor.dtype != torch.bfloat16 or current_soc().bfloat16, f"{name} is bfloat16, which this SoC lacks")


def require_same_dtype(**tensors: Tensor | None) -> None:
    """All given tensors have one dtype."""
    given = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    shown = ", ".join(f"{name} {dtype}" for name, dtype in given.items())
    require(len(set(given.values())) <= 1, f"dtypes must be the same, got {shown}")


def require_contiguous(**tensors: Tensor | None) -> None:
    """Operators whose docs say "non-contiguous tensors are not supported"."""
    for name, tensor in tensors.items():
        require(tensor is None or tensor.is_contiguous(), f"{name} is not contiguous; such tensors are not supported")


def require_not_310p() -> None:
    """Operators whose list of supported products lacks the inference chip."""
    require(not is_310p(), "not among the products that the operator supports")


def lowest(dtype: torch.dtype = torch.float32) -> float:
    """The finite number that stands for minus infinity on the vector unit."""
    return torch.finfo(dtype).min
