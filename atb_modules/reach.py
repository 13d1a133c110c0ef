"""What each query reaches, in O(q_len): at most two ranges of keys, which is all that a spec and its overlays can say.

Kernels that follow the structure (and never make a q_len by kv_len mask) read this; it is tested against
``AttentionSpec.dense_mask``, which is written from the predicates instead. Live blocks are left to the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec


def reach(
    spec: AttentionSpec,
    q_len: int,
    kv_len: int,
    overlays: Overlays | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """int32 (batch or 1, q_len, 5): a query sees the keys [row 0, row 1) and [row 2, row 3); row 4 is its position.

    The first range lies before the second or is empty. Positions count from the first key of the call, so that a
    query and a key are as far apart as their positions.
    """
    at = spec.positions(q_len, kv_len, device, overlays)[0].squeeze(-1)
    if overlays is not None and overlays.cu_seqlens_q is not None:
        _, begin, end, _ = overlays.segments(q_len, kv_len)
        at = at + begin
    else:
        begin, end = torch.zeros_like(at), torch.full_like(at, kv_len)
    low, high = begin, end
    if spec.left is not None:
        low = torch.maximum(low, at - spec.left)
    if spec.right is not None:
        high = torch.minimum(high, at + spec.right + 1)
    if spec.chunk is not None:
        first = begin + (at - begin).div(spec.chunk, rounding_mode="floor") * spec.chunk
        low, high = torch.maximum(low, first), torch.minimum(high, first + spec.chunk)
    far_high = begin
    if spec.global_tokens:
        reached = torch.minimum(begin + spec.global_tokens, end)
        is_global = (at >= begin) & (at < begin + spec.global_tokens)
        low, high = torch.where(is_global, begin, low), torch.where(is_global, end, high)
        far_high = torch.minimum(reached, at + 1) if spec.is_causal else reached
        if spec.is_causal:
            high = torch.minimum(high, at + 1)
    if spec.prefix:
        far_high = torch.maximum(far_high, torch.minimum(begin + spec.prefix, end))
    low, high, far_high, begin, end, at = (t.unsqueeze(0) for t in (low, high, far_high, begin, end, at))
    if overlays is not None and overlays.image_ids is not None:
        first, last = _image_of(overlays, at, begin, end)
        inside = first < last
        empty = low >= high
        low = torch.where(inside, torch.where(empty, first, torch.minimum(low, first)), low)
        high = torch.where(inside, torch.where(empty, last, torch.maximum(high, last)), high)
    # Ranges that touch become one, and a single range is always the second.
    low, high = low.clamp(min=0), high.clamp(min=0)
    begin, far_high = begin.expand_as(low), far_high.clamp(min=0).expand_as(low)
    has_far, has_near = begin < far_high, low < high
    joined = has_far & (~has_near | (low <= far_high))
    high = torch.where(joined, torch.where(has_near, torch.maximum(high, far_high), far_high), high)
    low = torch.where(joined, torch.where(has_near, torch.minimum(low, begin), begin), low)
    alone = joined | ~has_far
    far_low, far_high = begin.masked_fill(alone, 0), far_high.masked_fill(alone, 0)
    empty = low >= high
    low, high = low.masked_fill(empty, 0), high.masked_fill(empty, 0)
    return torch.stack([far_low, far_high, low, high, at.expand_as(low)], dim=-1).int()


def seen_pairs(spec: AttentionSpec, overlays: Overlays | None, sizes: tuple[int, int, int, int]) -> float | None:
    """About how many query-key pairs a call of (batch, num_heads, q_len, kv_len) leaves visible, for predicted costs.

    None where causality and a window alone decide, or where the data cannot be looked at (while tracing). Images count
    as text.
    """
    if (overlays is None and not spec.has_overlays) or torch.compiler.is_compiling():
        return None
    batch, num_heads, q_len, kv_len = sizes
    lengths = [(q_len, kv_len)]
    live = 1.0
    if overlays is not None:
        if overlays.device is not None and overlays.device.type == "meta":
            return None
        if overlays.cu_seqlens_q is not None and overlays.cu_seqlens_k is not None:
            lengths = list(
                zip(overlays.cu_seqlens_q.diff().tolist(), overlays.cu_seqlens_k.diff().tolist(), strict=True)
            )
        if overlays.block_mask is not None and overlays.block_mask.numel():
            live = float(overlays.block_mask.float().mean())
    return batch * num_heads * live * sum(_pairs(spec, queries, keys) for queries, keys in lengths)


def _pairs(spec: AttentionSpec, queries: int, keys: int) -> float:
    """Keys that a query sees on average, tiles of 64 at the edges included, times the queries."""
    seen = float(keys)
    if spec.is_causal:
        seen = max(keys - 0.5 * queries, 0.5 * keys)
    if spec.left is not None:
        seen = min(seen, spec.left + 1.0 + (keys if spec.right is None else spec.right) + 64.0)
    if spec.chunk is not None:
        seen = min(seen, spec.chunk * (0.5 if spec.is_causal else 1.0) + 64.0)
    return queries * min(float(keys), seen + max(spec.global_tokens, spec.prefix))


def _image_of(overlays: Overlays, at: Tensor, begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """The keys [first, last) of the image that each query stands in, within its segment; (0, 0) for text."""
    images = overlays.images()
    kv_len = images.shape[1]
    keys = torch.arange(kv_len, device=images.device).expand_as(images)
    changed = torch.ones_like(images, dtype=torch.bool)
    changed[:, 1:] = images[:, 1:] != images[:, :-1]
    starts = keys.masked_fill(~changed, 0).cummax(-1).values
    last_of_run = torch.ones_like(changed)
    last_of_run[:, :-1] = changed[:, 1:]
    ends = (keys + 1).masked_fill(~last_of_run, kv_len).flip(-1).cummin(-1).values.flip(-1)
    outside = (at < begin) | (at >= end)
    inside = at.clamp(0, kv_len - 1).expand(images.shape[0], -1)
    first, last = torch.maximum(starts.gather(1, inside), begin), torch.minimum(ends.gather(1, inside), end)
    text = outside | (images.gather(1, inside) < 0)
    return first.masked_fill(text, 0), last.masked_fill(text, 0)
