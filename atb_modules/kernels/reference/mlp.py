"""Reference of the activations between the two products of a feed-forward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import ActivationTraits
from atb_modules.strategies import MLPStrategy

#: The activations by name, as the papers write them (SiLU: Elfwing et al.; GELU: Hendrycks and Gimpel; ReLU2: Primer).
FORMULAS = {
    "silu": lambda x: x / (1.0 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "relu2": lambda x: x.clamp(min=0.0) ** 2,
}


def gated_activation_reference(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """``activation(gate) * up`` in float32 or float64, rounded once (GLU variants: Shazeer, 2020)."""
    compute = torch.promote_types(gate.dtype, torch.float32)
    return (FORMULAS[kind](gate.to(compute)) * up.to(compute)).to(gate.dtype)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: ActivationTraits) -> Cost:
    return Cost(bytes=40.0 * traits.rows * traits.width, calls=10)


register(Kernel("gated_activation", MLPStrategy.REFERENCE, gated_activation_reference, _no_reasons, _cost))
