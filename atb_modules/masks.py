"""Which key a query may see: small predicates over positions, and the dense mask that they add up to.

Every function takes integer tensors of query and key positions that broadcast against each other, and returns True
where the query may attend. Positions are bottom-right aligned: with ``q_len`` queries over ``kv_len`` keys, query i
stands at position ``i + kv_len - q_len``, so that the last query sees the last key.

    causal, q_len 3, kv_len 5      window (1, 0)              window (1, 1), not causal
        k 0 1 2 3 4                 k 0 1 2 3 4                k 0 1 2 3 4
    q 0   x x x . .             q 0   . x x . .            q 0   . x x x .
    q 1   x x x x .             q 1   . . x x .            q 1   . . x x x
    q 2   x x x x x             q 2   . . . x x            q 2   . . . x x
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal(q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """A query sees itself and what stands before it."""
    return k_pos <= q_pos


def in_window(q_pos: Tensor, k_pos: Tensor, left: int | None, right: int | None) -> Tensor:
    """A query sees ``left`` keys before it, itself, and ``right`` keys after it; None is unbounded."""
    visible = torch.ones((), dtype=torch.bool, device=q_pos.device).expand(
        torch.broadcast_shapes(q_pos.shape, k_pos.shape)
    )
    if left is not None:
        visible = visible & (k_pos >= q_pos - left)
    if right is not None:
        visible = visible & (k_pos <= q_pos + right)
    return visible


def positions(q_len: int, kv_len: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Bottom-right aligned positions: queries (q_len, 1) and keys (1, kv_len), int64."""
    q_pos = torch.arange(q_len, device=device).unsqueeze(-1) + (kv_len - q_len)
    return q_pos, torch.arange(kv_len, device=device).unsqueeze(0)


def alibi_bias(slopes: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """ALiBi's bias ``-slope * |q_pos - k_pos|``: slopes (heads,) give (heads, q_len, kv_len) (Press et al., 2022)."""
    distance = (q_pos - k_pos).abs().to(slopes.dtype)
    return -slopes[:, None, None] * distance
