"""Initial weights that depend on what a projection is for: DeepNorm's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atb_modules.attention import Attention
from atb_modules.attention.qkv import FusedQKV, SeparateQKV
from atb_modules.checks import check_positive, check_type
from atb_modules.mlp import Experts, FeedForward


def deepnorm_init_(module: nn.Module, beta: float) -> nn.Module:
    """Draw the projections of all our attentions and feed-forwards in ``module`` as DeepNet does (Wang et al., 2022).

    Xavier normal with gain ``beta`` for the value and output projections and the feed-forwards (each expert by itself),
    with gain 1 for queries and keys; biases 0. Parts of a fused weight are drawn as if they were apart.

    Returns:
        ``module``.
    """
    check_type("module", module, nn.Module)
    check_positive("beta", beta)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, Attention):
                for weight, gain in _attention_weights(part, beta):
                    nn.init.xavier_normal_(weight, gain)
            elif isinstance(part, FeedForward | Experts):
                for weight in _feed_forward_weights(part):
                    nn.init.xavier_normal_(weight, beta)
            else:
                continue
            for name, parameter in part.named_parameters():
                if name.rsplit(".", 1)[-1].endswith("bias"):
                    nn.init.zeros_(parameter)
    return module


def _attention_weights(attention: Attention, beta: float) -> list[tuple[Tensor, float]]:
    """Weights (out, in) of the projections that are ours, with their gains."""
    qkv, found = attention.qkv, []
    if isinstance(qkv, FusedQKV):
        q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        weights = qkv.qkv_proj.weight.split([q, kv, kv])
        found += list(zip(weights, (1.0, 1.0, beta), strict=True))
    elif isinstance(qkv, SeparateQKV):
        for projection, gain in ((qkv.q_proj, 1.0), (qkv.k_proj, 1.0), (qkv.v_proj, beta)):
            if isinstance(projection, nn.Linear):
                found.append((projection.weight, gain))
    if isinstance(attention.o_proj, nn.Linear):
        found.append((attention.o_proj.weight, beta))
    return found


def _feed_forward_weights(part: FeedForward | Experts) -> list[Tensor]:
    """Weights (out, in) of each projection, of each expert."""
    if isinstance(part, Experts):
        ups, downs = getattr(part, part.up_name).unbind(), part.down_proj.unbind()
    else:
        up = part.gate_up_proj if part.mlp_type.is_gated else part.up_proj
        ups, downs = (up.weight,), (part.down_proj.weight,)
    pieces = 2 if part.mlp_type.is_gated else 1
    return [piece for up in ups for piece in up.chunk(pieces)] + list(downs)
