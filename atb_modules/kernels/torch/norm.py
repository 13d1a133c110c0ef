"""RMSNorm and LayerNorm in plain PyTorch, alone and after a residual add."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import NormTraits
from atb_modules.strategies import NormStrategy


def rms_norm_torch(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, cast_first: bool = False
) -> Tensor:
    """Statistics in float32 (float64 for float64); see ``rms_norm_reference`` for the options."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    scale = weight.to(wide.dtype)
    if weight_offset:
        scale = scale + weight_offset
    if cast_first:
        return (normed.to(x.dtype) * scale).to(x.dtype)
    return (normed * scale).to(x.dtype)


def add_rms_norm_torch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)``."""
    total = x + residual
    return rms_norm_torch(total, weight, eps, weight_offset, cast_first), total


def layer_norm_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``torch.nn.functional.layer_norm``, in float32 where the parameters' dtype is not x's."""
    if all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(x.dtype)


def add_layer_norm_torch(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """``(layer_norm(x + residual), x + residual)``."""
    total = x + residual
    return layer_norm_torch(total, weight, bias, eps), total


def modulated_norm_torch(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer_norm: bool,
) -> Tensor:
    """See ``modulated_norm_reference``; rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(wide)
    normed = layer_norm_torch(rows, weight, bias, eps) if layer_norm else rms_norm_torch(rows, weight, eps)
    groups = scale.shape[0]
    grouped = normed.reshape(groups, x.shape[0] // max(groups, 1), x.shape[1])
    return (
        torch.addcmul(shift.to(wide).unsqueeze(1), grouped, 1.0 + scale.to(wide).unsqueeze(1))
        .reshape(x.shape)
        .to(x.dtype)
    )


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: NormTraits) -> Cost:
    return Cost(bytes=28.0 * traits.rows * traits.width, calls=7)


for _op, _function in (
    ("rms_norm", rms_norm_torch),
    ("add_rms_norm", add_rms_norm_torch),
    ("layer_norm", layer_norm_torch),
    ("add_layer_norm", add_layer_norm_torch),
    ("modulated_norm", modulated_norm_torch),
):
    register(Kernel(_op, NormStrategy.TORCH, _function, _no_reasons, _cost))
