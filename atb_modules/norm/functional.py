"""The functional norms: validate, build traits, resolve a kernel, call it."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules import kernels  # noqa: F401  (registers every kernel)
from atb_modules.checks import check_bool, check_floating, check_number, is_floating
from atb_modules.kernels.registry import Kernel, resolve
from atb_modules.kernels.traits import NormTraits, count, under_autocast

_INF = float("inf")


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_first: bool = False,
    strategy: str = "auto",
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight_offset + weight)`` over the last axis (Zhang and Sennrich, 2019).

    Statistics in float32 for every dtype. ``cast_first`` rounds the normalised values to x's dtype before the weight
    multiplies them, as Llama does; otherwise all is float32 with one rounding at the end.
    """
    _check_eps(eps, weight_offset)
    _check_bools(cast_first)
    kernel, _ = _resolve("rms_norm", x, None, (weight,), strategy)
    return kernel.function(_input(kernel, x), weight, eps, weight_offset, cast_first)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_first: bool = False,
    strategy: str = "auto",
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)`` in one pass; the sum is rounded to x's dtype first.

    ``overwrite`` lets the sum take x's memory, where no gradient is recorded.
    """
    _check_eps(eps, weight_offset)
    _check_bools(cast_first, overwrite)
    x, residual = _autocast(x, residual)
    kernel, traits = _resolve("add_rms_norm", x, residual, (weight,), strategy)
    function = kernel.choose_function(overwrite, traits)
    return function(_input(kernel, x), _input(kernel, residual), weight, eps, weight_offset, cast_first)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    strategy: str = "auto",
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis (Ba et al., 2016), statistics in float32."""
    _check_eps(eps)
    kernel, _ = _resolve("layer_norm", x, None, (weight, bias), strategy)
    return kernel.function(_input(kernel, x), weight, bias, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    strategy: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``(layer_norm(x + residual), x + residual)`` in one pass; the sum is rounded to x's dtype first."""
    _check_eps(eps)
    x, residual = _autocast(x, residual)
    kernel, _ = _resolve("add_layer_norm", x, residual, (weight, bias), strategy)
    return kernel.function(_input(kernel, x), _input(kernel, residual), weight, bias, eps)


def _check_eps(eps: float, weight_offset: float = 0.0) -> None:
    # What a module passes is a float that its config has checked: it costs no call.
    if type(eps) is not float or type(weight_offset) is not float or not 0.0 <= eps < _INF > abs(weight_offset):
        check_number("eps", eps, "a finite number >= 0", lambda value: value >= 0)
        check_number("weight_offset", weight_offset)


def _check_bools(cast_first: bool, overwrite: bool = False) -> None:
    if type(cast_first) is not bool or type(overwrite) is not bool:
        check_bool("cast_first", cast_first)
        check_bool("overwrite", overwrite)


def _autocast(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Under autocast a branch comes back in half precision while the residual stream is float32: the wider of both."""
    if not isinstance(x, Tensor) or not isinstance(residual, Tensor):
        return x, residual  # refused by name later
    if x.dtype != residual.dtype and under_autocast(x.device.type):
        wide = torch.promote_types(x.dtype, residual.dtype)
        return x.to(wide), residual.to(wide)
    return x, residual


def _input(kernel: Kernel, x: Tensor) -> Tensor:
    return x.contiguous() if kernel.needs_contiguous else x


def _resolve(
    op: str, x: Tensor, residual: Tensor | None, parameters: tuple[Tensor | None, ...], strategy: str
) -> tuple[Kernel, NormTraits]:
    if not is_floating(x):
        check_floating("x", x, "a floating tensor")
    shape, device = x.shape, x.device
    if not shape:
        raise ValueError("x has no axis; allowed: at least one, the last is normalised")
    width = shape[-1]
    if op.startswith("add_"):
        if not is_floating(residual):
            check_floating("residual", residual, "a floating tensor")
        assert residual is not None
        if residual.shape != shape:
            raise ValueError(f"residual has shape {tuple(residual.shape)}; x has {tuple(shape)}, they must be equal")
        if residual.dtype != x.dtype:
            raise TypeError(f"residual is {residual.dtype}; x is {x.dtype}, they must be equal")
        if residual.device != device:
            raise ValueError(f"residual is on {residual.device}; x is on {device}, they must be equal")
    for name, parameter in zip(("weight", "bias"), parameters, strict=False):
        if parameter is None:
            continue
        if not is_floating(parameter):
            check_floating(name, parameter, "a floating tensor", optional=True)
        if tuple(parameter.shape) != (width,):
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}; x of width {width} allows ({width},)")
        if parameter.device != device:
            raise ValueError(f"{name} is on {parameter.device}; x is on {device}, they must be equal")
    tensors = [t for t in (x, residual, *parameters) if t is not None]
    traits = NormTraits(
        device_type=device.type,
        dtype=x.dtype,
        rows=count(shape[:-1]),
        width=width,
        fused_add=residual is not None,
        requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        contiguous=x.is_contiguous() and (residual is None or residual.is_contiguous()),
    )
    return resolve(op, None, traits, strategy), traits
