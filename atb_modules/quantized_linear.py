"""Products with int8 weights: the weight alone in codes, or the activations, too.

Codes are symmetric (no zero point): ``weight[o, i] = codes[o, i] * scales[o]``, or ``scales[o, i // group]``.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from atb_modules import kernels  # noqa: F401  (registers every kernel)
from atb_modules.checks import check_floating, check_int, check_tensor
from atb_modules.kernels.registry import resolve
from atb_modules.kernels.traits import QuantizedLinearTraits, count, under_autocast

#: in_features up to which the sums of products of codes fit int32
LONGEST_SUM = 2**17


def quantize_weight(weight: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """int8 codes and float32 scales of a weight, by the largest magnitude: ``scale = max|w| / 127``.

    Scales are rounded up to eight significant bits, which bfloat16 and (from 8e-6 on) float16 hold, so that a device
    whose product takes scales in half precision computes with the same weight.

    Args:
        weight: (out_features, in_features), floating.
        group: input channels that share a scale, a divisor of in_features; None for one scale an output channel.

    Returns:
        codes int8 (out_features, in_features) in [-127, 127]; scales float32 (out_features,), or with a group
        (out_features, in_features / group). Zeros get scale 0.

    Raises:
        ValueError, TypeError: for a weight or a group that is not as said.
    """
    check_floating("weight", weight)
    if weight.dim() != 2 or not weight.shape[1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; allowed: (out_features, in_features >= 1)")
    out_features, in_features = weight.shape
    check_int("group", group, optional=True)
    if group is not None and in_features % group:
        raise ValueError(f"group is {group}; allowed: a divisor of weight's {in_features} input channels")
    wide = weight.detach().float().reshape(out_features, -1, group or in_features)
    scales = _short(wide.abs().amax(-1, keepdim=True) / 127.0)
    codes = torch.where(scales > 0, wide / scales, 0.0).round().clamp(-127, 127).to(torch.int8)
    return codes.view(out_features, in_features), scales.view(out_features) if group is None else scales.squeeze(-1)


def _short(scales: Tensor) -> Tensor:
    """float32 rounded up to the next number of bfloat16: the upper 16 bits."""
    return ((scales.contiguous().view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def weight_only_linear(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, *, strategy: str = "auto"
) -> Tensor:
    """``x (codes * scales)^T + bias``: the weight is int8 in memory, the product in x's dtype.

    Differentiable in x and bias; codes and scales are constants. On an NPU the scales are rounded to x's dtype, as
    its operator takes them; those of ``quantize_weight`` are not changed by that.

    Args:
        x: (..., in_features), floating.
        codes: int8 (out_features, in_features).
        scales: float32 (out_features,), or (out_features, in_features / group) for groups of input channels.
        bias: (out_features,) or None.
        strategy: a ``LinearStrategy`` or its word.

    Returns:
        (..., out_features) in x's dtype (under autocast, in autocast's).

    Raises:
        ValueError, TypeError: for arguments that do not fit each other, scales that require a gradient, or a strategy
            that cannot serve the call.
    """
    group = _check(x, codes, scales, bias, grouped=True)
    return _call("weight_only_linear", x, codes, scales, bias, group, strategy)


def quantized_linear(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, *, strategy: str = "auto"
) -> Tensor:
    """``x (codes * scales)^T + bias`` with x quantised on the fly: the product is int8 by int8, summed in int32.

    Each row of x gets a scale of its own, ``max|row| / 127``, and codes rounded half to even, in float32. Not
    differentiable.

    Args:
        x: (..., in_features), floating, in_features up to 131,072.
        codes: int8 (out_features, in_features).
        scales: float32 (out_features,).
        bias: (out_features,) or None.
        strategy: a ``LinearStrategy`` or its word.

    Returns:
        (..., out_features) in x's dtype (under autocast, in autocast's).

    Raises:
        ValueError, TypeError: for arguments that do not fit each other, where a gradient is asked for, or for a
            strategy that cannot serve the call.
    """
    _check(x, codes, scales, bias, grouped=False)
    if codes.shape[1] > LONGEST_SUM:
        raise ValueError(f"codes has {codes.shape[1]} input channels; allowed: up to {LONGEST_SUM}, for int32 sums")
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(f"{name} requires a gradient, which quantized_linear has not; allowed: torch.no_grad()")
    return _call("quantized_linear", x, codes, scales, bias, 0, strategy)


def _check(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, grouped: bool) -> int:
    """Raises for what does not fit; the group of ``QuantizedLinearTraits``."""
    check_floating("x", x)
    check_floating("bias", bias, optional=True)
    for name, tensor, dtype in (("codes", codes, torch.int8), ("scales", scales, torch.float32)):
        check_tensor(name, tensor)
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}; allowed: {dtype}")
    if codes.dim() != 2 or not codes.numel() or not x.dim() or x.shape[-1] != codes.shape[1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and codes {tuple(codes.shape)}; allowed: (..., in_features) and "
            "(out_features, in_features), at least 1 of both"
        )
    out_features, in_features = codes.shape
    per_group = grouped and scales.dim() == 2 and scales.shape[0] == out_features and scales.shape[1] > 0
    if tuple(scales.shape) != (out_features,) and not (per_group and in_features % scales.shape[1] == 0):
        or_groups = f", or ({out_features}, groups) with groups a divisor of {in_features}" if grouped else ""
        raise ValueError(f"scales has shape {tuple(scales.shape)}; allowed: ({out_features},){or_groups}")
    if bias is not None and tuple(bias.shape) != (out_features,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; allowed: ({out_features},)")
    others: tuple[tuple[str, Tensor | None], ...] = (("codes", codes), ("scales", scales), ("bias", bias))
    for name, other in others:
        if other is not None and other.device != x.device:
            raise ValueError(f"{name} is on {other.device}; x is on {x.device}, they must be equal")
    if torch.is_grad_enabled() and scales.requires_grad:
        raise ValueError("scales requires a gradient; allowed: constants (scales.detach())")
    groups = scales.shape[1] if scales.dim() == 2 else 1
    return 0 if groups == 1 else in_features // groups


def _call(op: str, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, group: int, strategy: str) -> Tensor:
    """The kernel, out of autocast's sight: it would round what is summed exactly."""
    device_type = x.device.type
    mixed = under_autocast(device_type)
    if mixed and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device_type))
    traits = QuantizedLinearTraits(
        device_type=device_type,
        dtype=x.dtype,
        rows=count(x.shape[:-1]),
        in_features=codes.shape[1],
        out_features=codes.shape[0],
        group=group,
        has_bias=bias is not None,
        requires_grad=torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, bias)),
        contiguous=x.is_contiguous(),
    )
    kernel = resolve(op, None, traits, strategy)
    with torch.autocast(device_type, enabled=False) if mixed else contextlib.nullcontext():
        return kernel.function(x, codes, scales, bias)
