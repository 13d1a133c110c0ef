"""Reference of the activations between the two products of a feed-forward, and of its chain with the norm behind it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.reference.linear import linear_reference
from atb_modules.kernels.reference.norm import add_layer_norm_reference, add_rms_norm_reference
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import ActivationTraits, MLPChainTraits
from atb_modules.strategies import MLPStrategy

#: The activations by name, as the papers write them (SiLU: Elfwing et al.; GELU, also quick: Hendrycks and Gimpel;
#: ReLU2: Primer).
FORMULAS = {
    "silu": lambda x: x / (1.0 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1.0 + torch.exp(-1.702 * x)),
    "relu": lambda x: x.clamp(min=0.0),
    "relu2": lambda x: x.clamp(min=0.0) ** 2,
}


def gated_activation_reference(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """``activation(gate) * up`` in float32 or float64, rounded once (GLU variants: Shazeer, 2020)."""
    compute = torch.promote_types(gate.dtype, torch.float32)
    return (FORMULAS[kind](gate.to(compute)) * up.to(compute)).to(gate.dtype)


def mlp_residual_norm_reference(
    x: Tensor,
    residual: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    kind: str,
    keep: Tensor | None,
    keep_scale: float,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    layer_norm: bool,
) -> tuple[Tensor, Tensor]:
    """``h = residual + keep_scale * keep * mlp(x)`` and ``(norm(h), h)``; weights (out, in), keep 0 or 1 or None."""
    hidden = linear_reference(x, up)
    if gate is None:
        compute = torch.promote_types(x.dtype, torch.float32)
        hidden = FORMULAS[kind](hidden.to(compute)).to(x.dtype)
    else:
        hidden = gated_activation_reference(linear_reference(x, gate), hidden, kind)
    branch = linear_reference(hidden, down)
    if keep is not None:
        branch = (branch * keep * keep_scale).to(x.dtype)
    if layer_norm:
        return add_layer_norm_reference(branch, residual, norm_weight, norm_bias, eps)
    return add_rms_norm_reference(branch, residual, norm_weight, eps)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: ActivationTraits) -> Cost:
    return Cost(bytes=40.0 * traits.rows * traits.width, calls=10)


register(Kernel("gated_activation", MLPStrategy.REFERENCE, gated_activation_reference, _no_reasons, _cost))


def _chain_cost(spec: None, traits: MLPChainTraits) -> Cost:
    return Cost(operations=2.0 * traits.rows * traits.weights, calls=35)


register(
    Kernel("fused_mlp_residual_norm", MLPStrategy.REFERENCE, mlp_residual_norm_reference, _no_reasons, _chain_cost)
)
