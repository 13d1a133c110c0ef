"""CacheStats: what a paged cache has reserved, uses, shares and wastes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .book import PageBook
from .groups import LayerGroup


@dataclass(frozen=True)
class GroupStats:
    """One layer group (layers with the same window share a block table). Page counts are pages of one
    layer.
    """

    layers: tuple[int, ...]
    window: int | None
    pages_total: int
    pages_used: int
    pages_shared: int
    pages_kept: int
    pages_free: int
    slots_filled: int


@dataclass(frozen=True)
class CacheStats:
    """Counts over all layers: a page here is one page of one layer (keys and values).

    Attributes:
        pages_used: pages that at least one sequence refers to.
        pages_shared: of these, pages that two or more sequences refer to.
        pages_kept: pages held only for prefix sharing; they are given up when the pool needs them.
        pages_free: pages that nobody refers to, `pages_kept` not counted.
        bytes_reserved: bytes of the pool, taken once at construction.
        bytes_used: bytes of the used pages.
        bytes_wasted: of these, bytes of slots that hold no visible token.
        sequences, tokens: open sequences and the sum of their lengths.
    """

    pages_total: int
    pages_used: int
    pages_shared: int
    pages_kept: int
    pages_free: int
    page_bytes: int
    bytes_reserved: int
    bytes_used: int
    bytes_wasted: int
    sequences: int
    tokens: int
    groups: tuple[GroupStats, ...]

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"{self.pages_used}/{self.pages_total} pages used "
            f"({self.pages_shared} shared, {self.pages_kept} kept), "
            f"{self.bytes_used / mib:.1f} of {self.bytes_reserved / mib:.1f} MiB, "
            f"{self.bytes_wasted / mib:.2f} MiB wasted, {self.sequences} sequences, {self.tokens} tokens"
        )


def measure(book: PageBook, page_bytes: int) -> CacheStats:
    """The statistics of `book`, with `page_bytes` for the keys and values of one page of one layer."""
    groups = tuple(_measure_group(book, group) for group in book.groups)

    def over_layers(counts: Iterable[int]) -> int:
        return sum(count * len(group.layers) for count, group in zip(counts, groups, strict=True))

    used = over_layers(group.pages_used for group in groups)
    slots_used = used * book.page_size
    slots_filled = over_layers(group.slots_filled for group in groups)
    total = over_layers(group.pages_total for group in groups)
    return CacheStats(
        pages_total=total,
        pages_used=used,
        pages_shared=over_layers(group.pages_shared for group in groups),
        pages_kept=over_layers(group.pages_kept for group in groups),
        pages_free=over_layers(group.pages_free for group in groups),
        page_bytes=page_bytes,
        bytes_reserved=total * page_bytes,
        bytes_used=used * page_bytes,
        bytes_wasted=(slots_used - slots_filled) * page_bytes // book.page_size,
        sequences=len(book.rows),
        tokens=sum(row.length for row in book.rows),
        groups=groups,
    )


def _measure_group(book: PageBook, group: LayerGroup) -> GroupStats:
    filled: dict[int, int] = {}
    for row in book.rows:
        for block, page in enumerate(row.pages[group.index]):
            if page >= 0:
                held = min(book.page_size, row.length - block * book.page_size)
                filled[page] = max(filled.get(page, 0), held)
    pool = group.pool
    return GroupStats(
        layers=tuple(group.layers),
        window=group.window,
        pages_total=pool.num_pages,
        pages_used=pool.in_use,
        pages_shared=sum(count > 1 for count in pool.refs),
        pages_kept=len(pool.kept),
        pages_free=len(pool.free),
        slots_filled=sum(filled.values()),
    )
