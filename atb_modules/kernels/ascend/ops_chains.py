"""Modulated norms, the feed-forward with the norm behind it, and mixtures of experts, by torch_npu's operators."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.kernels.activation import activation_torch
from atb_modules.kernels.ascend.ops_rows import (
    add_layer_norm_ascend,
    add_rms_norm_ascend,
    gated_activation_ascend,
    layer_norm_ascend,
    rms_norm_ascend,
)
from atb_modules.kernels.experts import sort_by_expert
from atb_modules.kernels.torch.linear import linear_torch
from atb_modules.kernels.torch.mlp import gated_activation_torch

#: kinds of gates that torch_npu has an operator for
GATES = ("silu", "gelu", "gelu_tanh")


def modulated_norm_ascend(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer_norm: bool,
) -> Tensor:
    """The fused norm in float32, then one multiplication and sum; rounded once."""
    rows = x.float()
    weight = None if weight is None else weight.float()
    if layer_norm:
        normed = layer_norm_ascend(rows, weight, None if bias is None else bias.float(), eps)
    else:
        normed = rms_norm_ascend(rows, weight, eps)
    groups = scale.shape[0]
    grouped = normed.reshape(groups, x.shape[0] // max(groups, 1), x.shape[1])
    out = torch.addcmul(shift.float().unsqueeze(1), grouped, 1.0 + scale.float().unsqueeze(1))
    return out.reshape(x.shape).to(x.dtype)


def _gate(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return gated_activation_ascend(gate, up, kind) if kind in GATES else gated_activation_torch(gate, up, kind)


def mlp_residual_norm_ascend(
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
    """The products, between them npu_swiglu or npu_geglu, behind them the sum and its norm in one operator."""
    hidden = linear_torch(x, up)
    hidden = activation_torch(hidden, kind) if gate is None else _gate(linear_torch(x, gate), hidden, kind)
    branch = linear_torch(hidden, down).to(residual.dtype)
    if keep is not None:
        branch = branch * keep * keep_scale
    if layer_norm:
        return add_layer_norm_ascend(branch, residual, norm_weight, norm_bias, eps)
    return add_rms_norm_ascend(branch, residual, norm_weight, eps)


def moe_ascend(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kind: str,
    gated: bool,
) -> Tensor:
    """Rows sorted by expert, and npu_grouped_matmul over all experts at once: the host needs no sizes."""
    tokens, top_k = experts.shape
    if not tokens:
        return torch.zeros_like(x)
    order, inverse, ends = sort_by_expert(experts, up_proj.shape[0])
    rows = x.unsqueeze(1).expand(tokens, top_k, x.shape[-1]).reshape(tokens * top_k, x.shape[-1])[order]
    hidden = _grouped(rows, up_proj, up_bias, ends)
    if gated:
        gate, up = hidden.chunk(2, dim=-1)
        hidden = _gate(gate, up, kind)
    else:
        hidden = activation_torch(hidden, kind)
    out = _grouped(hidden, down_proj, down_bias, ends)
    out = out[inverse].reshape(tokens, top_k, out.shape[-1]).float()
    return (out * weights.float().unsqueeze(-1)).sum(1).to(x.dtype)


def _grouped(rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """``rows`` of each expert times its matrix; ``ends`` are the cumulated rows."""
    shifts = None
    if bias is not None:
        shifts = [bias.to(torch.float16 if rows.dtype == torch.float16 else torch.float32)]
    return torch.ops.npu.npu_grouped_matmul(
        [rows],
        [weight.transpose(-1, -2)],  # a view: the operator reads turned matrices
        bias=shifts,
        group_list=ends.to(torch.int64),
        split_item=2,
        group_type=0,
        group_list_type=0,
    )[0]
