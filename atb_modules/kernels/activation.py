"""The plain activations by torch's own kernels, which are at the limit: for every backend, where nothing is gated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def activation_torch(x: Tensor, kind: str) -> Tensor:
    """The activation by name: silu, gelu, gelu_tanh, quick_gelu, relu, relu2."""
    if kind == "silu":
        return F.silu(x)
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if kind == "relu":
        return F.relu(x)
    return F.relu(x).square()
