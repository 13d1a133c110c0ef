"""The plain activations by torch's own kernels, which are at the limit: for every backend, where nothing is gated."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def activation_torch(x: Tensor, kind: str) -> Tensor:
    """The activation by name: silu, gelu, gelu_tanh, relu2."""
    if kind == "silu":
        return F.silu(x)
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return F.relu(x).square()
