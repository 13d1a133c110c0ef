"""Gated and plain activations, and their backwards."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.references.registry import reference
from atb_modules.testing.npu.references.rules import FLOATS, is_310p, require_dtype, require_not_310p

_TANH_SCALE = math.sqrt(2.0 / math.pi)


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    require(-x.dim() <= dim < x.dim(), f"dim is {dim}; the input has {x.dim()} dims")
    require(x.shape[dim] % 2 == 0, f"dim {dim} has {x.shape[dim]} elements; it is cut into two halves")
    first, second = x.float().chunk(2, dim)
    return first, second


def _gelu(x: Tensor, approximate: int) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh" if approximate else "none")


def _gelu_slope(x: Tensor, approximate: int) -> Tensor:
    if approximate:
        inner = torch.tanh(_TANH_SCALE * (x + 0.044715 * x**3))
        return 0.5 * (1 + inner) + 0.5 * x * (1 - inner**2) * _TANH_SCALE * (1 + 3 * 0.044715 * x**2)
    density = torch.exp(-0.5 * x**2) / math.sqrt(2.0 * math.pi)
    return 0.5 * (1 + torch.erf(x / math.sqrt(2.0))) + x * density


@reference("npu::npu_swiglu")
def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """Docs: "outputs = swiglu(x, dim = -1) = swish(A) * B = A * sigmoid(A) * B"; "A and B are x cut along dim";
    "x: 1 to 8 dims, FP32, FP16 or BF16".
    """
    require_not_310p()
    require_dtype("input", input)
    gate, up = _halves(input, dim)
    return (gate * torch.sigmoid(gate) * up).to(input.dtype)


@reference("npu::npu_swiglu_backward")
def swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """The derivative of the forward's formula."""
    gate, up = _halves(input, dim)
    dy, sigmoid = grad_output.float(), torch.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((dgate, dy * gate * sigmoid), dim).to(input.dtype)


@reference("npu::npu_geglu")
def geglu(input: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    """Docs: "approximate: 0 means none, 1 means tanh"; "out and outGelu have half of self's size in dim". aclnnGeGluV3:
    "activateLeft: the side that is activated; false activates the right half". Trap: SwiGLU activates the left half.
    """
    require_dtype("input", input)
    require(approximate in (0, 1), f"approximate is {approximate}; supported: 0 (none), 1 (tanh)")
    left, right = _halves(input, dim)
    active, plain = (left, right) if activate_left else (right, left)
    gelu = _gelu(active, approximate)
    return (gelu * plain).to(input.dtype), gelu.to(input.dtype)


@reference("npu::npu_geglu_grad")
def geglu_grad(
    grad_output: Tensor, input: Tensor, gelu: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> Tensor:
    """The derivative of the forward's formula; ``gelu`` is the forward's second output."""
    left, right = _halves(input, dim)
    active, plain = (left, right) if activate_left else (right, left)
    dy = grad_output.float()
    dplain = dy * gelu.float()
    dactive = dy * plain * _gelu_slope(active, approximate)
    parts = (dactive, dplain) if activate_left else (dplain, dactive)
    return torch.cat(parts, dim).to(input.dtype)


@reference("npu::npu_fast_gelu", "npu::fast_gelu")
def fast_gelu(input: Tensor) -> Tensor:
    """Docs: "x / (1 + exp(-1.702 x))" on A2 and A3; on 310P "float16 and float32 only"."""
    require_dtype("input", input, (torch.float16, torch.float32) if is_310p() else FLOATS)
    return (input.float() * torch.sigmoid(1.702 * input.float())).to(input.dtype)


@reference("npu::npu_fast_gelu_backward")
def fast_gelu_backward(grad: Tensor, input: Tensor) -> Tensor:
    """The derivative of the forward's formula."""
    x = input.float()
    sigmoid = torch.sigmoid(1.702 * x)
    return (grad.float() * sigmoid * (1 + 1.702 * x * (1 - sigmoid))).to(input.dtype)
