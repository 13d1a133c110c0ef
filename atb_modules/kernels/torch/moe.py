"""A mixture of experts in plain PyTorch: tokens sorted by expert, one product an expert over its rows, no padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atb_modules.kernels.activation import activation_torch
from atb_modules.kernels.costs import Cost
from atb_modules.kernels.experts import has_grouped_products, sort_by_expert, vectorising
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.torch.linear import linear_torch
from atb_modules.kernels.torch.mlp import gated_activation_torch
from atb_modules.kernels.traits import MoETraits
from atb_modules.strategies import MLPStrategy


def moe_torch(
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
    """See ``moe_reference``; the weighted sum is taken in float32 (float64) in the order of a token's choices."""
    tokens, top_k = experts.shape
    order, inverse, ends = sort_by_expert(experts, up_proj.shape[0])
    # Copies and a permutation, not a gather with repeats, whose gradient would be summed in any order.
    rows = x.unsqueeze(1).expand(tokens, top_k, x.shape[-1]).reshape(tokens * top_k, x.shape[-1])[order]
    if has_grouped_products(x, up_proj, down_proj):
        hidden = _activate(_grouped(rows, up_proj, up_bias, experts, order, ends), kind, gated)
        out = _grouped(hidden, down_proj, down_bias, experts, order, ends)
    else:
        out = _one_by_one(rows, ends.tolist(), up_proj, down_proj, up_bias, down_bias, kind, gated)
    wide = torch.promote_types(out.dtype, torch.float32)
    out = out[inverse].reshape(tokens, top_k, out.shape[-1]).to(wide)
    return (out * weights.to(wide).unsqueeze(-1)).sum(1).to(x.dtype)


def _one_by_one(
    rows: Tensor,
    ends: list[int],
    up_proj: Tensor,
    down_proj: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kind: str,
    gated: bool,
) -> Tensor:
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    # unbind, not an index: the gradient is then made once for all experts. Without a token the first gets none.
    ups, downs = up_proj.unbind(), down_proj.unbind()
    up_biases = None if up_bias is None else up_bias.unbind()
    down_biases = None if down_bias is None else down_bias.unbind()
    out = []
    live = [expert for expert, size in enumerate(sizes) if size] or [0]
    for expert, part in zip(live, rows.split([sizes[expert] for expert in live]), strict=True):
        hidden = linear_torch(part, ups[expert], None if up_biases is None else up_biases[expert])
        hidden = _activate(hidden, kind, gated)
        out.append(linear_torch(hidden, downs[expert], None if down_biases is None else down_biases[expert]))
    return torch.cat(out)


def _activate(hidden: Tensor, kind: str, gated: bool) -> Tensor:
    if not gated:
        return activation_torch(hidden, kind)
    gate, up = hidden.chunk(2, dim=-1)
    return gated_activation_torch(gate, up, kind)


def _grouped(rows: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    out = F.grouped_mm(rows, weight.transpose(-1, -2), offs=ends.to(torch.int32))
    return out if bias is None else out + bias[experts.reshape(-1)[order]].to(out.dtype)


def _reasons(spec: None, traits: MoETraits) -> tuple[str, ...]:
    if traits.grouped_products:
        return ()
    if torch.compiler.is_compiling():
        return ("torch.compile cannot trace products whose sizes depend on the routing",)
    if traits.device_type == "meta" or vectorising():
        return ("the sizes of its products are read from the routing, which meta tensors and vmap hide",)
    return ()


def _cost(spec: None, traits: MoETraits) -> Cost:
    pairs = 1.0 * traits.tokens * traits.top_k
    live = min(float(traits.num_experts), pairs)
    moved = live * traits.expert_weights * traits.weight_dtype.itemsize
    moved += pairs * (20.0 * traits.intermediate_size + 16.0 * traits.hidden_size)
    return Cost(operations=2.0 * pairs * traits.expert_weights, bytes=moved, calls=10.0 + 5.0 * live)


register(Kernel("moe", MLPStrategy.TORCH, moe_torch, _reasons, _cost))
