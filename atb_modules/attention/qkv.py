"""Projections to queries, keys and values: fused, separate, or a user's own modules in a foreign layout."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor, nn

from atb_modules.linear import Linear, fuse_on_load
from atb_modules.strategies import parse_enum


class QKVLayout(StrEnum):
    """How the output channels of a fused qkv projection are ordered.

    QKV       q0 q1 q2 q3 | k0 k1 | v0 v1      all queries, all keys, all values: ours, timm's, Phi-3's
    GROUPED   q0 q1 k0 v0 | q2 q3 k1 v1        a key head after its query heads: Falcon, InternLM2
    PER_HEAD  q0 k0 v0 | q1 k1 v1              GROUPED with one query head a key head: GPT-NeoX, BLOOM
    """

    QKV = "qkv"
    GROUPED = "grouped"
    PER_HEAD = "per_head"


def split_qkv(
    qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, layout: QKVLayout | str = QKVLayout.QKV
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused product (..., (num_heads + 2 * num_kv_heads) * head_dim) into heads.

    Returns q (..., num_heads, head_dim), k and v (..., num_kv_heads, head_dim); views where the layout allows it.
    """
    layout = parse_enum(QKVLayout, layout, "layout")
    channels = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.shape[-1] != channels:
        raise ValueError(
            f"qkv has {qkv.shape[-1]} channels; {num_heads} heads and twice {num_kv_heads} kv heads of {head_dim} "
            f"make {channels}"
        )
    if layout is QKVLayout.PER_HEAD and num_heads != num_kv_heads:
        raise ValueError(f"layout 'per_head' needs num_kv_heads {num_kv_heads} equal to num_heads {num_heads}")
    lead = qkv.shape[:-1]
    if layout is QKVLayout.QKV:
        heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, head_dim))
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=-2)
        return q, k, v
    group = num_heads // num_kv_heads
    heads = qkv.unflatten(-1, (num_kv_heads, group + 2, head_dim))
    q, k, v = heads.split([group, 1, 1], dim=-2)
    return q.reshape(*lead, num_heads, head_dim), k.squeeze(-2), v.squeeze(-2)


def convert_qkv_weight(
    weight: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    source: QKVLayout | str,
) -> Tensor:
    """Reorder a fused weight (channels, in) or bias (channels,) from a foreign layout to ``QKVLayout.QKV``."""
    moved = weight.movedim(0, -1)
    parts = split_qkv(moved, num_heads, num_kv_heads, head_dim, source)
    return torch.cat([part.flatten(-2) for part in parts], dim=-1).movedim(-1, 0).contiguous()


class FusedQKV(nn.Module):
    """One projection for q, k and v, stored as ``qkv_proj``; loads ``q_proj``, ``k_proj``, ``v_proj`` as well."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        strategy: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        channels = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv_proj = Linear(hidden_size, channels, bias, strategy=strategy, device=device, dtype=dtype)
        rows = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
        fuse_on_load(self, "qkv_proj", rows)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split_qkv(self.qkv_proj(hidden_states), self.num_heads, self.num_kv_heads, self.head_dim)


class SeparateQKV(nn.Module):
    """Three projections, q from one input, k and v from another or the same; the modules may be the user's own."""

    def __init__(
        self, q_proj: nn.Module, k_proj: nn.Module, v_proj: nn.Module, num_heads: int, num_kv_heads: int
    ) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = q_proj, k_proj, v_proj
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads

    def queries(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., num_heads, head_dim)."""
        return self.q_proj(hidden_states).unflatten(-1, (self.num_heads, -1))

    def keys_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """(..., hidden) -> k, v (..., num_kv_heads, head_dim)."""
        k = self.k_proj(hidden_states).unflatten(-1, (self.num_kv_heads, -1))
        return k, self.v_proj(hidden_states).unflatten(-1, (self.num_kv_heads, -1))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.queries(hidden_states), *self.keys_values(hidden_states)


class ForeignQKV(nn.Module):
    """A user's own fused projection in any ``QKVLayout``; its parameters stay as they are."""

    def __init__(
        self, qkv_proj: nn.Module, layout: QKVLayout | str, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        super().__init__()
        self.qkv_proj = qkv_proj
        self.layout = parse_enum(QKVLayout, layout, "qkv_layout")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split_qkv(self.qkv_proj(hidden_states), self.num_heads, self.num_kv_heads, self.head_dim, self.layout)


def out_features(projection: nn.Module | None) -> int:
    """Output channels of a user's projection, from ``out_features`` or the weight."""
    features = getattr(projection, "out_features", None)
    if features is None:
        weight = getattr(projection, "weight", None)
        if weight is None:
            raise TypeError(f"{type(projection).__name__} has neither out_features nor weight; its size is unknown")
        features = weight.shape[0]
    return int(features)
