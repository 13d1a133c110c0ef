"""Which key a query may see: small predicates over positions, and the dense mask that they add up to.

Every function takes integer tensors of query and key positions that broadcast against each other, and returns True
where the query may attend. Positions are bottom-right aligned: with ``q_len`` queries over ``kv_len`` keys, query i
stands at position ``i + kv_len - q_len``, so that the last query sees the last key. In a packed sequence all of this
holds within each segment. The overlays join as

    same_segment and (((in_window and same_chunk or global_token) and causal) or same_image or in_prefix)

    causal, q_len 3, kv_len 5      window (1, 0)              window (1, 1), not causal
        k 0 1 2 3 4                 k 0 1 2 3 4                k 0 1 2 3 4
    q 0   x x x . .             q 0   . x x . .            q 0   . x x x .
    q 1   x x x x .             q 1   . . x x .            q 1   . . x x x
    q 2   x x x x x             q 2   . . . x x            q 2   . . . x x

    causal, window (1, 0)       causal, chunk 2            causal, image ids
    global_tokens 1             (Llama 4)                  . a a . b  (Gemma 3)
        k 0 1 2 3 4                 k 0 1 2 3 4                k 0 1 2 3 4
    q 0   x . . . .             q 0   x . . . .            q 0   x . . . .
    q 1   x x . . .             q 1   x x . . .            q 1   x x x . .
    q 2   x x x . .             q 2   . . x . .            q 2   x x x . .
    q 3   x . x x .             q 3   . . x x .            q 3   x x x x .
    q 4   x . . x x             q 4   . . . . x            q 4   x x x x x

    causal, prefix 2            window (1, 1)              packed, causal
    (prefix-LM)                 global_tokens 1            cu_seqlens 0 2 5
        k 0 1 2 3 4                 k 0 1 2 3 4                k 0 1 2 3 4
    q 0   x x . . .             q 0   x x x x x            q 0   x . . . .
    q 1   x x . . .             q 1   x x x . .            q 1   x x . . .
    q 2   x x x . .             q 2   x x x x .            q 2   . . x . .
    q 3   x x x x .             q 3   x . x x x            q 3   . . x x .
    q 4   x x x x x             q 4   x . . x x            q 4   . . x x x
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


def global_token(q_pos: Tensor, k_pos: Tensor, count: int) -> Tensor:
    """The first ``count`` tokens see all and are seen by all."""
    return ((q_pos >= 0) & (q_pos < count)) | (k_pos < count)


def same_chunk(q_pos: Tensor, k_pos: Tensor, size: int) -> Tensor:
    """Chunked local attention: both stand in the same run of ``size`` positions."""
    return q_pos.div(size, rounding_mode="floor") == k_pos.div(size, rounding_mode="floor")


def in_prefix(k_pos: Tensor, length: int) -> Tensor:
    """The first ``length`` keys are seen by every query, those before them included (prefix-LM)."""
    return k_pos < length


def same_image(q_image: Tensor, k_image: Tensor) -> Tensor:
    """Both belong to the same image, by run number; negative numbers are text."""
    return (q_image == k_image) & (q_image >= 0)


def same_segment(q_segment: Tensor, k_segment: Tensor) -> Tensor:
    """Both belong to the same sequence of a packed batch."""
    return q_segment == k_segment


def positions(q_len: int, kv_len: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Bottom-right aligned positions: queries (q_len, 1) and keys (1, kv_len), int64."""
    q_pos = torch.arange(q_len, device=device).unsqueeze(-1) + (kv_len - q_len)
    return q_pos, torch.arange(kv_len, device=device).unsqueeze(0)


def alibi_bias(slopes: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """ALiBi's bias ``-slope * |q_pos - k_pos|``: slopes (heads,) give (heads, q_len, kv_len) (Press et al., 2022)."""
    distance = (q_pos - k_pos).abs().to(slopes.dtype)
    return -slopes[:, None, None] * distance
