"""The plain activations by torch's own kernels, which are at the limit: for every backend, where nothing is gated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: x sigmoid(1.702 x) is SiLU of 1.702 x, scaled back: one tensor fewer to keep for a backward.
_QUICK = 1.702


def activation_torch(x: Tensor, kind: str) -> Tensor:
    """The activation by name: silu, gelu, gelu_tanh, quick_gelu, relu, relu2."""
    if kind == "silu":
        return F.silu(x)
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "quick_gelu":
        return F.silu(_QUICK * x) * (1.0 / _QUICK)
    if kind == "relu":
        return F.relu(x)
    return F.relu(x).square()


def activation_torch_(x: Tensor, kind: str) -> Tensor:
    """The same in x's own memory, where no gradient is recorded."""
    if kind == "silu":
        return F.silu(x, inplace=True)
    if kind in ("gelu", "gelu_tanh"):
        return torch.ops.aten.gelu_(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    if kind in ("relu", "relu2"):
        return x.relu_() if kind == "relu" else x.relu_().square_()
    return F.silu(x.mul_(_QUICK), inplace=True).mul_(1.0 / _QUICK)
