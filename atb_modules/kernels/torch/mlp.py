"""Gated activations in plain PyTorch, and the chain of a feed-forward with the norm behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.kernels.activation import activation_torch
from atb_modules.kernels.costs import Cost
from atb_modules.kernels.half_units import cpu_has_half_units
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.torch.linear import SLOW_HALF_FACTOR, linear_torch
from atb_modules.kernels.torch.norm import add_layer_norm_torch, add_rms_norm_torch
from atb_modules.kernels.traits import ActivationTraits, MLPChainTraits
from atb_modules.strategies import MLPStrategy


def gated_activation_torch(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """``activation(gate) * up``, rounded once."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (activation_torch(gate.to(wide), kind) * up.to(wide)).to(gate.dtype)


def mlp_residual_norm_torch(
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
    """See ``mlp_residual_norm_reference``."""
    hidden = linear_torch(x, up)
    if gate is None:
        hidden = activation_torch(hidden, kind)
    else:
        hidden = gated_activation_torch(linear_torch(x, gate), hidden, kind)
    branch = linear_torch(hidden, down).to(residual.dtype)
    if keep is not None:
        branch = branch * keep * keep_scale
    if layer_norm:
        return add_layer_norm_torch(branch, residual, norm_weight, norm_bias, eps)
    return add_rms_norm_torch(branch, residual, norm_weight, eps)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: ActivationTraits) -> Cost:
    return Cost(bytes=20.0 * traits.rows * traits.width, calls=2)


register(Kernel("gated_activation", MLPStrategy.TORCH, gated_activation_torch, _no_reasons, _cost))


def _chain_cost(spec: None, traits: MLPChainTraits) -> Cost:
    operations = 2.0 * traits.rows * traits.weights
    if traits.device_type == "cpu" and traits.dtype in (torch.bfloat16, torch.float16):
        operations *= 0.25 if cpu_has_half_units(traits.dtype) else SLOW_HALF_FACTOR
    elements = 20.0 * traits.intermediate_size + 28.0 * traits.hidden_size
    moved = traits.weights * traits.weight_dtype.itemsize + traits.rows * elements
    return Cost(operations=operations, bytes=moved, calls=14)


register(Kernel("fused_mlp_residual_norm", MLPStrategy.TORCH, mlp_residual_norm_torch, _no_reasons, _chain_cost))
