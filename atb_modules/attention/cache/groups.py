"""Layer groups and sequences: which page holds which block of positions, per set of layers that share a
window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .pool import PagePool


class CachedSequence:
    """One open sequence: its length and, for each layer group, the page of every block.

    `pages[g][b]` is the page of positions [b * page_size, (b + 1) * page_size) in group g, -1 once it slid
    out of the window; `evicted[g]` counts these. `quiet_until` is the length up to which a step needs no
    bookkeeping but the length itself: no page boundary, no eviction, no shared page. `shifts` are pairs
    (first token, shift), rising: from that token on, positions are ahead of the tokens' numbers by `shift`.
    """

    __slots__ = ("evicted", "length", "pages", "quiet_until", "shifts")

    def __init__(self, num_groups: int) -> None:
        self.length = 0
        self.pages: list[list[int]] = [[] for _ in range(num_groups)]
        self.evicted = [0] * num_groups
        self.quiet_until = 0
        self.shifts: list[tuple[int, int]] = []

    def shift_at(self, token: int) -> int:
        """How far the position of a token is ahead of its number."""
        return next((shift for begin, shift in reversed(self.shifts) if begin <= token), 0)

    def shorten(self, length: int) -> None:
        """Forgets all tokens from `length` on; the pages are the book's."""
        self.length = length
        self.shifts = [entry for entry in self.shifts if entry[0] <= length]

    def copy(self) -> CachedSequence:
        twin = CachedSequence(0)
        twin.length = self.length
        twin.pages = [list(pages) for pages in self.pages]
        twin.evicted = list(self.evicted)
        twin.shifts = list(self.shifts)
        return twin


class BlockTable:
    """int32 (rows, max_blocks) on the CPU, changed in place through a numpy view (a tensor index costs 20
    times more).
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._allocate(4)

    def _allocate(self, rows: int) -> None:
        with torch.inference_mode(False):
            self.tensor = torch.full((rows, self.max_blocks), -1, dtype=torch.int32)
        self.array = self.tensor.numpy()

    def __getstate__(self) -> dict[str, Any]:
        return {"max_blocks": self.max_blocks, "tensor": self.tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copied or pickled apart from each other, tensor and view would no longer share their memory.
        self.max_blocks, self.tensor = state["max_blocks"], state["tensor"]
        self.array = self.tensor.numpy()

    def reserve_rows(self, rows: int) -> None:
        old = self.tensor
        if rows > old.shape[0]:
            self._allocate(max(rows, 2 * old.shape[0]))
            self.tensor[: old.shape[0]] = old

    def set_row(self, row: int, pages: Sequence[int]) -> None:
        self.array[row] = -1
        self.array[row, : len(pages)] = pages

    def view(self, rows: int) -> Tensor:
        return self.tensor[:rows]


class LayerGroup:
    """Layers with the same window: one pool of page ids and one block table serve them all."""

    def __init__(self, index: int, window: int | None, num_pages: int, max_blocks: int, page_size: int) -> None:
        self.index = index
        self.window = window
        self.page_size = page_size
        self.layers: list[int] = []
        self.pool = PagePool(num_pages)
        self.table = BlockTable(max_blocks)

    def first_block(self, length: int) -> int:
        """First block that a query at position `length` (and any later one) can still see."""
        if self.window is None or length <= self.window:
            return 0
        return (length - self.window) // self.page_size
