"""A norm and the product that reads it, one after the other, in plain PyTorch."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.torch.linear import _cost as linear_cost
from atb_modules.kernels.torch.linear import linear_torch
from atb_modules.kernels.torch.norm import rms_norm_torch
from atb_modules.kernels.traits import LinearTraits
from atb_modules.strategies import LinearStrategy


def norm_linear_torch(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_first: bool = False,
) -> Tensor:
    """``linear_torch`` of ``rms_norm_torch``."""
    return linear_torch(rms_norm_torch(x, norm_weight, eps, weight_offset, cast_first), weight, bias)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: LinearTraits) -> Cost:
    product = linear_cost(spec, traits)
    moved = 4.0 * traits.rows * traits.in_features * traits.dtype.itemsize
    return dataclasses.replace(product, bytes=product.bytes + moved, calls=product.calls + 7.0)


register(Kernel("norm_linear", LinearStrategy.TORCH, norm_linear_torch, _no_reasons, _cost))
