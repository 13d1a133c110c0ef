"""Gated activations in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import ActivationTraits
from atb_modules.strategies import MLPStrategy


def activation_torch(x: Tensor, kind: str) -> Tensor:
    """The activation by name: silu, gelu, gelu_tanh, relu2."""
    if kind == "silu":
        return F.silu(x)
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return F.relu(x).square()


def gated_activation_torch(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """``activation(gate) * up``, rounded once."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (activation_torch(gate.to(wide), kind) * up.to(wide)).to(gate.dtype)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: ActivationTraits) -> Cost:
    return Cost(bytes=20.0 * traits.rows * traits.width, calls=2)


register(Kernel("gated_activation", MLPStrategy.TORCH, gated_activation_torch, _no_reasons, _cost))
