"""Reference matrix product with a weight."""

from __future__ import annotations

import torch
from einops import einsum
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import LinearTraits
from atb_modules.strategies import LinearStrategy


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weight^T + bias`` with weight (out, in), computed in float32 or float64, rounded once to x's dtype."""
    compute = torch.promote_types(x.dtype, torch.float32)
    out = einsum(x.to(compute), weight.to(compute), "... i, o i -> ... o")
    return (out if bias is None else out + bias.to(compute)).to(x.dtype)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: LinearTraits) -> Cost:
    return Cost(operations=2.0 * traits.rows * traits.in_features * traits.out_features, calls=5)


register(Kernel("linear", LinearStrategy.REFERENCE, linear_reference, _no_reasons, _cost))
