"""Reference of a norm and the product that reads it."""

from __future__ import annotations

from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.reference.linear import linear_reference
from atb_modules.kernels.reference.norm import rms_norm_reference
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import LinearTraits
from atb_modules.strategies import LinearStrategy


def norm_linear_reference(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_first: bool = False,
) -> Tensor:
    """The normed rows are rounded to x's dtype, as they would be in memory, then multiplied."""
    return linear_reference(rms_norm_reference(x, norm_weight, eps, weight_offset, cast_first), weight, bias)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: LinearTraits) -> Cost:
    return Cost(operations=2.0 * traits.rows * traits.in_features * traits.out_features, calls=9)


register(Kernel("norm_linear", LinearStrategy.REFERENCE, norm_linear_reference, _no_reasons, _cost))
