"""Norms, gated activations and rotations by torch_npu's fused operators, differentiable where the op is."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atb_modules.kernels.ascend.derived import constant, derived
from atb_modules.kernels.ascend.rules import HALVES, is_310p, recorded
from atb_modules.kernels.torch.linear import linear_torch
from atb_modules.kernels.torch.norm import add_layer_norm_torch, add_rms_norm_torch, rms_norm_torch

_NPU = torch.ops.npu


def _weight(x: Tensor, weight: Tensor | None) -> Tensor:
    """A weight in x's dtype; ones where there is none."""
    if weight is not None:
        return weight.to(x.dtype)
    width, dtype = x.shape[-1], x.dtype
    return constant(("ones", width, dtype), x.device, lambda: torch.ones(width, dtype=dtype, device=x.device))


def rms_norm_ascend(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, cast_first: bool = False
) -> Tensor:
    """npu_rms_norm, or npu_gemma_rms_norm for weights that count from 1. Operators take no empty tensors."""
    if not x.numel():
        return rms_norm_torch(x, weight, eps, weight_offset, cast_first)
    rows = x.reshape(-1, x.shape[-1])
    return _rms_norm(rows, weight, eps, weight_offset, cast_first).reshape(x.shape)


def _rms_norm(rows: Tensor, weight: Tensor | None, eps: float, offset: float, cast_first: bool) -> Tensor:
    half = rows.dtype in HALVES
    if weight is not None and offset == 1.0 and not cast_first and not recorded(rows, weight) and not is_310p():
        return _NPU.npu_gemma_rms_norm(rows.contiguous(), weight.to(rows.dtype), eps)[0]
    if half and weight is not None and (offset or weight.dtype == torch.float32):
        # the operator takes weights of x's dtype; what that would round is computed in float32
        wide = weight.float() + offset if offset else weight
        if cast_first:
            normed = _NPU.npu_rms_norm(rows, _weight(rows, None), eps)[0]
            return (normed * wide).to(rows.dtype)
        return _NPU.npu_rms_norm(rows.float(), wide, eps)[0].to(rows.dtype)
    if half and cast_first and weight is not None:  # rounded before the weight, which the operator does not do
        return _NPU.npu_rms_norm(rows, _weight(rows, None), eps)[0] * weight.to(rows.dtype)
    scale = None if weight is None else weight + offset if offset else weight
    return _NPU.npu_rms_norm(rows, _weight(rows, scale), eps)[0]


class _AddRMSNorm(torch.autograd.Function):
    """npu_add_rms_norm with the derivative that torch_npu does not have: (normed, sum)."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        normed, rstd, total = _NPU.npu_add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dnormed, dtotal):
        total, weight, rstd = ctx.saved_tensors
        if dnormed is None:
            return dtotal, dtotal, None, None
        dx, dweight = _NPU.npu_rms_norm_backward(dnormed.contiguous(), total, weight, rstd)
        if dtotal is not None:
            dx = dx + dtotal
        return dx, dx, dweight.to(weight.dtype), None


def add_rms_norm_ascend(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """npu_add_rms_norm, where it computes what is asked for; the sum and ``rms_norm_ascend`` else."""
    if not x.numel():
        return add_rms_norm_torch(x, residual, weight, eps, weight_offset, cast_first)
    half = x.dtype in HALVES
    rounded_alike = weight is None or not half or (weight.dtype == x.dtype and not cast_first)
    if weight_offset or not rounded_alike:
        total = x + residual
        return rms_norm_ascend(total, weight, eps, weight_offset, cast_first), total
    rows = [t.reshape(-1, x.shape[-1]) for t in (x, residual)]
    scale = _weight(x, weight)
    if recorded(x, residual, weight):
        normed, total = _AddRMSNorm.apply(*rows, scale, eps)
    else:
        normed, _, total = _NPU.npu_add_rms_norm(*rows, scale, eps)
    return normed.reshape(x.shape), total.reshape(x.shape)


def layer_norm_ascend(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch_npu's native_layer_norm, one fused operator; in float32 where the parameters' dtype is not x's."""
    dtype = x.dtype
    if any(p is not None and p.dtype != dtype for p in (weight, bias)):
        x, weight, bias = x.float(), *(None if p is None else p.float() for p in (weight, bias))
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps).to(dtype)


def add_layer_norm_ascend(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """npu_add_layer_norm with its sum as an output."""
    if not x.numel():
        return add_layer_norm_torch(x, residual, weight, bias, eps)
    width, device = x.shape[-1], x.device
    dtype = x.dtype if weight is None and bias is None else (weight if weight is not None else bias).dtype  # type: ignore[union-attr]
    if weight is None:
        weight = constant(("ones", width, dtype), device, lambda: torch.ones(width, dtype=dtype, device=device))
    if bias is None:
        bias = constant(("zeros", width, dtype), device, lambda: torch.zeros(width, dtype=dtype, device=device))
    rows = [t.reshape(-1, width) for t in (x, residual)]
    normed, _, _, total = _NPU.npu_add_layer_norm(*rows, weight, bias.to(dtype), eps, True)
    return normed.reshape(x.shape), total.reshape(x.shape)


def _side_by_side(gate: Tensor, up: Tensor) -> Tensor:
    """[gate | up] along the last axis; halves of one product are taken as they lie, where nothing is recorded."""
    if torch.compiler.is_compiling():  # which cannot trace where tensors lie
        return torch.cat([gate, up], dim=-1)
    width = gate.shape[-1]
    adjacent = (
        gate.untyped_storage()._cdata == up.untyped_storage()._cdata
        and up.storage_offset() == gate.storage_offset() + width
        and gate.stride() == up.stride()
        and gate.stride(-1) == 1
        and gate.dim() > 1
        and gate.stride(-2) >= 2 * width
    )
    if adjacent and not recorded(gate, up):
        return gate.as_strided((*gate.shape[:-1], 2 * width), gate.stride(), gate.storage_offset())
    return torch.cat([gate, up], dim=-1)


def gated_activation_ascend(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """npu_swiglu, or npu_geglu told to activate the left half; SwiGLU does so by itself."""
    if not gate.numel():
        return gate * up
    both = _side_by_side(gate, up)
    if kind == "silu":
        return _NPU.npu_swiglu(both, -1)
    return _NPU.npu_geglu(both, -1, 1 if kind == "gelu_tanh" else 0, True)[0]


def rotary_ascend(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """npu_rotary_mul over x (tokens, heads, head_dim), with cos and sin (tokens, rotary_dim / 2) of float32.

    Half precision is turned in float32: the operator wants angles of x's dtype, which would round them.
    """
    if not x.numel() or not cos.shape[-1]:
        return x.clone()
    rotary_dim = 2 * cos.shape[-1]
    mode = "interleave" if interleaved else "half"
    r1 = derived(cos, ("both planes", interleaved), lambda: _both_planes(cos, interleaved))
    r2 = derived(sin, ("both planes", interleaved), lambda: _both_planes(sin, interleaved))
    turned = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    out = _NPU.npu_rotary_mul(turned.to(r1.dtype).unsqueeze(0), r1, r2, mode)[0].to(x.dtype)
    return out if rotary_dim == x.shape[-1] else torch.cat([out, x[..., rotary_dim:]], dim=-1)


def _both_planes(angles: Tensor, interleaved: bool) -> Tensor:
    """(tokens, planes) as (1, tokens, 1, 2 * planes): each plane's number for both of its channels."""
    spread = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    return spread[None, :, None]


def norm_linear_ascend(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_first: bool = False,
) -> Tensor:
    """npu_rms_norm, then the product of torch_npu."""
    return linear_torch(rms_norm_ascend(x, norm_weight, eps, weight_offset, cast_first), weight, bias)
