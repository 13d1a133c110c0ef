"""Prefill: prompts into the cache, packed row after row, in passes of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atb_modules.attention import KVCacheManager

from .prompt import Prompt, packed_piece

if TYPE_CHECKING:
    from atb_modules.models.decoder import DecoderModel


def chunks(lengths: list[int], size: int | None) -> Iterator[list[int]]:
    """Tokens of each row in every pass: rows are served in order, `size` tokens a pass (None: all in one)."""
    left = list(lengths)
    if size is None:
        if any(left):
            yield left
        return
    while any(left):
        room = size
        counts = []
        for count in left:
            counts.append(min(count, room))
            room -= counts[-1]
        left = [a - b for a, b in zip(left, counts, strict=True)]
        yield counts


def prefill(model: DecoderModel, cache: KVCacheManager, prompts: Sequence[Prompt], chunk_size: int | None) -> Tensor:
    """Computes what is missing of each row's prompt into the cache; logits (rows, vocab_size) of the last
    tokens.

    Row i of the cache holds the first tokens of prompt i already (shared pages), and never all of them.
    """
    done = list(cache.lengths)
    for prompt, begin in zip(prompts, done, strict=True):
        prompt.prepare(begin)
    last: dict[int, Tensor] = {}
    for counts in chunks([len(p.tokens) - d for p, d in zip(prompts, done, strict=True)], chunk_size):
        embeds, positions, deepstack = packed_piece(model, prompts, done, counts)
        hidden = model.run_packed(embeds, cache.step(counts), cache, positions, deepstack)
        end = 0
        for row, count in enumerate(counts):
            end += count
            done[row] += count
            if count and done[row] == len(prompts[row].tokens):
                last[row] = hidden[end - 1]
    return model.head(torch.stack([last[row] for row in range(len(prompts))]))
