"""Matrix products by torch.nn.functional.linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import LinearTraits
from atb_modules.strategies import LinearStrategy

#: Work factor of a half-precision product on a CPU without units for it: 128 against 20 GFLOP/s measured.
SLOW_HALF_FACTOR = 6.0


def linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``; a weight of another dtype than x is converted to it first (under autocast, by autocast)."""
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        weight = weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight, bias)


def cpu_has_half_units(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of ``dtype`` by units of its own."""
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: LinearTraits) -> Cost:
    operations = 2.0 * traits.rows * traits.in_features * traits.out_features
    weights = 1.0 * traits.in_features * traits.out_features
    moved = weights * traits.weight_dtype.itemsize
    half = traits.dtype in (torch.bfloat16, torch.float16)
    if half and traits.device_type == "cpu":
        operations *= 0.25 if cpu_has_half_units(traits.dtype) else SLOW_HALF_FACTOR
    calls = 1.0
    if traits.dtype != traits.weight_dtype:
        moved += 2.0 * weights * traits.dtype.itemsize
        calls += 1.0
    return Cost(operations=operations, bytes=moved, calls=calls)


register(Kernel("linear", LinearStrategy.TORCH, linear_torch, _no_reasons, _cost))
