"""Reference RMSNorm (Zhang and Sennrich, 2019) and LayerNorm (Ba et al., 2016), alone and after a residual add."""

from __future__ import annotations

import torch
from einops import rearrange, reduce
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import NormTraits
from atb_modules.strategies import NormStrategy


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, cast_first: bool = False
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight_offset + weight)`` over the last axis, statistics in float32 or float64.

    ``cast_first`` rounds the normalised values to x's dtype before the weight multiplies them (Llama's order).
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    normed = wide * torch.rsqrt(reduce(wide * wide, "... d -> ... 1", "mean") + eps)
    if weight is None:
        return normed.to(x.dtype)
    scale = weight.to(compute) + weight_offset
    if cast_first:
        return (normed.to(x.dtype).to(compute) * scale).to(x.dtype)
    return (normed * scale).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)``, the sum rounded to x's dtype first."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, weight_offset, cast_first), total


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis, biased variance."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    centred = wide - reduce(wide, "... d -> ... 1", "mean")
    normed = centred * torch.rsqrt(reduce(centred * centred, "... d -> ... 1", "mean") + eps)
    if weight is not None:
        normed = normed * weight.to(compute)
    if bias is not None:
        normed = normed + bias.to(compute)
    return normed.to(x.dtype)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """``(layer_norm(x + residual), x + residual)``, the sum rounded to x's dtype first."""
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps), total


def modulated_norm_reference(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer_norm: bool,
) -> Tensor:
    """``norm(x) * (1 + scale) + shift``: x (rows, width); scale and shift (groups, width)."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    normed = layer_norm_reference(wide, weight, bias, eps) if layer_norm else rms_norm_reference(wide, weight, eps)
    grouped = rearrange(normed, "(g n) d -> g n d", g=max(scale.shape[0], 1))
    scale, shift = (rearrange(t.to(compute), "g d -> g 1 d") for t in (scale, shift))
    return rearrange(grouped[: scale.shape[0]] * (1.0 + scale) + shift, "g n d -> (g n) d").to(x.dtype)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: NormTraits) -> Cost:
    return Cost(bytes=40.0 * traits.rows * traits.width, calls=10)


for _op, _function in (
    ("rms_norm", rms_norm_reference),
    ("add_rms_norm", add_rms_norm_reference),
    ("layer_norm", layer_norm_reference),
    ("add_layer_norm", add_layer_norm_reference),
    ("modulated_norm", modulated_norm_reference),
):
    register(Kernel(_op, NormStrategy.REFERENCE, _function, _no_reasons, _cost))
