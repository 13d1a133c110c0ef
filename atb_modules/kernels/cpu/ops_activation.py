"""torch.library op of the gated activation act(gate) * up, with its gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import library, structs
from .library_ops import LIB, as_rows, call, check_same, define, threads


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
        gate, up = gate.reshape(1), up.reshape(1)
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


def _save(ctx, inputs, output) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, grad):
    gate, up = ctx.saved_tensors
    value, slope = value_and_slope(gate.float(), ctx.kind)
    g = grad.float()
    return (g * up.float() * slope).to(gate.dtype), (g * value).to(up.dtype), None


torch.library.register_autograd("atb_modules::gated_activation", _backward, setup_context=_save, lib=LIB)
