"""Static pages: every row has all of its pages from the beginning, so that block tables and shapes never change.

A step then changes nothing but lengths, and these can be a tensor: ``next_slots`` is all that a compiled decode step
needs beside the table. What is given up is the sharing of pages and the eviction behind a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

from atb_modules.checks import check_int, check_tensor

from .book import PageBook, PageCopy
from .groups import CachedSequence
from .pool import OutOfPagesError


class CachePolicy(StrEnum):
    """When a sequence of a cache gets its pages, and when it gives them back."""

    PAGED = "paged"  # one by one as tokens come; in layers with a window, back as soon as no query can see them
    STATIC = "static"  # all when it is opened, back when it is closed


def next_slots(block_table: Tensor, lengths: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Where the next token of every row goes, and the rows' lengths with it; traceable, nothing but tensors.

    Args:
        block_table: int32 (batch, max_blocks) of static pages.
        lengths: int32 (batch,), tokens that each row holds.
        page_size: tokens a page.

    Returns:
        slots int64 (batch,), and lengths int32 (batch,) as attention over the pages wants them.

    Raises:
        ValueError, TypeError: for what does not fit. A row that is full already is the caller's to stop: values are
            not looked at.
    """
    check_int("page_size", page_size)
    for name, tensor, dims in (("block_table", block_table, 2), ("lengths", lengths, 1)):
        check_tensor(name, tensor)
        if tensor.dtype != torch.int32 or tensor.dim() != dims or tensor.shape[0] != lengths.shape[0]:
            shape = "(batch, max_blocks)" if dims == 2 else "(batch,)"
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; allowed: torch.int32 {shape}")
    block = (lengths // page_size).long()
    page = block_table.gather(1, block[:, None])[:, 0].long()
    return page * page_size + lengths % page_size, lengths + 1


class StaticBook(PageBook):
    """A book in which rows keep their pages while they are open."""

    def append_rows(self, new: Sequence[CachedSequence]) -> None:
        for row in new:
            row.quiet_until = self.max_seq_len
            for group in self.groups:
                row.pages[group.index] = [self._take(group) for _ in range(group.table.max_blocks)]
        super().append_rows(new)

    def open(self, count: int) -> None:
        self._check_fits(count, len(self.rows))
        super().open(count)

    def _check_fits(self, count: int, closed: int) -> None:
        """OutOfPagesError unless there are pages for ``count`` rows, once ``closed`` others have given theirs."""
        for group in self.groups:
            needed, pool = count * group.table.max_blocks, group.pool
            available = pool.available + closed * group.table.max_blocks
            if needed > available:
                raise OutOfPagesError(needed, available, pool.num_pages, f"{count} rows of {self.max_seq_len} tokens")

    def join(self, count: int) -> None:
        self._check_fits(count, 0)
        super().join(count)

    def share(self, row: CachedSequence) -> CachedSequence:
        raise ValueError("the cache's policy is 'static', and its rows share no pages; allowed with policy 'paged'")

    def sequence_on(self, nodes: Sequence[object]) -> CachedSequence:
        raise ValueError("the cache's policy is 'static', and its rows join no prefix; allowed with policy 'paged'")

    def register(self, *_: object) -> int:
        raise ValueError("the cache's policy is 'static', and it keeps no prefix; allowed with policy 'paged'")

    def crop(self, index: int, keep: int) -> None:
        self.rows[index].shorten(keep)

    def reserve(self, query_lengths: Sequence[int]) -> list[PageCopy]:
        for row, count in zip(self.rows, query_lengths, strict=True):
            row.length += count
        return []

    def let_go(self) -> None:
        """Nothing slides out."""
