"""Attention that follows its structure in plain PyTorch: BLOCKED, a call of SDPA (or EAGER) a block of queries.

Each block reads the slice of keys that some query of it reaches, under a mask of that size alone: work and memory are
those of the structure, whatever it is, and the backward is that of the calls.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.torch.attention import attention_eager, attention_sdpa, sdpa_reasons
from atb_modules.kernels.traits import AttentionTraits
from atb_modules.overlays import Overlays
from atb_modules.reach import reach
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import AttentionStrategy

#: Queries of a block: many enough for fast products, few against the keys that a window reaches.
_LEAST, _MOST = 64, 512


@dataclass(frozen=True)
class _Block:
    """Queries [begin, end), which reach keys [far_begin, far_end) and [near_begin, near_end)."""

    begin: int
    end: int
    far_begin: int
    far_end: int
    near_begin: int
    near_end: int

    def take(self, keys: Tensor, dim: int) -> Tensor:
        """What the block needs of a tensor with the keys along ``dim``."""
        near = keys.narrow(dim, self.near_begin, self.near_end - self.near_begin)
        if self.far_begin == self.far_end:
            return near
        return torch.cat([keys.narrow(dim, self.far_begin, self.far_end - self.far_begin), near], dim)


def attention_blocked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    overlays: Overlays | None = None,
    dropout_p: float = 0.0,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """SDPA a block where it can serve, else EAGER; (out, lse or None)."""
    q_len, kv_len = q.shape[2], k.shape[2]
    ranges = reach(spec, q_len, kv_len, overlays, q.device)
    bare = AttentionSpec(scale=spec.scale, softcap=spec.softcap)
    plain = sinks is None and spec.softcap is None and not need_lse
    keys = torch.arange(kv_len, device=q.device, dtype=torch.int32)
    outs, lses = [], []
    for block in _blocks(spec, overlays, ranges, q_len):
        rows = slice(block.begin, block.end)
        at = block.take(keys, 0)
        visible = _seen(ranges[:, rows], at, overlays, spec.block_size, rows)
        part = _block_mask(visible, mask, alibi_slopes, ranges[:, rows, 4:], at, rows, (q_len, kv_len), block)
        dense = attention_sdpa if plain else attention_eager
        options: dict = {"mask": part, "sinks": sinks, "dropout_p": dropout_p, "need_lse": need_lse}
        out, lse = dense(q[:, :, rows], block.take(k, 2), block.take(v, 2), bare, **options)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat([one for one in lses if one is not None], 2) if need_lse else None


def _blocks(spec: AttentionSpec, overlays: Overlays | None, ranges: Tensor, q_len: int) -> list[_Block]:
    """The blocks of queries, cut where a segment or a row of live blocks begins."""
    step = _MOST
    if spec.left is not None or spec.chunk is not None:
        width = min(size for size in (spec.left, spec.chunk) if size is not None)
        step = min(_MOST, max(_LEAST, width // 4 // 32 * 32))
    cuts = set(range(0, q_len, step)) | {q_len}
    if overlays is not None and overlays.cu_seqlens_q is not None:
        cuts |= set(overlays.cu_seqlens_q.tolist())
    if overlays is not None and overlays.block_mask is not None and spec.block_size is not None:
        cuts = set(range(0, q_len, spec.block_size)) | {q_len}
    edges = sorted(cuts)
    blocks = []
    for begin, end in itertools.pairwise(edges):
        far_begin, far_end = _hull(ranges[:, begin:end, 0], ranges[:, begin:end, 1])
        near_begin, near_end = _hull(ranges[:, begin:end, 2], ranges[:, begin:end, 3])
        if far_begin < far_end and far_end >= near_begin:
            near_begin, near_end = min(far_begin, near_begin), max(far_end, near_end)
            far_begin = far_end = 0
        blocks.append(_Block(begin, end, far_begin, far_end, near_begin, near_end))
    return blocks


def _hull(low: Tensor, high: Tensor) -> tuple[int, int]:
    """The smallest range that covers all that are not empty; (0, 0) where all are."""
    some = low < high
    if not bool(some.any()):
        return 0, 0
    return int(low[some].min()), int(high[some].max())


def _seen(ranges: Tensor, keys: Tensor, overlays: Overlays | None, size: int | None, rows: slice) -> Tensor:
    """bool (batch or 1, heads or 1, queries, keys): what each query of the block sees of its keys."""
    far_low, far_high, low, high = (ranges[..., i, None] for i in range(4))
    seen = (keys >= low) & (keys < high)
    if bool((far_low < far_high).any()):
        seen = seen | ((keys >= far_low) & (keys < far_high))
    seen = seen.unsqueeze(1)
    if overlays is not None and overlays.block_mask is not None and size is not None:
        live = overlays.block_mask[:, :, rows.start // size]
        seen = seen & live[..., keys // size].unsqueeze(2)
    return seen


def _block_mask(
    visible: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
    positions: Tensor,
    keys: Tensor,
    rows: slice,
    lengths: tuple[int, int],
    block: _Block,
) -> Tensor | None:
    """The mask of one block: what is visible, the caller's mask and ALiBi's bias, None where nothing is hidden."""
    bias = None
    if slopes is not None:
        compute = torch.promote_types(slopes.dtype, torch.float32)
        distance = (positions - keys).abs().to(compute).unsqueeze(1)
        bias = -slopes.to(compute)[:, None, None] * distance
    if mask is not None:
        full = mask.expand(*mask.shape[:-2], *lengths) if mask.dim() >= 2 else mask.expand(*lengths)
        part = block.take(full[..., rows, :], full.dim() - 1)
        if part.dtype == torch.bool:
            visible = visible & part
        else:
            bias = part if bias is None else bias + part
    if bias is None:
        return None if bool(visible.all()) else visible
    return bias.masked_fill(~visible, float("-inf"))


def _reasons(spec: AttentionSpec, traits: AttentionTraits) -> tuple[str, ...]:
    if torch.compiler.is_compiling():
        return ("reads the ranges of keys as Python numbers, which cannot be traced",)
    if traits.dropout and sdpa_reasons(spec, traits):
        return tuple(reason for reason in sdpa_reasons(spec, traits) if "dropout" in reason)
    return ()


def _cost(spec: AttentionSpec, traits: AttentionTraits) -> Cost:
    pairs = traits.pairs if traits.seen is None else traits.seen
    if traits.seen is None and spec.left is not None:
        width = spec.left + 1.0 + (0.0 if spec.is_causal else traits.kv_len if spec.right is None else spec.right)
        pairs *= min(1.0, (width * 1.25 + _LEAST) / max(traits.kv_len, 1))
    blocks = traits.q_len / _MOST + traits.segments + 1
    # each block builds its mask, and reads it once for each head
    extra = (8.0 + traits.num_heads) * pairs / max(traits.num_heads, 1)
    return Cost(operations=2.0 * pairs * (traits.head_dim + traits.value_dim), bytes=extra, calls=25.0 * blocks)


register(Kernel("attention", AttentionStrategy.BLOCKED, attention_blocked, _reasons, _cost, transformable=False))
