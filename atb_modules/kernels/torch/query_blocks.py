"""Blocks of queries and the slices of keys that they reach: how BLOCKED cuts a call, and adds its gradients up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec

#: Queries of a block: many enough for fast products, few against the keys that a window reaches.
_LEAST, _MOST = 64, 256

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class QueryBlock:
    """Queries [begin, end), and the rising, disjoint ranges [first, last) of keys that some of them reach."""

    begin: int
    end: int
    keys: Ranges

    def take(self, operands: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The block's own parts of q, k, v, mask, sinks and alibi_slopes (the two last are whole)."""
        q, k, v, mask, *vectors = operands
        assert q is not None and k is not None and v is not None
        rows = ((self.begin, self.end),)
        if mask is not None:
            for dim, ranges in self._mask_axes(mask):
                mask = _cut(mask, dim, ranges)
        return (_cut(q, 2, rows), _cut(k, 2, self.keys), _cut(v, 2, self.keys), mask, *vectors)

    def add(self, sums: Sequence[Tensor | None], index: int, part: Tensor) -> None:
        """Add to ``sums[index]`` the gradient of what ``take`` gave at ``index``."""
        whole = sums[index]
        assert whole is not None
        if index == 0:
            _add(whole, 2, ((self.begin, self.end),), part)
        elif index in (1, 2):
            _add(whole, 2, self.keys, part)
        elif index == 3:
            axes = self._mask_axes(whole)
            if len(axes) == 2:
                whole = whole.narrow(whole.dim() - 2, self.begin, self.end - self.begin)
            if axes:
                _add(whole, *axes[-1], part)
            else:
                whole.add_(part)
        else:
            whole.add_(part)

    def _mask_axes(self, mask: Tensor) -> list[tuple[int, Ranges]]:
        """The axes along which the mask is not broadcast, and what the block takes of them."""
        axes: list[tuple[int, Ranges]] = []
        if mask.dim() >= 2 and mask.shape[-2] != 1:
            axes.append((mask.dim() - 2, ((self.begin, self.end),)))
        if mask.dim() >= 1 and mask.shape[-1] != 1:
            axes.append((mask.dim() - 1, self.keys))
        return axes

    def positions(self, device: torch.device) -> Tensor:
        """int32 (number of keys,): where the block's keys stand in the call."""
        parts = [torch.arange(first, last, device=device, dtype=torch.int32) for first, last in self.keys]
        return torch.cat(parts) if parts else torch.empty(0, device=device, dtype=torch.int32)

    def relative(self, ranges: Tensor) -> Tensor:
        """What the block's mask depends on: its rows of ``reach`` from the first key on, and the lengths of its slices.

        Keys that no query of a block reaches lie between its slices alone, so that these say how it looks.
        """
        first, last = (self.keys[0][0], self.keys[-1][0]) if self.keys else (0, 0)
        lengths = torch.tensor([end - begin for begin, end in self.keys], device=ranges.device, dtype=ranges.dtype)
        far_low, far_high, low, high = ranges[..., :4].unbind(-1)
        far = torch.stack([far_low - first, far_high - first]).masked_fill(far_low >= far_high, 0)
        near = torch.stack([low - last, high - last]).masked_fill(low >= high, 0)
        return torch.cat([far.flatten(), near.flatten(), lengths])


def block_size(spec: AttentionSpec, live_blocks: bool) -> int:
    """Queries of a block: those of a row of live blocks, or what suits the width of a window."""
    if live_blocks and spec.block_size is not None:
        return spec.block_size
    widths = [size for size in (spec.left, spec.chunk) if size is not None]
    return min(_MOST, max(_LEAST, min(widths) // 2 // 32 * 32)) if widths else _MOST


def query_blocks(spec: AttentionSpec, overlays: Overlays | None, ranges: Tensor, q_len: int) -> list[QueryBlock]:
    """The blocks of all queries, cut where a segment or a row of live blocks begins.

    ranges: int32 (batch or 1, q_len, 5), what ``reach`` says of the call.
    """
    live_blocks = overlays is not None and overlays.block_mask is not None
    step = block_size(spec, live_blocks)
    cuts = set(range(0, q_len, step)) | {q_len}
    if overlays is not None and overlays.cu_seqlens_q is not None:
        cuts |= set(overlays.cu_seqlens_q.tolist())
    blocks = []
    for begin, end in itertools.pairwise(sorted(cuts)):
        far = _hull(ranges[:, begin:end, 0], ranges[:, begin:end, 1])
        near = _hull(ranges[:, begin:end, 2], ranges[:, begin:end, 3])
        if far[0] < far[1] and near[0] < near[1] and far[1] >= near[0]:
            far, near = (0, 0), (min(far[0], near[0]), max(far[1], near[1]))
        keys = tuple(one for one in (far, near) if one[0] < one[1])
        if overlays is not None and overlays.block_mask is not None and spec.block_size is not None:
            live = overlays.block_mask[:, :, begin // spec.block_size].flatten(0, 1).any(0)
            keys = _live(keys, live, spec.block_size)
        blocks.append(QueryBlock(begin, end, keys))
    return blocks


def visible_keys(block: QueryBlock, ranges: Tensor, overlays: Overlays | None, size: int | None) -> Tensor | None:
    """bool (batch or 1, heads or 1, queries, keys): what each query of the block sees of its keys; None: everything.

    ranges: the block's rows of ``reach``.
    """
    keys = block.positions(ranges.device)
    far_low, far_high, low, high = (ranges[..., i, None] for i in range(4))
    seen = (keys >= low) & (keys < high)
    if bool((far_low < far_high).any()):
        seen = seen | ((keys >= far_low) & (keys < far_high))
    seen = seen.unsqueeze(1)
    if overlays is not None and overlays.block_mask is not None and size is not None:
        seen = seen & overlays.block_mask[:, :, block.begin // size][..., keys // size].unsqueeze(2)
    return None if bool(seen.all()) else seen


def _hull(low: Tensor, high: Tensor) -> tuple[int, int]:
    """The smallest range that covers all that are not empty; (0, 0) where all are."""
    some = low < high
    if not bool(some.any()):
        return 0, 0
    return int(low[some].min()), int(high[some].max())


def _live(keys: Ranges, live: Tensor, size: int) -> Ranges:
    """The parts of ``keys`` that lie in live blocks of ``size`` keys; neighbours are joined."""
    parts: list[tuple[int, int]] = []
    for first, last in keys:
        for block in live[first // size : -(-last // size)].nonzero().flatten().tolist():
            begin = max(first, (first // size + block) * size)
            end = min(last, (first // size + block + 1) * size)
            if parts and parts[-1][1] == begin:
                begin = parts.pop()[0]
            parts.append((begin, end))
    return tuple(parts)


def _cut(whole: Tensor, dim: int, ranges: Ranges) -> Tensor:
    parts = [whole.narrow(dim, first, last - first) for first, last in ranges]
    if not parts:
        return whole.narrow(dim, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _add(whole: Tensor, dim: int, ranges: Ranges, part: Tensor) -> None:
    at = 0
    for first, last in ranges:
        whole.narrow(dim, first, last - first).add_(part.narrow(dim, at, last - first))
        at += last - first
