"""Matrix products by torch.nn.functional.linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.half_units import cpu_has_half_units
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import LinearTraits, under_autocast
from atb_modules.strategies import LinearStrategy

#: Work factor of a half-precision product on a CPU without units for it: 128 against 20 GFLOP/s measured.
SLOW_HALF_FACTOR = 6.0
#: Rows from which converting the weight to float32 pays there.
FLOAT32_ROWS = 16


def linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` in the wider of x's and the weight's dtype (under autocast, in autocast's).

    On a CPU without units for x's half precision, more than a few rows are computed in float32: six times as fast.
    """
    if under_autocast(x.device.type):
        return F.linear(x, weight, bias)
    if _in_float32(x.device.type, x.dtype, x.numel() // max(x.shape[-1], 1)):
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)
    wide = torch.promote_types(x.dtype, weight.dtype)
    bias = None if bias is None else bias.to(wide)
    return F.linear(x.to(wide), weight.to(wide), bias).to(x.dtype)


def _in_float32(device_type: str, dtype: torch.dtype, rows: int) -> bool:
    half = dtype in (torch.bfloat16, torch.float16)
    return half and device_type == "cpu" and rows >= FLOAT32_ROWS and not cpu_has_half_units(dtype)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: LinearTraits) -> Cost:
    operations = 2.0 * traits.rows * traits.in_features * traits.out_features
    weights = 1.0 * traits.in_features * traits.out_features
    moved = weights * traits.weight_dtype.itemsize
    half = traits.dtype in (torch.bfloat16, torch.float16)
    calls = 1.0
    if _in_float32(traits.device_type, traits.dtype, traits.rows):
        moved += 2.0 * weights * 4
        calls += 3.0
    elif half and traits.device_type == "cpu":
        operations *= 0.25 if cpu_has_half_units(traits.dtype) else SLOW_HALF_FACTOR
    if traits.dtype != traits.weight_dtype:
        moved += 8.0 * weights
        calls += 2.0
    return Cost(operations=operations, bytes=moved, calls=calls)


register(Kernel("linear", LinearStrategy.TORCH, linear_torch, _no_reasons, _cost))
