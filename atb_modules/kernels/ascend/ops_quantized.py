"""Products with int8 weights by torch_npu's operators; codes lie (out, in) and are handed over as their transpose."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atb_modules.kernels.ascend.derived import derived
from atb_modules.kernels.torch.quantized_linear import dequantize, quantized_linear_torch, weight_only_linear_torch

_NPU = torch.ops.npu


def _as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A parameter in the dtype that the operator wants, converted once."""
    if tensor is None or tensor.dtype == dtype:
        return tensor
    return derived(tensor, ("in", dtype), lambda: tensor.to(dtype))


def _transposed(codes: Tensor) -> Tensor:
    """(in, out) as the operators take it: contiguous, or the transpose of what is."""
    return (codes if codes.is_contiguous() or codes.t().is_contiguous() else codes.contiguous()).t()


def _weight_only(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """npu_weight_quant_batchmatmul: scales in x's dtype, the bias in float32 beside bfloat16."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    by_group = derived(scales, ("by group", x.dtype), lambda: scales.to(x.dtype).reshape(codes.shape[0], -1))
    groups = by_group.shape[1]
    wanted = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    out = _NPU.npu_weight_quant_batchmatmul(
        rows,
        _transposed(codes),
        by_group.t(),
        bias=_as(bias, wanted),
        antiquant_group_size=codes.shape[1] // groups if groups > 1 else 0,
    )
    return out.view(*x.shape[:-1], codes.shape[0])


class _WeightOnly(torch.autograd.Function):
    """The operator is documented for inference; its derivative is a product with the weight written out."""

    @staticmethod
    def forward(ctx, x, bias, codes, scales):
        ctx.save_for_backward(codes, scales)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _weight_only(x, codes, scales, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        codes, scales = ctx.saved_tensors
        dx = dout @ dequantize(codes, scales, dout.dtype) if ctx.needs_input_grad[0] else None
        dbias = None
        if ctx.needs_input_grad[1]:
            dbias = dout.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dbias, None, None


def weight_only_linear_ascend(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """npu_weight_quant_batchmatmul, with a derivative for x and bias. It takes no empty tensors."""
    if not x.numel():
        return weight_only_linear_torch(x, codes, scales, bias)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _WeightOnly.apply(x, bias, codes, scales)
    return _weight_only(x, codes, scales, bias)


def quantized_linear_ascend(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """npu_dynamic_quant, a scale a row, then npu_quant_matmul with float32 scales of columns and rows."""
    if not x.numel():
        return quantized_linear_torch(x, codes, scales, bias)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    row_codes, row_scales = _NPU.npu_dynamic_quant(rows)
    out = _NPU.npu_quant_matmul(
        row_codes,
        _transposed(codes),
        scales.contiguous(),
        pertoken_scale=row_scales,
        bias=_as(bias, torch.float32),
        output_dtype=x.dtype,
    )
    return out.view(*x.shape[:-1], codes.shape[0])
