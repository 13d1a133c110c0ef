"""PageBook: the bookkeeping of a paged cache, without any tensor of keys and values.

Every change is planned before it is made, so that a request that cannot be served leaves the book as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from .groups import CachedSequence, LayerGroup
from .pool import OutOfPagesError
from .prefix import PrefixImage, PrefixIndex, PrefixNode

PageCopy = tuple[int, int, int]
"""(layer group, source page, destination page)"""


class PageBook:
    """Sequences over layer groups: who holds which page."""

    def __init__(self, groups: Sequence[LayerGroup], page_size: int, max_seq_len: int) -> None:
        self.groups = tuple(groups)
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.rows: list[CachedSequence] = []
        self.prefixes = PrefixIndex(page_size)
        #: whether pages that slid out of a window are kept, so that their rows can be cropped back
        self.holds_windows = False

    # Pages

    def _take(self, group: LayerGroup) -> int:
        pool = group.pool
        if not pool.free:
            self._give_up(group, pool.oldest_kept())
        return pool.take_free()

    def _give_up(self, group: LayerGroup, page: int) -> None:
        """The prefix index lets go of `page`; without it, what hangs below cannot be used in an unwindowed
        group.
        """
        node_id = group.pool.node_of[page]
        if group.window is None:
            self._drop_nodes(node_id)
            return
        self.prefixes.nodes[node_id].pages[group.index] = -1
        group.pool.unregister(page)
        self._prune(node_id)

    def _drop_nodes(self, node_id: int) -> None:
        for node in self.prefixes.drop(node_id):
            for group, page in zip(self.groups, node.pages, strict=True):
                if page >= 0:
                    group.pool.unregister(page)

    def _prune(self, node_id: int) -> None:
        """Removes a node that holds no page and leads nowhere, and then its parents of which the same is
        true.
        """
        while True:
            node = self.prefixes.nodes[node_id]
            parent = node.key[0]
            if node.children or any(page >= 0 for page in node.pages):
                return
            self.prefixes.drop(node_id)
            if not isinstance(parent, int):
                return
            node_id = parent

    def _release(self, row: CachedSequence, group: LayerGroup, first: int = 0) -> None:
        """Lets go of the blocks from `first` on, deepest first: a prefix is given up from its end."""
        pages = row.pages[group.index]
        for page in reversed(pages[first:]):
            if page >= 0:
                group.pool.release(page)
        del pages[first:]

    # Sequences

    def open(self, count: int) -> None:
        for row in self.rows:
            for group in self.groups:
                self._release(row, group)
        self.rows = []
        self.join(count)

    def join(self, count: int) -> None:
        """Opens ``count`` empty sequences after those that are open."""
        self.append_rows([CachedSequence(len(self.groups)) for _ in range(count)])

    def append_rows(self, new: Sequence[CachedSequence]) -> None:
        begin = len(self.rows)
        self.rows.extend(new)
        for group in self.groups:
            group.table.reserve_rows(len(self.rows))
            for offset, row in enumerate(new):
                group.table.set_row(begin + offset, row.pages[group.index])

    def share(self, row: CachedSequence) -> CachedSequence:
        """A second sequence on the same pages; the next write into a shared last page copies that page."""
        for group in self.groups:
            for page in row.pages[group.index]:
                if page >= 0:
                    group.pool.share(page)
        row.quiet_until = 0
        return row.copy()

    def arrange(self, order: Sequence[int]) -> None:
        """The rows become `order`: rows may be left out (their pages are released) and may come several
        times.
        """
        old = self.rows
        taken: set[int] = set()
        new: list[CachedSequence] = []
        for index in order:
            new.append(self.share(old[index]) if index in taken else old[index])
            taken.add(index)
        for index, row in enumerate(old):
            if index not in taken:
                for group in self.groups:
                    self._release(row, group)
        self.rows = new
        for group in self.groups:
            group.table.reserve_rows(len(new))
            group.table.array[: len(new)] = group.table.array[list(order)]

    def first_length(self, row: CachedSequence) -> int:
        """Shortest non-zero length that `row` can be cropped to: later windows have already let go of
        earlier pages.
        """
        floors = (
            evicted * self.page_size + group.window
            for group, evicted in zip(self.groups, row.evicted, strict=True)
            if group.window is not None and evicted > 0
        )
        return max(floors, default=0)

    def crop(self, index: int, keep: int) -> None:
        row = self.rows[index]
        blocks = -(-keep // self.page_size)
        for group in self.groups:
            self._release(row, group, blocks)
            group.table.array[index, blocks:] = -1
            if keep == 0:
                row.evicted[group.index] = 0
        row.shorten(keep)
        row.quiet_until = 0

    # Steps

    def reserve(self, query_lengths: Sequence[int]) -> list[PageCopy]:
        """Pages for the new tokens of every row, and the rows' new lengths. Returns the page copies to make.

        Pages that no query of this step or of a later one can see are let go first. All or nothing.
        """
        for group in self.groups:
            self._check_room(group, query_lengths)
        copies: list[PageCopy] = []
        for group in self.groups:
            for index, count in enumerate(query_lengths):
                if count and not self.holds_windows:
                    self._evict(group, index)
            for index, count in enumerate(query_lengths):
                if count:
                    self._extend(group, index, count, copies)
        for row, count in zip(self.rows, query_lengths, strict=True):
            if count:
                row.length += count
                row.quiet_until = self._quiet_until(row)
        return copies

    def _check_room(self, group: LayerGroup, query_lengths: Sequence[int]) -> None:
        pool = group.pool
        size = self.page_size
        refs: dict[int, int] = {}
        needed = freed = 0
        for row, count in zip(self.rows, query_lengths, strict=True):
            if not count:
                continue
            pages = row.pages[group.index]
            first = 0 if self.holds_windows else min(group.first_block(row.length), len(pages))
            for page in pages[row.evicted[group.index] : first]:
                refs[page] = refs.get(page, pool.refs[page]) - 1
                freed += refs[page] == 0
            needed += max(0, -(-(row.length + count) // size) - len(pages))
            if row.length % size:
                page = pages[-1]
                left = refs.get(page, pool.refs[page])
                if left > 1:
                    needed += 1
                    refs[page] = left - 1
        if needed > pool.available + freed:
            raise OutOfPagesError(
                needed, pool.available + freed, pool.num_pages, f"a step of {sum(query_lengths)} tokens"
            )

    def let_go(self) -> None:
        """Releases the pages that slid out of a window, in all rows."""
        for group in self.groups:
            for index in range(len(self.rows)):
                self._evict(group, index)

    def _evict(self, group: LayerGroup, index: int) -> None:
        row = self.rows[index]
        pages = row.pages[group.index]
        begin = row.evicted[group.index]
        first = min(group.first_block(row.length), len(pages))
        if first > begin:
            for block in range(begin, first):
                group.pool.release(pages[block])
                pages[block] = -1
            group.table.array[index, begin:first] = -1
            row.evicted[group.index] = first

    def _extend(self, group: LayerGroup, index: int, count: int, copies: list[PageCopy]) -> None:
        row = self.rows[index]
        pages = row.pages[group.index]
        pool = group.pool
        begin = len(pages)
        if row.length % self.page_size:
            page = pages[-1]
            if pool.refs[page] > 1:
                pages[-1] = self._take(group)
                copies.append((group.index, page, pages[-1]))
                pool.release(page)
                begin -= 1
            elif page in pool.node_of:
                # Its tail is about to be overwritten, so it no longer holds what it was registered for.
                self._drop_nodes(pool.node_of[page])
        for _ in range(-(-(row.length + count) // self.page_size) - len(pages)):
            pages.append(self._take(group))
        group.table.array[index, begin : len(pages)] = pages[begin:]

    def _quiet_until(self, row: CachedSequence) -> int:
        until = min(self.max_seq_len, -(-row.length // self.page_size) * self.page_size)
        for group, evicted in zip(self.groups, row.evicted, strict=True):
            if group.window is not None:
                until = min(until, group.window + (evicted + 1) * self.page_size)
        return until

    # Prefixes

    def usable(self, nodes: list[PrefixNode]) -> list[PrefixNode]:
        """The longest run of `nodes` from the start after which every layer group still has the pages it can
        see.
        """
        for count in range(len(nodes), 0, -1):
            if all(
                node.pages[group.index] >= 0
                for group in self.groups
                for node in nodes[group.first_block(count * self.page_size) : count]
            ):
                return nodes[:count]
        return []

    def sequence_on(self, nodes: Sequence[PrefixNode]) -> CachedSequence:
        """A sequence that begins on the pages of `nodes`."""
        row = CachedSequence(len(self.groups))
        row.length = len(nodes) * self.page_size
        for group in self.groups:
            first = group.first_block(row.length)
            pages = [-1] * first + [node.pages[group.index] for node in nodes[first:]]
            for page in pages[first:]:
                group.pool.share(page)
            row.pages[group.index] = pages
            row.evicted[group.index] = first
        return row

    def register(
        self,
        row: CachedSequence,
        tokens: Sequence[int],
        salt: str | None,
        adapter: str | None,
        images: Sequence[PrefixImage],
    ) -> int:
        """Registers the full pages of `tokens`; returns how many pages are registered from the start."""
        parent: int | tuple[str | None, str | None] = (salt, adapter)
        for block, (page_tokens, page_images) in enumerate(self.prefixes.keys(tokens, images)):
            node_id = self.prefixes.child(parent, page_tokens, page_images, len(self.groups))
            node = self.prefixes.nodes[node_id]
            for group in self.groups:
                page = row.pages[group.index][block]
                if node.pages[group.index] < 0 <= page and page not in group.pool.node_of:
                    node.pages[group.index] = page
                    group.pool.register(page, node_id)
            if any(group.window is None and node.pages[group.index] < 0 for group in self.groups):
                # Its page already stands for the same tokens under another salt: one page, one node.
                self._drop_nodes(node_id)
                return block
            parent = node_id
        return len(tokens) // self.page_size
