"""torch.library ops of a norm with what stands around it: dropout and residual sum before, a modulation behind."""

from __future__ import annotations

import torch
from torch import Tensor

from .library_ops import LIB, check_same, define, last_dense, pointer
from .ops_norm import norm_gradients, run_norm


def _new(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _drop_add_norm(
    x: Tensor,
    residual: Tensor,
    keep: Tensor,
    keep_scale: float,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    cast_first: bool,
    layer_norm: bool,
) -> tuple[Tensor, Tensor]:
    """(norm(sum), sum) with sum = keep_scale * keep * x + residual, keep uint8 of 0 and 1."""
    check_same("keep", keep, "x", x.shape, torch.uint8)
    keep = keep.contiguous()
    out, total = _new(x), _new(x)
    chain = (pointer(keep), None, None, 0, 0, 1, keep_scale)
    run_norm(x, residual, weight, bias, out, total, eps, weight_offset, cast_first, layer_norm, chain)
    return out, total


def _drop_add_norm_meta(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _new(x), _new(x)


def _modulated_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer_norm: bool,
) -> Tensor:
    """norm(x) * (1 + scale) + shift: x (rows, width); scale and shift (groups, width), rows / groups rows share one."""
    for name, tensor in (("scale", scale), ("shift", shift)):
        check_same(name, tensor, "x", (scale.shape[0], x.shape[1]), x.dtype)
    out = _new(x)
    if not x.numel():
        return out
    scale, shift = last_dense(scale), last_dense(shift)
    group = x.shape[0] // scale.shape[0]
    chain = (None, scale.data_ptr(), shift.data_ptr(), scale.stride(0), shift.stride(0), group, 1.0)
    run_norm(x, None, weight, bias, out, None, eps, 0.0, False, layer_norm, chain)
    return out


def _modulated_norm_meta(x: Tensor, *_: object) -> Tensor:
    return _new(x)


define(
    "drop_add_norm(Tensor x, Tensor residual, Tensor keep, float keep_scale, Tensor? weight, Tensor? bias, float eps,"
    " float weight_offset, bool cast_first, bool layer_norm) -> (Tensor, Tensor)",
    _drop_add_norm,
    _drop_add_norm_meta,
)
define(
    "modulated_norm(Tensor x, Tensor scale, Tensor shift, Tensor? weight, Tensor? bias, float eps, bool layer_norm)"
    " -> Tensor",
    _modulated_norm,
    _modulated_norm_meta,
)


def _like(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else gradient.to(parameter.dtype)


def _save_drop(ctx, inputs, output) -> None:
    _, _, keep, ctx.keep_scale, weight, bias, ctx.eps, ctx.weight_offset, _, ctx.layer_norm = inputs
    ctx.save_for_backward(output[1], keep, weight, bias)


def _backward_drop(ctx, grad, grad_sum):
    total, keep, weight, bias = ctx.saved_tensors
    grad_x, grad_w, grad_b = norm_gradients(grad, total, weight, ctx.eps, ctx.weight_offset, ctx.layer_norm)
    grad_x = grad_x + grad_sum.float()
    dropped = (grad_x * keep * ctx.keep_scale).to(total.dtype)
    parameters = (_like(grad_w, weight), _like(grad_b, bias))
    return dropped, grad_x.to(total.dtype), None, None, *parameters, None, None, None, None


def _save_modulated(ctx, inputs, output) -> None:
    x, scale, shift, weight, bias, ctx.eps, ctx.layer_norm = inputs
    ctx.save_for_backward(x, scale, shift, weight, bias)


def _backward_modulated(ctx, grad):
    x, scale, shift, weight, bias = ctx.saved_tensors
    groups = scale.shape[0]
    by_group = (groups, x.shape[0] // max(groups, 1), x.shape[1])
    g, v = grad.float(), x.float()
    if ctx.layer_norm:
        v = v - v.mean(-1, keepdim=True)
    normed = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + ctx.eps)
    if weight is not None:
        normed = normed * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    grad_scale, grad_shift = (g * normed).reshape(by_group).sum(1), g.reshape(by_group).sum(1)
    scaled = (g.reshape(by_group) * (1.0 + scale.float()).unsqueeze(1)).reshape(g.shape)
    grad_x, grad_w, grad_b = norm_gradients(scaled, x, weight, ctx.eps, 0.0, ctx.layer_norm)
    modulation = (grad_scale.to(scale.dtype), grad_shift.to(shift.dtype))
    return grad_x.to(x.dtype), *modulation, _like(grad_w, weight), _like(grad_b, bias), None, None


torch.library.register_autograd("atb_modules::drop_add_norm", _backward_drop, setup_context=_save_drop, lib=LIB)
torch.library.register_autograd(
    "atb_modules::modulated_norm", _backward_modulated, setup_context=_save_modulated, lib=LIB
)
