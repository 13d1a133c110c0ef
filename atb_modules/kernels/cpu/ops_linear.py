"""torch.library op of the linear layer: weights of any dtype, float32 arithmetic.

A few rows go through the native GEMV, which reads every weight once. More rows are a matrix product: float32 weights
through torch, 16-bit weights in panels of 1,024 rows that are converted to float32 and used while they are in cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import library, structs
from .library_ops import LIB, as_rows, call, check_out, check_vector, define, pointer, threads

#: rows up to which the GEMV reads weights faster than a matrix product computes
GEMV_ROWS = 16
_PANEL = 1024


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must be (..., in) and weight (out, in), got {tuple(x.shape)} and {tuple(weight.shape)}")
    check_vector("bias", bias, weight.shape[0])
    library.dtype_code("x", x.dtype)
    library.dtype_code("weight", weight.dtype)


def _gemv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    x, rows, k, x_stride = as_rows(x)
    weight = weight if weight.stride(1) == 1 or k == 1 else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    args = structs.LinearArgs(
        x.data_ptr(),
        weight.data_ptr(),
        pointer(bias),
        out.data_ptr(),
        rows,
        weight.shape[0],
        k,
        x_stride,
        weight.stride(0),
        weight.shape[0],
        structs.DTYPES[x.dtype],
        structs.DTYPES[weight.dtype],
        0 if bias is None else library.dtype_code("bias", bias.dtype),
        threads(),
    )
    call("atb_linear", args)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x weight^T + bias into `out`, all float32; out's rows may lie apart."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _panels(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    rows = x.reshape(-1, x.shape[-1]).float()
    flat = out.view(-1, weight.shape[0])
    bias = None if bias is None else bias.float()
    width = weight.shape[0] if weight.dtype == torch.float32 else min(_PANEL, weight.shape[0])
    direct = out.dtype == torch.float32
    # Both are used again for every panel: fresh memory would cost as much as the conversion.
    panel = None if weight.dtype == torch.float32 else torch.empty((width, weight.shape[1]))
    product = None if direct else torch.empty((rows.shape[0], width))
    for first in range(0, weight.shape[0], width):
        part = weight[first : first + width]
        columns = slice(first, first + part.shape[0])
        converted = part if panel is None else panel[: part.shape[0]].copy_(part)
        shift = None if bias is None else bias[columns]
        if product is None:
            _product(rows, converted, shift, flat[:, columns])
        else:
            target = product if part.shape[0] == width else torch.empty((rows.shape[0], part.shape[0]))
            _product(rows, converted, shift, target)
            flat[:, columns] = target


def linear_out(x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
    """x (..., in) times weight (out, in) transposed, plus bias, into `out` (contiguous, x's dtype)."""
    _check(x, weight, bias)
    check_out(out, (*x.shape[:-1], weight.shape[0]), x.dtype)
    if out.numel() == 0:
        return
    if x.shape[-1] == 0:
        out.zero_() if bias is None else out.copy_(bias.expand_as(out))
        return
    with torch.no_grad():
        if x.numel() // x.shape[-1] <= GEMV_ROWS:
            _gemv(x, weight, bias, out)
        else:
            _panels(x, weight, bias, out)


def _new(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check(x, weight, bias)
    out = _new(x, weight, bias)
    linear_out(x, weight, bias, out=out)
    return out


def _meta_none(*_: object, **__: object) -> None:
    return None


define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear, _new)
define("linear.out(Tensor x, Tensor weight, Tensor? bias, *, Tensor(a!) out) -> ()", linear_out, _meta_none)


def _save(ctx, inputs, output) -> None:
    x, weight, bias = inputs
    ctx.has_bias = bias is not None
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad):
    x, weight = ctx.saved_tensors
    g = grad.reshape(-1, weight.shape[0]).float()
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = (g @ weight.float()).to(x.dtype).reshape(x.shape)
    if ctx.needs_input_grad[1]:
        grad_weight = (g.t() @ x.reshape(-1, x.shape[-1]).float()).to(weight.dtype)
    if ctx.has_bias and ctx.needs_input_grad[2]:
        grad_bias = g.sum(0).to(ctx.bias_dtype)
    return grad_x, grad_weight, grad_bias


torch.library.register_autograd("atb_modules::linear", _backward, setup_context=_save, lib=LIB)
