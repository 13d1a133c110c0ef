"""M-RoPE positions of a whole call: padded rows, rows that go on in a cache, packed samples."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atb_modules.attention import KVCacheManager
from atb_modules.overlays import Overlays

from .mrope import MRoPEAdvance, VisionBlock, mrope_positions
from .placeholders import Span
from .visuals import Visual


@dataclass(frozen=True, eq=False)
class RowPositions:
    """M-RoPE positions int64 (3, batch, seq), 0 at padding, and each row's shifts (``KVCacheManager``)."""

    position_ids: Tensor
    shifts: list[list[tuple[int, int]]]

    def note(self, cache: KVCacheManager) -> None:
        """Tells the cache where what comes behind its rows stands."""
        for row, shifts in enumerate(self.shifts):
            for begin, shift in shifts:
                cache.shift_positions(row, begin, shift)


def row_positions(
    shape: tuple[int, int],
    spans: Sequence[Span],
    visuals: Sequence[Visual],
    attention_mask: Tensor | None,
    *,
    advance: MRoPEAdvance,
    past: Sequence[tuple[int, int]] | None = None,
) -> RowPositions:
    """Positions of padded rows.

    Args:
        shape: (batch, seq).
        spans, visuals: as ``place_visuals`` has them.
        attention_mask: (batch, seq), 1 = real.
        advance: where text resumes behind a visual.
        past: (tokens, next position) of each row in a cache; None for rows that begin.
    """
    batch, seq = shape
    position_ids = torch.zeros(3, batch, seq, dtype=torch.int64)
    shifts = []
    for row in range(batch):
        real = torch.ones(seq, dtype=torch.bool) if attention_mask is None else (attention_mask[row] != 0).cpu()
        before = real.long().cumsum(0) - real.long()
        mine = sorted((span for span in spans if span.row == row), key=lambda span: span.start)
        blocks = [
            VisionBlock(int(before[span.start]), visuals[span.item].grid, visuals[span.item].time_step) for span in mine
        ]
        positions, ahead = mrope_positions(int(real.sum()), blocks, advance=advance)
        tokens, first = (0, 0) if past is None else past[row]
        position_ids[:, row, real] = positions + first
        shifts.append([(tokens + token, first - tokens + shift) for token, shift in ahead])
    return RowPositions(position_ids, shifts)


def segment_positions(
    cu_seqlens: Tensor, spans: Sequence[Span], visuals: Sequence[Visual], *, advance: MRoPEAdvance
) -> RowPositions:
    """Positions (3, 1, total) of packed samples, each from 0 on."""
    edges = cu_seqlens.tolist()
    parts = []
    for begin, end in itertools.pairwise(edges):
        mine = sorted((span for span in spans if begin <= span.start < end), key=lambda span: span.start)
        blocks = [
            VisionBlock(span.start - begin, visuals[span.item].grid, visuals[span.item].time_step) for span in mine
        ]
        parts.append(mrope_positions(end - begin, blocks, advance=advance)[0])
    return RowPositions(torch.cat(parts, dim=1).unsqueeze(1), [])


def call_positions(
    input_ids: Tensor,
    spans: Sequence[Span],
    visuals: Sequence[Visual],
    attention_mask: Tensor | None,
    overlays: Overlays | None,
    cache: KVCacheManager | None,
    *,
    advance: MRoPEAdvance,
) -> RowPositions:
    """Positions of a call's tokens, as ``row_positions`` or, for packed samples, ``segment_positions`` has them."""
    if overlays is not None and overlays.cu_seqlens_q is not None:
        placed = segment_positions(overlays.cu_seqlens_q, spans, visuals, advance=advance)
    else:
        past = None
        if cache is not None and cache.batch_size:
            past = list(zip(cache.lengths, cache.next_positions, strict=True))
        shape = input_ids.shape[0], input_ids.shape[1]
        placed = row_positions(shape, spans, visuals, attention_mask, advance=advance, past=past)
    return RowPositions(placed.position_ids.to(input_ids.device), placed.shifts)


def given_positions(
    position_ids: Tensor, input_ids: Tensor, attention_mask: Tensor | None, cache: KVCacheManager | None
) -> RowPositions:
    """Positions that a user gives, (3, batch, seq), (batch or 1, seq) or (seq,), as they are; what comes later in a
    cache goes on behind the last token of its row, after the greatest of its axes.
    """
    if cache is None:
        return RowPositions(position_ids, [])
    batch = input_ids.shape[0]
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    rows = position_ids.expand(*position_ids.shape[: -2 if position_ids.dim() == 3 else 0], *input_ids.shape)
    shifts = []
    for row, length in zip(range(batch), cache.lengths or (0,) * batch, strict=True):
        kept = rows[..., row, :][..., real[row] != 0]
        end = length + kept.shape[-1]
        shifts.append([(end, int(kept[..., -1].max()) + 1 - end)] if kept.numel() else [])
    return RowPositions(position_ids, shifts)
