"""Reference of a mixture of experts: every expert on every token, weighted with 0 where it was not chosen."""

from __future__ import annotations

import torch
from einops import einsum
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.reference.mlp import FORMULAS
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import MoETraits
from atb_modules.strategies import MLPStrategy


def moe_reference(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kind: str,
    gated: bool,
) -> Tensor:
    """``sum_k weights[t, k] expert[experts[t, k]](x[t])`` (Shazeer et al., 2017), float32 or float64, rounded once."""
    compute = torch.promote_types(x.dtype, torch.float32)
    numbers = torch.arange(up_proj.shape[0], device=experts.device)
    chosen = (experts.unsqueeze(-1) == numbers).to(compute)
    share = einsum(weights.to(compute), chosen, "t k, t k e -> t e")
    hidden = einsum(x.to(compute), up_proj.to(compute), "t h, e i h -> t e i")
    if up_bias is not None:
        hidden = hidden + up_bias.to(compute)
    if gated:
        gate, up = hidden.chunk(2, dim=-1)
        hidden = FORMULAS[kind](gate) * up
    else:
        hidden = FORMULAS[kind](hidden)
    out = einsum(hidden, down_proj.to(compute), "t e i, e h i -> t e h")
    if down_bias is not None:
        out = out + down_bias.to(compute)
    return einsum(out, share, "t e h, t e -> t h").to(x.dtype)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: MoETraits) -> Cost:
    return Cost(operations=2.0 * traits.tokens * traits.num_experts * traits.expert_weights, calls=20)


register(Kernel("moe", MLPStrategy.REFERENCE, moe_reference, _no_reasons, _cost))
