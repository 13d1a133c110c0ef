"""Gradients of the ops ``atb_modules::ascend_*``: formulas around the kernels, registered with the library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def register() -> None:
    """Give the ops their gradients."""
    register_one = torch.library.register_autograd
    register_one("atb_modules::ascend_rms_norm", _rms_norm_backward, setup_context=_save_rms_norm)
    register_one("atb_modules::ascend_add_rms_norm", _add_rms_norm_backward, setup_context=_save_add_rms_norm)
    register_one("atb_modules::ascend_gated_activation", _gated_backward, setup_context=_save_gated)


def _require_rstd(rstd: Tensor, x: Tensor) -> None:
    if rstd.numel() != x.shape[0]:
        raise ValueError("keep_rstd is False; allowed where gradients are wanted: True")


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, offset, *_ = inputs
    _require_rstd(output[1], x)
    ctx.save_for_backward(x, weight, output[1])
    ctx.offset = offset
    ctx.mark_non_differentiable(output[1])


def _norm_gradients(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, grad_sum: Tensor | None, offset: float
) -> tuple[Tensor, Tensor | None]:
    grad_x, partial = torch.ops.atb_modules.ascend_rms_norm_backward(
        grad_y.contiguous(), x, rstd, weight, None if grad_sum is None else grad_sum.contiguous(), offset
    )
    return grad_x, None if weight is None else partial.sum(0).to(weight.dtype)


def _rms_norm_backward(ctx: Any, grad_y: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    grad_x, grad_weight = _norm_gradients(grad_y, x, weight, rstd, None, ctx.offset)
    return grad_x, grad_weight, None, None, None, None


def _save_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, _, weight, _, offset, *_ = inputs
    _require_rstd(output[2], x)
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.offset = offset
    ctx.mark_non_differentiable(output[2])


def _add_rms_norm_backward(
    ctx: Any, grad_y: Tensor, grad_sum: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    total, weight, rstd = ctx.saved_tensors
    grad, grad_weight = _norm_gradients(grad_y, total, weight, rstd, grad_sum, ctx.offset)
    return grad, grad, grad_weight, None, None, None, None


def _save_gated(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _gated_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    """In float32. All three kinds are ``x sigmoid(z(x))``: the derivative is ``s + x s (1 - s) z'``."""
    saved = ctx.saved_tensors  # once: checkpointing without reentrance hands them out a single time
    gate, up = (t.float() for t in saved)
    grad = grad.float()
    if ctx.kind == "gelu_tanh":
        scale = 2.0 * (2.0 / torch.pi) ** 0.5
        z, slope = scale * (gate + 0.044715 * gate**3), scale * (1.0 + 3 * 0.044715 * gate * gate)
    else:
        factor = 1.702 if ctx.kind == "quick_gelu" else 1.0
        z, slope = factor * gate, torch.full_like(gate, factor)
    sigmoid = torch.sigmoid(z)
    grad_gate = grad * up * (sigmoid + gate * sigmoid * (1.0 - sigmoid) * slope)
    dtype = saved[0].dtype
    return grad_gate.to(dtype), (grad * gate * sigmoid).to(dtype), None
