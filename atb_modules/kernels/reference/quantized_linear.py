"""References of products with int8 weights."""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import QuantizedLinearTraits
from atb_modules.strategies import LinearStrategy


def weight_only_linear_reference(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """``y_o = sum_i x_i codes_oi scales_og + bias_o``, i in group g; in float32 or float64, rounded once."""
    compute = torch.promote_types(x.dtype, torch.float32)
    by_group = scales.reshape(codes.shape[0], -1).to(compute)
    groups = by_group.shape[1]
    parts = rearrange(codes.to(compute), "o (g i) -> o g i", g=groups)
    out = einsum(
        rearrange(x.to(compute), "... (g i) -> ... g i", g=groups), parts, by_group, "... g i, o g i, o g -> ... o"
    )
    return (out if bias is None else out + bias.to(compute)).to(x.dtype)


def quantized_linear_reference(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """``s = max|x| / 127``, ``c_i = round(x_i / s)``, ``y_o = s scales_o sum_i c_i codes_oi + bias_o``.

    s and c are computed in float32, whatever x is; a row of zeros has codes 0. The sum is exact.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    narrow = x.to(torch.float32)
    row_scale = narrow.abs().amax(-1, keepdim=True) / 127
    row_codes = torch.round(narrow / torch.where(row_scale == 0, 1.0, row_scale))
    total = einsum(row_codes.double(), codes.double(), "... i, o i -> ... o")
    out = total.to(compute) * scales.to(compute) * row_scale.to(compute)
    return (out if bias is None else out + bias.to(compute)).to(x.dtype)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: QuantizedLinearTraits) -> Cost:
    """An oracle: more than any other kernel would take."""
    return Cost(operations=traits.operations, bytes=traits.bytes, calls=1000.0)


register(Kernel("weight_only_linear", LinearStrategy.REFERENCE, weight_only_linear_reference, _no_reasons, _cost))
register(Kernel("quantized_linear", LinearStrategy.REFERENCE, quantized_linear_reference, _no_reasons, _cost))
