"""The functional API that users call: fused compositions and the primitives around them.

Weights here are (in, out), as the matrix products of papers write them; modules store (out, in).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atb_modules.attention.functional import attention, cache_append, paged_attention, rotary_append
from atb_modules.attention.merge import merge_attention
from atb_modules.attention.qkv import split_qkv
from atb_modules.attention.rope import rotary
from atb_modules.checks import check_floating, check_int, check_number, check_probability, check_tensor
from atb_modules.kernels.registry import resolve
from atb_modules.kernels.traits import MLPChainTraits, count, under_autocast
from atb_modules.linear import linear
from atb_modules.mlp.experts import moe
from atb_modules.mlp.functional import activation, gated_activation
from atb_modules.multimodal.attention.functional import multimodal_attention
from atb_modules.norm.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from atb_modules.norm.modulated import modulated_norm
from atb_modules.norm.modules import NormType
from atb_modules.ops_checks import check_alike, check_mlp, check_norm, check_product
from atb_modules.quantized_linear import quantize_weight, quantized_linear, weight_only_linear
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import parse_enum

__all__ = [
    "activation",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "cache_append",
    "fused_attention",
    "fused_layernorm_matmul",
    "fused_mlp",
    "fused_mlp_residual_norm",
    "fused_rmsnorm_matmul",
    "gated_activation",
    "layer_norm",
    "linear",
    "matmul",
    "merge_attention",
    "merge_heads",
    "modulated_norm",
    "moe",
    "multimodal_attention",
    "paged_attention",
    "quantize_weight",
    "quantized_linear",
    "rms_norm",
    "rotary",
    "rotary_append",
    "silu_matmul",
    "softmax",
    "split_heads",
    "weight_only_linear",
]

K_LAYOUTS = ("bhsd", "bhds")


def fused_layernorm_matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``layer_norm(x) @ w + bias``: x (..., in), w (in, out), bias (out,), norm_weight and norm_bias (in,)."""
    check_product(x, w, False, bias, ("x", "w"))
    check_norm(x, norm_weight=norm_weight, norm_bias=norm_bias)
    return matmul(layer_norm(x, norm_weight, norm_bias, eps), w, bias=bias)


def fused_rmsnorm_matmul(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, norm_weight: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """``rms_norm(x) @ w + bias``: x (..., in), w (in, out), bias (out,), norm_weight (in,)."""
    check_product(x, w, False, bias, ("x", "w"))
    check_norm(x, norm_weight=norm_weight)
    return matmul(rms_norm(x, norm_weight, eps), w, bias=bias)


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    *,
    inv_scale: float | None = None,
    k_layout: str = "bhsd",
    causal: bool = False,
    mask: Tensor | None = None,
    strategy: str = "auto",
) -> Tensor:
    """``softmax(scale * q k^T) v``.

    Args:
        q: (batch, heads, q_len, head_dim).
        k: (batch, kv_heads, kv_len, head_dim), or already transposed with ``k_layout="bhds"``.
        v: (batch, kv_heads, kv_len, value_dim).
        scale: multiplies the scores; default 1 / sqrt(head_dim).
        inv_scale: divides the scores, for formulas written that way; give one of the two.
        causal: bottom-right aligned.
        mask: bool (True = may attend) or additive.

    Returns:
        (batch, heads, q_len, value_dim).
    """
    if k_layout not in K_LAYOUTS:
        raise ValueError(f"k_layout is {k_layout!r}; allowed: {', '.join(K_LAYOUTS)}")
    if inv_scale is not None:
        if scale is not None:
            raise ValueError(f"scale is {scale} and inv_scale {inv_scale}; give one of them")
        check_number("inv_scale", inv_scale, "a number other than 0, whose inverse is finite", _has_inverse)
        scale = 1.0 / inv_scale
    if k_layout == "bhds":
        check_tensor("k", k, "a tensor (batch, kv_heads, head_dim, kv_len)")
        if k.dim() != 4:
            raise ValueError(
                f"k has shape {tuple(k.shape)}; k_layout 'bhds' allows 4 axes (batch, kv_heads, head_dim, kv_len)"
            )
        k = k.transpose(-1, -2)
    out, _ = attention(q, k, v, AttentionSpec(causal=causal, scale=scale), mask=mask, strategy=strategy)
    return out


def _has_inverse(number: float) -> bool:
    return number != 0 and math.isfinite(1.0 / number)


def silu_matmul(x: Tensor, w: Tensor, bias: Tensor | None = None, *, gate: Tensor | None = None) -> Tensor:
    """``silu(x) @ w + bias``, or ``(silu(gate) * x) @ w + bias`` with a gate of x's shape; w is (in, out)."""
    check_product(x, w, False, bias, ("x", "w"))
    if gate is not None:
        check_alike("gate", gate, "x", x)
    hidden = activation(x, "silu") if gate is None else gated_activation(gate, x, "silu")
    return matmul(hidden, w, bias=bias)


def fused_mlp(x: Tensor, gate_w: Tensor | None, up_w: Tensor, down_w: Tensor, *, kind: str = "silu") -> Tensor:
    """``(activation(x @ gate_w) * (x @ up_w)) @ down_w``; gate_w None is the plain form ``activation(x @ up_w)``.

    Args:
        x: (..., hidden).
        gate_w, up_w: (hidden, intermediate).
        down_w: (intermediate, hidden).
        kind: "silu", "gelu", "gelu_tanh" or "relu2".
    """
    check_product(x, up_w, False, None, ("x", "up_w"))
    if gate_w is not None:
        check_product(x, gate_w, False, None, ("x", "gate_w"))
        if gate_w.shape != up_w.shape:
            raise ValueError(f"gate_w has shape {tuple(gate_w.shape)}; up_w has {tuple(up_w.shape)}, must be equal")
    check_floating("down_w", down_w)
    up = matmul(x, up_w)
    check_product(up, down_w, False, None, ("x @ up_w", "down_w"))
    hidden = activation(up, kind) if gate_w is None else gated_activation(matmul(x, gate_w), up, kind)
    return matmul(hidden, down_w)


def fused_mlp_residual_norm(
    x: Tensor,
    residual: Tensor,
    gate_w: Tensor | None,
    up_w: Tensor,
    down_w: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm_type: str = NormType.RMSNORM,
    eps: float = 1e-6,
    kind: str = "silu",
    dropout_p: float = 0.0,
    strategy: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``h = residual + dropout(fused_mlp(x))`` and its norm: returns ``(norm(h), h)``, h rounded to x's dtype first.

    Args:
        x, residual: (..., hidden) of one dtype.
        gate_w, up_w, down_w, kind: see ``fused_mlp``.
        norm_weight, norm_bias: (hidden,) of the norm; RMSNorm has no bias.
        norm_type: "rmsnorm" or "layernorm".
        dropout_p: probability of dropping a value of the branch; the others grow by 1 / (1 - dropout_p). What is
            dropped is drawn from torch's generator before a kernel is chosen: one seed, one result for all of them.
    """
    check_mlp(x, gate_w, up_w, down_w, kind)
    layer_norm = parse_enum(NormType, norm_type, "norm_type") is NormType.LAYERNORM
    if norm_bias is not None and not layer_norm:
        raise ValueError("norm_bias is given with norm_type 'rmsnorm'; allowed: None")
    if down_w.shape[1] != x.shape[-1]:
        raise ValueError(f"down_w has shape {tuple(down_w.shape)}; x of width {x.shape[-1]} needs as many columns")
    check_alike("residual", residual, "x", x)
    check_norm(x, norm_weight=norm_weight, norm_bias=norm_bias)
    check_number("eps", eps, "a finite number >= 0", lambda value: value >= 0)
    check_probability("dropout_p", dropout_p)
    tensors = (x, residual, gate_w, up_w, down_w, norm_weight, norm_bias)
    traits = MLPChainTraits(
        device_type=x.device.type,
        dtype=x.dtype,
        weight_dtype=up_w.dtype,
        rows=count(x.shape[:-1]),
        hidden_size=x.shape[-1],
        intermediate_size=up_w.shape[1],
        gated=gate_w is not None,
        dropout=dropout_p > 0,
        requires_grad=torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors),
        autocast=under_autocast(x.device.type),
        contiguous=x.is_contiguous() and residual.is_contiguous(),
    )
    kernel = resolve("fused_mlp_residual_norm", None, traits, strategy)
    keep = (torch.rand(x.shape, device=x.device) >= dropout_p).to(torch.uint8) if dropout_p else None
    gate = None if gate_w is None else gate_w.t()
    dropout = (keep, 1.0 / (1.0 - dropout_p))
    return kernel.function(
        x, residual, gate, up_w.t(), down_w.t(), kind, *dropout, norm_weight, norm_bias, float(eps), layer_norm
    )


def matmul(a: Tensor, b: Tensor, trans_b: bool = False, *, bias: Tensor | None = None) -> Tensor:
    """``a @ b``, or ``a @ b^T`` with ``trans_b``, plus bias.

    A two-dimensional b is a weight and goes the way of ``linear``.

    Args:
        a: (..., n, k).
        b: (k, m) or (..., k, m); with trans_b (m, k) or (..., m, k).
        bias: (m,); where b has more than two axes, also what broadcasts to the product.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not go together.
    """
    check_product(a, b, trans_b, bias, ("a", "b"))
    if b.dim() == 2:
        return linear(a, b if trans_b else b.t(), bias)
    product = torch.matmul(a, b.transpose(-1, -2) if trans_b else b)
    return product if bias is None else product + bias.to(product.dtype)


def split_heads(qkv: Tensor, num_heads: int, *, num_kv_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused product (batch, seq, (num_heads + 2 num_kv_heads) * head_dim), queries first.

    Returns q (batch, num_heads, seq, head_dim), k and v (batch, num_kv_heads, seq, head_dim); views.
    """
    check_tensor("qkv", qkv, "a tensor (batch, seq, (num_heads + 2 * num_kv_heads) * head_dim)")
    check_int("num_heads", num_heads)
    check_int("num_kv_heads", num_kv_heads, optional=True)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    heads = num_heads + 2 * num_kv_heads
    if qkv.dim() != 3 or not qkv.shape[-1] or qkv.shape[-1] % heads:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}; allowed: (batch, seq, a multiple of {heads} heads)")
    q, k, v = split_qkv(qkv, num_heads, num_kv_heads, qkv.shape[-1] // heads)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def merge_heads(x: Tensor, num_heads: int) -> Tensor:
    """(batch, num_heads, seq, head_dim) -> (batch, seq, num_heads * head_dim)."""
    check_tensor("x", x, "a tensor (batch, num_heads, seq, head_dim)")
    check_int("num_heads", num_heads)
    if x.dim() != 4 or x.shape[1] != num_heads:
        raise ValueError(f"x has shape {tuple(x.shape)}; allowed: (batch, {num_heads}, seq, head_dim)")
    return x.transpose(1, 2).flatten(-2)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Softmax over ``axis``, statistics in float32; a slice of nothing but -inf gives 0 and not NaN."""
    check_floating("x", x)
    axes = max(x.dim(), 1)
    check_int("axis", axis, -axes, axes - 1)
    compute = torch.promote_types(x.dtype, torch.float32)
    empty = (x == float("-inf")).all(dim=axis, keepdim=True)
    wide = x.to(compute).masked_fill(empty, 0.0)
    return torch.softmax(wide, dim=axis).masked_fill(empty, 0.0).to(x.dtype)
