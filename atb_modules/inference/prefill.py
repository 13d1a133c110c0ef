"""Prefill: prompts into the cache, packed row after row, in passes of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atb_modules.attention import KVCacheManager

from .prompt import Prompt, packed_piece

if TYPE_CHECKING:
    from atb_modules.models.decoder import DecoderModel


def next_counts(prompts: Sequence[Prompt], done: Sequence[int], size: int | None) -> list[int]:
    """Tokens of each row in the next pass: rows are served in order, ``size`` tokens a pass (None: all in one)."""
    room = size
    counts = []
    for prompt, begin in zip(prompts, done, strict=True):
        left = len(prompt.tokens) - begin
        count = left if room is None else min(left, room)
        if 0 < count < left:
            count = min(left, prompt.fitted(begin, count))
        counts.append(count)
        room = None if room is None else max(0, room - count)
    return counts


def prefill(model: DecoderModel, cache: KVCacheManager, prompts: Sequence[Prompt], chunk_size: int | None) -> Tensor:
    """Computes what is missing of each row's prompt into the cache; logits (rows, vocab_size) of the last
    tokens.

    Row i of the cache holds the first tokens of prompt i already (shared pages), and never all of them.
    """
    done = list(cache.lengths)
    for prompt, begin in zip(prompts, done, strict=True):
        prompt.prepare(begin, cache)
    last: dict[int, Tensor] = {}
    while any(counts := next_counts(prompts, done, chunk_size)):
        piece = packed_piece(model, prompts, done, counts)
        step = cache.step(counts, image_ids=piece.image_ids)
        hidden = model.run_packed(piece.embeds, step, cache, piece.position_ids, piece.deepstack)
        end = 0
        for row, count in enumerate(counts):
            end += count
            done[row] += count
            if count and done[row] == len(prompts[row].tokens):
                last[row] = hidden[end - 1]
    return model.head(torch.stack([last[row] for row in range(len(prompts))]))
