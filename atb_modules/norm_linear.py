"""A norm and the product that reads it as one op, for kernels that never write the normed rows to memory."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules import kernels  # noqa: F401  (registers every kernel)
from atb_modules.checks import check_bool, check_floating, check_number
from atb_modules.kernels.registry import resolve
from atb_modules.kernels.traits import LinearTraits, count, under_autocast


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_first: bool = False,
    strategy: str = "auto",
) -> Tensor:
    """``linear(rms_norm(x), weight, bias)``.

    Args:
        x: (..., in_features), floating.
        norm_weight: (in_features,) or None.
        weight: (out_features, in_features).
        bias: (out_features,) or None.
        eps, weight_offset, cast_first: see ``rms_norm``.
        strategy: a ``LinearStrategy`` or its word.

    Returns:
        (..., out_features) in x's dtype.
    """
    check_floating("x", x)
    check_floating("weight", weight)
    for name, vector in (("norm_weight", norm_weight), ("bias", bias)):
        check_floating(name, vector, optional=True)
    check_number("eps", eps, "a finite number >= 0", lambda value: value >= 0)
    check_number("weight_offset", weight_offset)
    check_bool("cast_first", cast_first)
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; allowed: (..., in_features) and "
            "(out_features, in_features)"
        )
    wanted = {"norm_weight": (norm_weight, weight.shape[1]), "bias": (bias, weight.shape[0])}
    for name, (vector, size) in wanted.items():
        if vector is not None and tuple(vector.shape) != (size,):
            raise ValueError(f"{name} has shape {tuple(vector.shape)}; allowed: ({size},)")
    tensors = [t for t in (x, norm_weight, weight, bias) if t is not None]
    for name, tensor in (("norm_weight", norm_weight), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}; x is on {x.device}, they must be equal")
    traits = LinearTraits(
        device_type=x.device.type,
        dtype=x.dtype,
        weight_dtype=weight.dtype,
        rows=count(x.shape[:-1]),
        in_features=weight.shape[1],
        out_features=weight.shape[0],
        has_bias=bias is not None,
        weight_contiguous=weight.is_contiguous(),
        requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        autocast=under_autocast(x.device.type),
        contiguous=x.is_contiguous(),
    )
    kernel = resolve("norm_linear", None, traits, strategy)
    return kernel.function(x, norm_weight, weight, bias, float(eps), float(weight_offset), cast_first)
