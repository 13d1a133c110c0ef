"""RMSNorm, RMSNorm after an addition, Gemma's RMSNorm, LayerNorm after an addition, and backwards."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.references.registry import reference
from atb_modules.testing.npu.references.rules import (
    is_310p,
    require_contiguous,
    require_dtype,
    require_not_310p,
    require_same_dtype,
)


def _axes(x: Tensor, gamma: Tensor) -> tuple[int, ...]:
    """The axes that gamma covers, the last ones of x."""
    require(0 < gamma.dim() <= x.dim(), f"gamma has {gamma.dim()} dims, x has {x.dim()}")
    covered = tuple(x.shape[-gamma.dim() :])
    require(tuple(gamma.shape) == covered, f"gamma has shape {tuple(gamma.shape)}, the last axes of x {covered}")
    return tuple(range(-gamma.dim(), 0))


def _require_row(x: Tensor) -> None:
    """Of the inference chip 310P: "the last axis must be at least 32 bytes"."""
    row = x.shape[-1] * x.element_size()
    require(not is_310p() or row >= 32, f"the last axis has {row} bytes; on this SoC it must be at least 32 bytes")


def _rstd(wide: Tensor, axes: tuple[int, ...], epsilon: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)


@reference("npu::npu_rms_norm")
def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Docs: "compared with LayerNorm it leaves out the subtraction of the mean"; "gamma: the data type must agree with
    self, shapes of 2 to 8 dims, usually the last axis of self"; "the second output is the reverse rms, an intermediate
    for the backward". rstd is float32 (n, 1) in torch_npu's Meta kernel.
    """
    require_dtype("input", input)
    require_same_dtype(input=input, gamma=gamma)
    _require_row(input)
    require(2 <= input.dim() <= 8, f"input has {input.dim()} dims; shapes of 2 to 8 dims are supported")
    axes = _axes(input, gamma)
    wide = input.float()
    rstd = _rstd(wide, axes, epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype), rstd


@reference("npu::npu_rms_norm_backward")
def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The derivative of the forward's formula; dgamma is float32 in torch_npu's Meta kernel."""
    axes = _axes(input, gamma)
    normed, weighted = input.float() * rstd, dy.float() * gamma.float()
    dx = rstd * (weighted - normed * (weighted * normed).mean(axes, keepdim=True))
    dgamma = (dy.float() * normed).reshape(-1, *gamma.shape).sum(0)
    return dx.to(input.dtype), dgamma


@reference("npu::npu_add_rms_norm")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """aclnnAddRmsNorm: "x = x1 + x2; y = x / RMS(x) * gamma", returning (y, rstd, x); docs of the variant with a cast:
    "x2: shape, format and data type must agree with x1". The operator has no derivative in torch_npu.
    """
    require_dtype("x1", x1)
    require_same_dtype(x1=x1, x2=x2, gamma=gamma)
    _require_row(x1)
    require(x1.shape == x2.shape, f"x1 has shape {tuple(x1.shape)}, x2 {tuple(x2.shape)}; they must agree")
    axes = _axes(x1, gamma)
    total = (x1.float() + x2.float()).to(x1.dtype)
    wide = total.float()
    rstd = _rstd(wide, axes, epsilon)
    return (wide * rstd * gamma.float()).to(x1.dtype), rstd, total


@reference("npu::npu_gemma_rms_norm")
def gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """aclnnGemmaRmsNorm: "y = x / RMS(x) * (1 + gamma)". Docs: "gamma_shape = input_shape[n:]"; "non-contiguous tensors
    are not supported"; products A2 and A3.
    """
    require_not_310p()
    require_dtype("input", input)
    require_same_dtype(input=input, gamma=gamma)
    require_contiguous(input=input, gamma=gamma)
    require(input.numel() > 0, "empty tensors are not supported")
    axes = _axes(input, gamma)
    wide = input.float()
    rstd = _rstd(wide, axes, epsilon)
    return (wide * rstd * (1.0 + gamma.float())).to(input.dtype), rstd


@reference("npu::npu_add_layer_norm")
def add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-5, additional_output: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """aclnnAddLayerNorm: "x = x1 + x2; y = (x - E(x)) / sqrt(Var(x) + eps) * gamma + beta", returning (y, mean, rstd,
    x); "additionalOutput: whether x1 + x2 is put out". Without it, x is allocated and left as it was.
    """
    require_dtype("x1", x1)
    _require_row(x1)
    require(x1.shape == x2.shape, f"x1 has shape {tuple(x1.shape)}, x2 {tuple(x2.shape)}; they must agree")
    require_same_dtype(gamma=gamma, beta=beta)
    require(gamma.shape == beta.shape, f"gamma has shape {tuple(gamma.shape)}, beta {tuple(beta.shape)}")
    axes = _axes(x1, gamma)
    total = (x1.float() + x2.float()).to(x1.dtype)
    wide = total.float()
    mean = wide.mean(axes, keepdim=True)
    rstd = _rstd(wide - mean, axes, epsilon)
    y = ((wide - mean) * rstd * gamma.float() + beta.float()).to(x1.dtype)
    return y, mean, rstd, total if additional_output else torch.full_like(total, float("nan"))


@reference("npu::npu_add_layer_norm_backward")
def add_layer_norm_backward(
    dy_opt: Tensor | None,
    x1: Tensor,
    x2: Tensor,
    rstd: Tensor,
    mean: Tensor,
    gamma: Tensor,
    dsum_opt: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The derivative of the forward's formula: (dx1, dx2, dgamma, dbeta), dgamma and dbeta in float32; both addends
    get the same, and the gradient of the sum, where it was put out, is added.
    """
    axes = _axes(x1, gamma)
    dy = torch.zeros_like(x1, dtype=torch.float32) if dy_opt is None else dy_opt.float()
    normed = ((x1.float() + x2.float()).to(x1.dtype).float() - mean) * rstd
    weighted = dy * gamma.float()
    dx = weighted - weighted.mean(axes, keepdim=True) - normed * (weighted * normed).mean(axes, keepdim=True)
    dx = dx * rstd
    if dsum_opt is not None:
        dx = dx + dsum_opt.float()
    dgamma = (dy * normed).reshape(-1, *gamma.shape).sum(0)
    dbeta = dy.reshape(-1, *gamma.shape).sum(0)
    rounded = dx.to(x1.dtype)
    return rounded, rounded.clone(), dgamma, dbeta
