"""torch.library ops of RMSNorm and LayerNorm, alone and fused with the residual sum; gradients in float32.

Those with dropout before the sum, and those with a modulation behind the norm, are in ``ops_norm_chains``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import library, structs
from .library_ops import LIB, as_rows, call, check_out, check_same, check_vector, define, pointer, threads


def run_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    weight_offset: float,
    cast_first: bool,
    layer_norm: bool,
    chain: tuple = (),
) -> None:
    """The native norm of x into ``out``; ``chain`` are the values of the last fields of ``structs.NormArgs``."""
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, got a scalar")
    dtype = library.dtype_code("x", x.dtype)
    check_vector("weight", weight, x.shape[-1])
    check_vector("bias", bias, x.shape[-1])
    check_out(out, x.shape, x.dtype)
    if residual is not None:
        check_same("residual", residual, "x", x.shape, x.dtype)
    if total is not None:
        check_out(total, x.shape, x.dtype)
    if x.numel() == 0:
        return
    weight = None if weight is None else weight.contiguous()
    # The kernel reads weight and bias in one dtype.
    bias = None if bias is None else bias.to(weight.dtype if weight is not None else bias.dtype).contiguous()
    parameter = weight if weight is not None else bias
    code = 0 if parameter is None else library.dtype_code("weight", parameter.dtype)
    x, rows, width, x_stride = as_rows(x)
    residual_stride = width
    if residual is not None:
        residual, _, _, residual_stride = as_rows(residual)
    args = structs.NormArgs(
        x.data_ptr(),
        pointer(residual),
        pointer(weight),
        pointer(bias),
        out.data_ptr(),
        pointer(total),
        rows,
        width,
        x_stride,
        residual_stride,
        eps,
        weight_offset,
        dtype,
        code,
        cast_first,
        layer_norm,
        threads(),
        *chain,
    )
    call("atb_norm", args)


def _new(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def rms_norm_out(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast_first: bool, *, out: Tensor
) -> None:
    """RMSNorm over the last axis into `out` (contiguous, x's shape and dtype)."""
    run_norm(x, None, weight, None, out, None, eps, weight_offset, cast_first, False)


def add_rms_norm_out(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    cast_first: bool,
    *,
    out: Tensor,
    sum_out: Tensor,
) -> None:
    """sum_out = x + residual in x's dtype, out = RMSNorm of that rounded sum."""
    run_norm(x, residual, weight, None, out, sum_out, eps, weight_offset, cast_first, False)


def layer_norm_out(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, out: Tensor) -> None:
    """LayerNorm over the last axis into `out`."""
    run_norm(x, None, weight, bias, out, None, eps, 0.0, False, True)


def add_layer_norm_out(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    out: Tensor,
    sum_out: Tensor,
) -> None:
    """sum_out = x + residual in x's dtype, out = LayerNorm of that rounded sum."""
    run_norm(x, residual, weight, bias, out, sum_out, eps, 0.0, False, True)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast_first: bool) -> Tensor:
    out = _new(x)
    rms_norm_out(x, weight, eps, weight_offset, cast_first, out=out)
    return out


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast_first: bool
) -> tuple[Tensor, Tensor]:
    out, total = _new(x), _new(x)
    add_rms_norm_out(x, residual, weight, eps, weight_offset, cast_first, out=out, sum_out=total)
    return out, total


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    out = _new(x)
    layer_norm_out(x, weight, bias, eps, out=out)
    return out


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    out, total = _new(x), _new(x)
    add_layer_norm_out(x, residual, weight, bias, eps, out=out, sum_out=total)
    return out, total


def _meta_one(x: Tensor, *_: object) -> Tensor:
    return _new(x)


def _meta_two(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _new(x), _new(x)


def _meta_out(*_: object, **__: object) -> None:
    return None


define(
    "rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset, bool cast_first) -> Tensor",
    _rms_norm,
    _meta_one,
)
define(
    "rms_norm.out(Tensor x, Tensor? weight, float eps, float weight_offset, bool cast_first, *, Tensor(a!) out) -> ()",
    rms_norm_out,
    _meta_out,
)
define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, bool cast_first)"
    " -> (Tensor, Tensor)",
    _add_rms_norm,
    _meta_two,
)
define(
    "add_rms_norm.out(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset,"
    " bool cast_first, *, Tensor(a!) out, Tensor(b!) sum_out) -> ()",
    add_rms_norm_out,
    _meta_out,
)
define("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor", _layer_norm, _meta_one)
define(
    "layer_norm.out(Tensor x, Tensor? weight, Tensor? bias, float eps, *, Tensor(a!) out) -> ()",
    layer_norm_out,
    _meta_out,
)
define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    _add_layer_norm,
    _meta_two,
)
define(
    "add_layer_norm.out(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, *,"
    " Tensor(a!) out, Tensor(b!) sum_out) -> ()",
    add_layer_norm_out,
    _meta_out,
)


def norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad of x, grad of weight, grad of bias), float32, from y = (x - mean) / sqrt(var + eps) * w + b."""
    g, v = grad.float(), x.float()
    if centred:
        v = v - v.mean(-1, keepdim=True)
    inverse = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    normalised = v * inverse
    scaled = g if weight is None else g * (weight.float() + weight_offset)
    grad_x = scaled - normalised * (scaled * normalised).mean(-1, keepdim=True)
    if centred:
        grad_x = grad_x - scaled.mean(-1, keepdim=True)
    leading = list(range(x.dim() - 1))
    weight_grad, bias_grad = g * normalised, g
    if leading:
        weight_grad, bias_grad = weight_grad.sum(leading), bias_grad.sum(leading)
    return grad_x * inverse, weight_grad, bias_grad


def _save_rms(ctx, inputs, output) -> None:
    x, weight, ctx.eps, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward_rms(ctx, grad):
    x, weight = ctx.saved_tensors
    grad_x, grad_w, _ = norm_gradients(grad, x, weight, ctx.eps, ctx.weight_offset, False)
    return grad_x.to(x.dtype), None if weight is None else grad_w.to(weight.dtype), None, None, None


def _save_add_rms(ctx, inputs, output) -> None:
    _, _, weight, ctx.eps, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(output[1], weight)


def _backward_add_rms(ctx, grad, grad_sum):
    total, weight = ctx.saved_tensors
    grad_x, grad_w, _ = norm_gradients(grad, total, weight, ctx.eps, ctx.weight_offset, False)
    grad_x = (grad_x + grad_sum.float()).to(total.dtype)
    # Cloned: one tensor handed to two leaves would be accumulated into twice.
    return grad_x, grad_x.clone(), None if weight is None else grad_w.to(weight.dtype), None, None, None


def _save_layer(ctx, inputs, output) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward_layer(ctx, grad):
    x, weight, bias = ctx.saved_tensors
    grad_x, grad_w, grad_b = norm_gradients(grad, x, weight, ctx.eps, 0.0, True)
    return (
        grad_x.to(x.dtype),
        None if weight is None else grad_w.to(weight.dtype),
        None if bias is None else grad_b.to(bias.dtype),
        None,
    )


def _save_add_layer(ctx, inputs, output) -> None:
    _, _, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight, bias)


def _backward_add_layer(ctx, grad, grad_sum):
    total, weight, bias = ctx.saved_tensors
    grad_x, grad_w, grad_b = norm_gradients(grad, total, weight, ctx.eps, 0.0, True)
    grad_x = (grad_x + grad_sum.float()).to(total.dtype)
    return (
        grad_x,
        grad_x.clone(),
        None if weight is None else grad_w.to(weight.dtype),
        None if bias is None else grad_b.to(bias.dtype),
        None,
    )


for _name, _backward, _save in (
    ("rms_norm", _backward_rms, _save_rms),
    ("add_rms_norm", _backward_add_rms, _save_add_rms),
    ("layer_norm", _backward_layer, _save_layer),
    ("add_layer_norm", _backward_add_layer, _save_add_layer),
):
    torch.library.register_autograd(f"atb_modules::{_name}", _backward, setup_context=_save, lib=LIB)
