"""The registry's records of the native chains: a modulated norm, and a feed-forward with the norm behind it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from atb_modules.kernels.activation import activation_torch
from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import LinearTraits, MLPChainTraits, NormTraits
from atb_modules.strategies import LinearStrategy, MLPStrategy, NormStrategy

from .ops_linear import GEMV_ROWS
from .records import (
    _linear_cost,
    _linear_reasons,
    _supported,
    add_layer_norm_cpu,
    add_rms_norm_cpu,
    add_rms_norm_cpu_,
    common_reasons,
    linear_cpu,
    rms_norm_cpu,
)

_OPS = torch.ops.atb_modules


def modulated_norm_cpu(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer_norm: bool,
) -> Tensor:
    """Norm and modulation in one native pass over each row."""
    return _OPS.modulated_norm(x, scale, shift, _supported(weight), _supported(bias), eps, layer_norm)


def mlp_residual_norm_cpu(
    x: Tensor,
    residual: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    kind: str,
    keep: Tensor | None,
    keep_scale: float,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    layer_norm: bool,
) -> tuple[Tensor, Tensor]:
    """The products, and between them one pass for the activation and one for dropout, sum and norm.

    Without a gradient each result takes the memory of what it was made from.
    """
    tensors = (x, residual, gate, up, down, norm_weight, norm_bias)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    in_place = not recorded and not torch.compiler.is_compiling()
    hidden = linear_cpu(x, up)
    if gate is None:
        hidden = activation_torch(hidden, kind)
    elif in_place:
        value = linear_cpu(x, gate)
        _OPS.gated_activation.out(value, hidden, kind, out=value)
        hidden = value
    else:
        hidden = _OPS.gated_activation(linear_cpu(x, gate), hidden, kind)
    branch = linear_cpu(hidden, down)
    if keep is not None:
        parameters = (_supported(norm_weight), _supported(norm_bias))
        return _OPS.drop_add_norm(branch, residual, keep, keep_scale, *parameters, eps, 0.0, False, layer_norm)
    if layer_norm:
        return add_layer_norm_cpu(branch, residual, norm_weight, norm_bias, eps)
    return (add_rms_norm_cpu_ if in_place else add_rms_norm_cpu)(branch, residual, norm_weight, eps)


def _norm_reasons(spec: None, traits: NormTraits) -> tuple[str, ...]:
    return tuple(common_reasons(traits.dtype))


def _norm_cost(spec: None, traits: NormTraits) -> Cost:
    return Cost(bytes=2.0 * traits.dtype.itemsize * traits.rows * traits.width)


def _chain_reasons(spec: None, traits: MLPChainTraits) -> tuple[str, ...]:
    reasons = common_reasons(traits.dtype, traits.weight_dtype)
    if traits.autocast:
        reasons.append("autocast decides the dtype of the products")
    return tuple(reasons)


def _chain_cost(spec: None, traits: MLPChainTraits) -> Cost:
    operations = 2.0 * traits.rows * traits.weights
    elements = 3.0 * traits.intermediate_size + 4.0 * traits.hidden_size
    moved = traits.weights * traits.weight_dtype.itemsize + traits.dtype.itemsize * traits.rows * elements
    if traits.rows > GEMV_ROWS:
        operations *= 0.73  # the products of more rows are torch's, whose rate is higher
        if traits.weight_dtype != torch.float32:
            moved += 8.0 * traits.weights
    return Cost(operations=operations, bytes=moved, calls=5)


_CPU = ("cpu",)
register(
    Kernel("modulated_norm", NormStrategy.CPU, modulated_norm_cpu, _norm_reasons, _norm_cost, _CPU, transformable=False)
)
register(
    Kernel(
        "fused_mlp_residual_norm",
        MLPStrategy.CPU,
        mlp_residual_norm_cpu,
        _chain_reasons,
        _chain_cost,
        _CPU,
        transformable=False,
    )
)


def norm_linear_cpu(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_first: bool = False,
) -> Tensor:
    """One native pass for the norm, then the product: normed rows stay in the processor's cache in between."""
    return linear_cpu(rms_norm_cpu(x, norm_weight, eps, weight_offset, cast_first), weight, bias)


def _norm_linear_cost(spec: None, traits: LinearTraits) -> Cost:
    product = _linear_cost(spec, traits)
    moved = 2.0 * traits.dtype.itemsize * traits.rows * traits.in_features
    return dataclasses.replace(product, bytes=product.bytes + moved, calls=product.calls + 1.0)


register(
    Kernel(
        "norm_linear",
        LinearStrategy.CPU,
        norm_linear_cpu,
        _linear_reasons,
        _norm_linear_cost,
        ("cpu",),
        transformable=False,
    )
)
