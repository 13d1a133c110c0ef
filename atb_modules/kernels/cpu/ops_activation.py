"""torch.library op of the gated activation act(gate) * up, with its gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import library, structs
from .library_ops import LIB, as_rows, call, check_same, define, pointer, threads


def _kind(kind: str) -> int:
    code = structs.ACTIVATIONS.get(kind)
    if code is None:
        raise ValueError(f"kind must be one of {tuple(structs.ACTIVATIONS)}, got {kind!r}")
    return code


def gated_activation_out(gate: Tensor, up: Tensor, kind: str, *, out: Tensor) -> None:
    """act(gate) * up into `out`; gate and up may be two halves of one fused product, and `out` may be gate."""
    code, dtype = _kind(kind), library.dtype_code("gate", gate.dtype)
    check_same("up", up, "gate", gate.shape, gate.dtype)
    check_same("out", out, "the result", gate.shape, gate.dtype)
    if gate.numel() == 0:
        return
    if gate.dim() == 0:
        gate, up, out = gate.view(1), up.view(1), out.view(1)
    gate, rows, width, gate_stride = as_rows(gate)
    up, _, _, up_stride = as_rows(up)
    rows_of_out, _, _, out_stride = as_rows(out)
    if rows_of_out.data_ptr() != out.data_ptr():
        raise ValueError(f"out must have dense rows of one stride, got strides {out.stride()}")
    args = structs.GatedArgs(
        gate.data_ptr(),
        up.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        gate_stride,
        up_stride,
        out_stride,
        dtype,
        code,
        threads(),
    )
    call("atb_gated_activation", args)


def _new(gate: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def _gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    out = _new(gate)
    gated_activation_out(gate, up, kind, out=out)
    return out


def _meta(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return _new(gate)


def _meta_out(*_: object, **__: object) -> None:
    return None


define("gated_activation(Tensor gate, Tensor up, str kind) -> Tensor", _gated_activation, _meta)
define(
    "gated_activation.out(Tensor gate, Tensor up, str kind, *, Tensor(a!) out) -> ()",
    gated_activation_out,
    _meta_out,
)


def value_and_slope(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """act(x) and act'(x), float32."""
    if kind == "silu":
        gate = torch.sigmoid(x)
        return x * gate, gate * (1 + x * (1 - gate))
    if kind == "gelu":
        below = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * below, below + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    if kind == "gelu_tanh":
        k = math.sqrt(2 / math.pi)
        t = torch.tanh(k * (x + 0.044715 * x.pow(3)))
        return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x)
    positive = torch.relu(x)
    return positive * positive, 2 * positive


def gated_backward_out(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    kind: str,
    d_gate: Tensor,
    d_up: Tensor | None,
    *,
    factors: Tensor | None = None,
    out: Tensor | None = None,
    d_factors: Tensor | None = None,
) -> None:
    """Gradients of ``factors * act(gate) * up`` into d_gate and d_up, in one pass over all of them.

    Args:
        grad, gate, up, d_gate, d_up, out: (..., width) in one dtype, those written with dense rows; without ``up`` the
            product is ``act(gate)`` and there is no ``d_up``.
        factors, d_factors: (rows,) in float32, contiguous: a factor a row, and room for its gradient.
        out: room for ``act(gate) * up``.
    """
    code, dtype = _kind(kind), library.dtype_code("gate", gate.dtype)
    for name, tensor in (("grad", grad), ("up", up), ("d_gate", d_gate), ("d_up", d_up), ("out", out)):
        if tensor is not None:
            check_same(name, tensor, "gate", gate.shape, gate.dtype)
    if gate.numel() == 0:
        if d_factors is not None:
            d_factors.zero_()
        return
    grad, rows, width, grad_stride = as_rows(grad)
    gate, _, _, gate_stride = as_rows(gate)
    for name, vector in (("factors", factors), ("d_factors", d_factors)):
        if vector is not None:
            check_same(name, vector, "the rows of gate", (rows,), torch.float32)
    up, up_stride = (None, 0) if up is None else as_rows(up)[::3]
    strides = [_row_stride(name, t) for name, t in (("d_gate", d_gate), ("d_up", d_up), ("out", out))]
    args = structs.GatedBackwardArgs(
        grad.data_ptr(), gate.data_ptr(), pointer(up), pointer(factors), d_gate.data_ptr(), pointer(d_up), pointer(out),
        pointer(d_factors), rows, width, grad_stride, gate_stride, up_stride, *strides, dtype, code, threads(),
    )  # fmt: skip
    call("atb_gated_backward", args)


def _row_stride(name: str, tensor: Tensor | None) -> int:
    """The stride of the rows of a tensor that is written where it lies."""
    if tensor is None:
        return 0
    rows, _, _, stride = as_rows(tensor)
    if rows.data_ptr() != tensor.data_ptr():
        raise ValueError(f"{name} must have dense rows of one stride, got strides {tensor.stride()}")
    return stride


def _gated_backward(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    d_gate, d_up = _new(gate), _new(up)
    if gate.dim() == 0:
        grad, gate, up = grad.view(1), gate.view(1), up.view(1)
    gated_backward_out(grad, gate, up, kind, d_gate.view(gate.shape), d_up.view(gate.shape))
    return d_gate, d_up


def _meta_backward(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return _new(gate), _new(up)


define(
    "gated_activation_backward(Tensor grad, Tensor gate, Tensor up, str kind) -> (Tensor, Tensor)",
    _gated_backward,
    _meta_backward,
)


def _save(ctx, inputs, output) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, grad):
    gate, up = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return *torch.ops.atb_modules.gated_activation_backward(grad, gate, up, ctx.kind), None
    # A gradient of the gradient is asked for: formulas that autograd knows.
    value, slope = value_and_slope(gate.float(), ctx.kind)
    g = grad.float()
    return (g * up.float() * slope).to(gate.dtype), (g * value).to(up.dtype), None


torch.library.register_autograd("atb_modules::gated_activation", _backward, setup_context=_save, lib=LIB)
