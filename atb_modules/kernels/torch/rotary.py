"""Rotary embedding in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import RotaryTraits
from atb_modules.strategies import RotaryStrategy


def rotary_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (..., tokens, heads, head_dim), cos and sin (..., tokens, rotary_dim / 2); computed in float32."""
    rotary_dim = 2 * cos.shape[-1]
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(compute).unsqueeze(-2), sin.to(compute).unsqueeze(-2)
    turned = x[..., :rotary_dim].to(compute)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    if rotary_dim == x.shape[-1]:
        return rotated.to(x.dtype)
    return torch.cat([rotated.to(x.dtype), x[..., rotary_dim:]], dim=-1)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: RotaryTraits) -> Cost:
    return Cost(bytes=36.0 * traits.tokens * traits.num_heads * traits.head_dim, calls=8)


register(Kernel("rotary", RotaryStrategy.TORCH, rotary_torch, _no_reasons, _cost))
