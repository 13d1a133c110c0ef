"""Products with int8 weights in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.torch.linear import linear_torch
from atb_modules.kernels.traits import QuantizedLinearTraits
from atb_modules.strategies import LinearStrategy

#: terms of products of codes that float32 sums exactly: 1024 * 127 * 128 < 2^24
_EXACT_TERMS = 1024


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``codes * scales`` (out, in), computed in float32 or float64 and rounded once to ``dtype``."""
    compute = torch.promote_types(dtype, torch.float32)
    by_group = scales.to(compute).reshape(codes.shape[0], -1, 1)
    return (codes.to(compute).unflatten(1, (by_group.shape[1], -1)) * by_group).flatten(1).to(dtype)


def weight_only_linear_torch(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear_torch`` with the weight written out for the call, in float32: half precision would round it."""
    return linear_torch(x, dequantize(codes, scales, torch.promote_types(x.dtype, torch.float32)), bias)


def quantized_linear_torch(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Codes are multiplied as float32 numbers, so few at a time that nothing is rounded, and summed in int32."""
    compute = torch.promote_types(x.dtype, torch.float32)
    narrow = x.float()
    row_scale = narrow.abs().amax(-1, keepdim=True) / 127.0
    row_codes = (narrow / row_scale).nan_to_num(0.0).round_()
    out: Tensor | None = None
    for rows, columns in zip(row_codes.split(_EXACT_TERMS, -1), codes.split(_EXACT_TERMS, -1), strict=True):
        product = (rows @ columns.float().t()).to(torch.int32)
        out = product if out is None else out + product
    assert out is not None
    result = out.to(compute) * scales.to(compute) * row_scale.to(compute)
    return (result if bias is None else result + bias.to(compute)).to(x.dtype)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _weight_only_cost(spec: None, traits: QuantizedLinearTraits) -> Cost:
    written = 20.0 * traits.in_features * traits.out_features
    return Cost(operations=traits.operations, bytes=traits.bytes + written, calls=4.0)


def _quantized_cost(spec: None, traits: QuantizedLinearTraits) -> Cost:
    written = 8.0 * traits.in_features * traits.out_features + 20.0 * traits.rows * traits.in_features
    steps = -(-traits.in_features // _EXACT_TERMS)
    return Cost(operations=traits.operations, bytes=traits.bytes + written, calls=9.0 + 4.0 * steps)


register(Kernel("weight_only_linear", LinearStrategy.TORCH, weight_only_linear_torch, _no_reasons, _weight_only_cost))
register(Kernel("quantized_linear", LinearStrategy.TORCH, quantized_linear_torch, _no_reasons, _quantized_cost))
