"""The registry's record of the native mixture of experts: what it cannot do, and what it costs."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import MoETraits
from atb_modules.strategies import MLPStrategy

from .ops_linear import GEMV_ROWS
from .records import common_reasons

_OPS = torch.ops.atb_modules


def moe_cpu(
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
    """Each expert's rows as in ``linear_cpu``; the gradient has no product of the whole weights but its own."""
    tensors = (x, weights, up_proj, down_proj, up_bias, down_bias)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return _OPS.moe(x, experts, weights, up_proj, down_proj, up_bias, down_bias, kind, gated, keep)[0]


def _reasons(spec: None, traits: MoETraits) -> tuple[str, ...]:
    reasons = common_reasons(traits.dtype, traits.weight_dtype)
    if traits.autocast:
        reasons.append("autocast decides the dtype of the products")
    return tuple(reasons)


def _cost(spec: None, traits: MoETraits) -> Cost:
    pairs = 1.0 * traits.tokens * traits.top_k
    live = min(float(traits.num_experts), pairs)
    operations = 2.0 * pairs * traits.expert_weights
    moved = live * traits.expert_weights * traits.weight_dtype.itemsize
    moved += pairs * traits.dtype.itemsize * (3.0 * traits.intermediate_size + 6.0 * traits.hidden_size)
    if live and pairs / live > GEMV_ROWS:
        operations *= 0.73  # the products of more rows are torch's, whose rate is higher
        if traits.weight_dtype != torch.float32:
            moved += 8.0 * live * traits.expert_weights
    return Cost(operations=operations, bytes=moved, calls=5.0 + 3.0 * live)


register(Kernel("moe", MLPStrategy.CPU, moe_cpu, _reasons, _cost, ("cpu",), transformable=False))
