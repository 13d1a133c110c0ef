"""KVCacheManager: keys and values of all layers in pages from a pool that is reserved once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atb_modules.checks import check_bool, check_int
from atb_modules.kernels.pages import KVQuantization, Pages, copy_page, page_bytes
from atb_modules.strategies import parse_enum

from .book import PageBook
from .contents import PageContents
from .features import FeatureStore
from .groups import LayerGroup
from .layer_steps import LayerCalls, LayerSteps
from .pool import OutOfPagesError, PagePool
from .sharing import PrefixHit, PrefixSharing
from .sizes import MAX_LAYERS, check_books, check_rows, reserve_pages
from .static import CachePolicy, StaticBook
from .stats import CacheStats, measure
from .step import CacheStep, StepBuilder, refuse_layer, refuse_step
from .validation import as_image_ids, as_lengths, as_row, as_rows, check_count, check_dtype, layer_windows

__all__ = ["KVCacheManager", "OutOfPagesError", "PrefixHit"]


class KVCacheManager(PrefixSharing, PageContents, LayerCalls):
    """Paged key/value cache for the layers of one model.

    Pages of `page_size` tokens are taken one at a time from a pool that is allocated once, so that appending
    never moves or copies what is there. `begin(batch_size)` opens that many empty sequences (and closes
    those that were open); a step (`step`) reserves room for the new tokens of every row, the layers `append`
    their keys and values, attention reads `pages` through the step's block table. Rows are numbered from 0
    in the order in which they were opened; when a row leaves, later rows move down by one, as in a list.

    Layers with the same window share a block table (a layer group); in a group with a window, pages that no
    later query can see go back to the pool at the next step. Prefix sharing is explicit: `register_prefix`
    after a prompt was computed, `join_prefix` for a new one. Not thread-safe.

    Args:
        max_seq_len: most tokens in one sequence.
        page_size: tokens a page.
        num_layers: layers that store keys and values.
        num_heads: query heads; only the default of `num_kv_heads`.
        head_dim: channels a head.
        dtype: of keys and values: float32, bfloat16, float16 (float64 for tests).
        num_kv_heads: heads of keys and values, default `num_heads`.
        num_pages: pages a layer, default enough for one sequence of `max_seq_len`.
        window: left window: how many earlier keys a query sees, itself not counted. None (all), one int for
            every layer, or one entry a layer. A Hugging Face `sliding_window=W` is W - 1 here.
        quantization: "none", or "int8": codes with a float32 scale for each page and head, `QuantizedPages`.
        policy: "paged", or "static": every sequence has the pages of `max_seq_len` tokens while it is open, so that
            block tables do not change and a compiled step needs tensors alone (`next_slots`); rows share nothing, and
            windows let go of nothing.
        device: of the pool.

    Raises:
        ValueError, TypeError: an argument out of range or of the wrong kind, or sizes that ask for more memory than
            there is.
    """

    def __init__(
        self,
        max_seq_len: int,
        page_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        num_kv_heads: int | None = None,
        num_pages: int | None = None,
        window: int | Sequence[int | None] | None = None,
        quantization: KVQuantization | str = KVQuantization.NONE,
        policy: CachePolicy | str = CachePolicy.PAGED,
        device: torch.device | str | None = None,
    ) -> None:
        self.max_seq_len = check_count("max_seq_len", max_seq_len)
        self.page_size = check_count("page_size", page_size)
        self.num_layers = check_count("num_layers", num_layers, most=MAX_LAYERS)
        self.num_heads = check_count("num_heads", num_heads)
        self.head_dim = check_count("head_dim", head_dim)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else check_count("num_kv_heads", num_kv_heads)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
        self._max_blocks = max_blocks = -(-self.max_seq_len // self.page_size)
        self.num_pages = max_blocks if num_pages is None else check_count("num_pages", num_pages)
        self.dtype = check_dtype(dtype)
        self.policy = parse_enum(CachePolicy, policy, "policy")
        self.quantization = parse_enum(KVQuantization, quantization, "quantization")
        self.windows = layer_windows(window, self.num_layers)
        self._pages = self._reserved(self.num_pages, device)
        groups: dict[int | None, LayerGroup] = {}
        for layer, layer_window in enumerate(self.windows):
            group = groups.get(layer_window)
            if group is None:
                group = LayerGroup(len(groups), layer_window, self.num_pages, max_blocks, self.page_size)
                groups[layer_window] = group
            group.layers.append(layer)
        self._layer_groups = tuple(groups[layer_window].index for layer_window in self.windows)
        book = StaticBook if self.policy is CachePolicy.STATIC else PageBook
        self._book = book(list(groups.values()), self.page_size, self.max_seq_len)
        self.device = self._pages[0][0].device
        self._steps = StepBuilder(self._book, self._layer_groups, self.device)
        self._registered_layers = 0
        self._newest: CacheStep | None = None
        self.layer_steps = LayerSteps(self.num_layers)
        #: what encoders made of the images in prompts, by their content
        self.features = FeatureStore()

    def _reserved(self, num_pages: int, device: torch.device | str | None) -> list[tuple[Pages, Pages]]:
        sizes = self.num_kv_heads, self.page_size, self.head_dim
        pages = reserve_pages(self.num_layers, num_pages, *sizes, self.dtype, device, self.quantization)
        check_books(self.num_layers, len(set(self.windows)), self.max_seq_len, self.page_size, num_pages)
        return pages

    def __repr__(self) -> str:
        return (
            f"KVCacheManager(max_seq_len={self.max_seq_len}, page_size={self.page_size}, "
            f"num_layers={self.num_layers}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"dtype={self.dtype}, num_pages={self.num_pages}, quantization={self.quantization.value!r}, "
            f"policy={self.policy.value!r}, sequences={self.batch_size})"
        )

    # Sequences

    @property
    def batch_size(self) -> int:
        """Open sequences."""
        return len(self._book.rows)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each open sequence."""
        return tuple(row.length for row in self._book.rows)

    @property
    def next_positions(self) -> tuple[int, ...]:
        """Where the next token of each open sequence stands: at its number, or ahead of it (`shift_positions`)."""
        return tuple(row.length + row.shift_at(row.length) for row in self._book.rows)

    @property
    def page_dtype(self) -> torch.dtype:
        """What the pages hold: `dtype`, or torch.int8 codes."""
        return self._pages[0][0].dtype

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """For each layer, the number of its group: layers of one window share slots and block tables."""
        return self._layer_groups

    def begin(self, batch_size: int) -> None:
        """Opens `batch_size` empty sequences; those that were open are closed. Registered prefixes stay.

        A cache takes 65,536 sequences at most.
        """
        count = check_count("batch_size", batch_size, least=0)
        self._check_rows("batch_size", count, 0)
        self._changed()
        self._book.open(count)

    def _check_rows(self, name: str, count: int, open_rows: int) -> None:
        check_rows(name, count, open_rows, self._max_blocks, len(self._book.groups))

    def reset(self) -> None:
        """Closes all sequences and forgets all registered prefixes and features of images."""
        self.begin(0)
        for group in self._book.groups:
            for page in list(group.pool.node_of):
                group.pool.unregister(page)
        self._book.prefixes.clear()
        self.features.clear()

    def grow(self, num_pages: int) -> bool:
        """Reserves a pool of `num_pages` pages a layer in place of a smaller one, while no page holds anything.

        Returns:
            Whether the pool has that many pages now. Pages in use, and those kept for a prefix, never move.
        """
        if check_count("num_pages", num_pages) <= self.num_pages:
            return True
        if any(len(group.pool.free) < self.num_pages for group in self._book.groups):
            return False
        self._changed()
        self._pages = []  # the old pool goes before the new one comes
        try:
            self._pages = self._reserved(num_pages, self.device)
        except BaseException:
            self._pages = self._reserved(self.num_pages, self.device)
            raise
        self.num_pages = num_pages
        for group in self._book.groups:
            group.pool = PagePool(num_pages)
        return True

    def join(self, count: int = 1) -> list[int]:
        """Opens `count` empty sequences after those that are open; returns their rows."""
        count = check_count("count", count)
        begin = self.batch_size
        self._check_rows("count", count, begin)
        self._changed()
        self._book.join(count)
        return list(range(begin, begin + count))

    def leave(self, rows: int | Sequence[int]) -> None:
        """Closes `rows` and releases their pages; later rows move down."""
        gone = set(as_rows("rows", rows, self.batch_size))
        self._changed()
        self._book.arrange([index for index in range(self.batch_size) if index not in gone])

    def fork(self, row: int, count: int = 1) -> list[int]:
        """Opens `count` sequences with the content of `row`, sharing its pages; returns their rows.

        Only a last page that is not full is ever copied, when one of those that share it is written to.
        """
        row = as_row("row", row, self.batch_size)
        count = check_count("count", count)
        begin = self.batch_size
        self._check_rows("count", count, begin)
        self._changed()
        self._book.append_rows([self._book.share(self._book.rows[row]) for _ in range(count)])
        return list(range(begin, begin + count))

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was: a beam search step. Rows may repeat or be left out."""
        order = as_rows("rows", rows, self.batch_size, unique=False)
        self._check_rows("the length of rows", len(order), 0)
        self._changed()
        self._book.arrange(order)

    def crop(self, keep: int | Sequence[int], rows: int | Sequence[int] | None = None) -> None:
        """Keeps at most the first `keep` tokens of `rows` (default all; one number, or one a row).

        Raises:
            ValueError: `keep` is negative, or a window has already let go of keys that position `keep` would
                need; the message says how far back the row can go. Nothing is changed.
        """
        indices = as_rows("rows", range(self.batch_size) if rows is None else rows, self.batch_size)
        targets = as_lengths("keep", keep, len(indices))
        self._crop(indices, [min(k, self._book.rows[i].length) for i, k in zip(indices, targets, strict=True)])

    def drop(self, tokens: int | Sequence[int], rows: int | Sequence[int] | None = None) -> None:
        """Removes the last `tokens` tokens of `rows`, or all where there are fewer. Raises as `crop` does."""
        indices = as_rows("rows", range(self.batch_size) if rows is None else rows, self.batch_size)
        counts = as_lengths("tokens", tokens, len(indices))
        self._crop(indices, [max(0, self._book.rows[i].length - n) for i, n in zip(indices, counts, strict=True)])

    def _crop(self, indices: Sequence[int], targets: Sequence[int]) -> None:
        for index, target in zip(indices, targets, strict=True):
            row = self._book.rows[index]
            floor = self._book.first_length(row)
            if target < row.length and 0 < target < floor:
                raise ValueError(
                    f"row {index} has {row.length} tokens and cannot go back to {target}: its window let "
                    f"go of keys that position {target} needs; "
                    f"lengths {floor} to {row.length}, or 0, are possible"
                )
        self._changed()
        for index, target in zip(indices, targets, strict=True):
            if target < self._book.rows[index].length:
                self._book.crop(index, target)

    def hold_windows(self, hold: bool) -> None:
        """While held, pages that slide out of a window stay, so that rows can be cropped back; see ``let_go``."""
        check_bool("hold", hold)
        self._book.holds_windows = hold

    def let_go(self) -> None:
        """Releases the pages that no query after the rows' last token can see, as every step does that does not hold
        them.
        """
        self._changed()
        self._book.let_go()

    def shift_positions(self, row: int, begin: int, shift: int) -> None:
        """From token `begin` of `row` on, positions are the tokens' numbers plus `shift`, until a later begin.

        M-RoPE gives an image fewer positions than tokens: the text after it stands at its number plus the row's delta.
        Forks and reordered rows keep the shifts, and a row that is cropped loses those that began later.
        """
        row = as_row("row", row, self.batch_size)
        check_int("begin", begin, 0)
        check_int("shift", shift, -begin)
        self._changed()
        sequence = self._book.rows[row]
        sequence.shifts = sorted([*(entry for entry in sequence.shifts if entry[0] != begin), (begin, shift)])

    # Steps

    def _changed(self) -> None:
        self._newest = None
        self.layer_steps.close()

    def step(self, query_lengths: int | Sequence[int], *, image_ids: Tensor | None = None) -> CacheStep:
        """Reserves pages for one step of all rows and advances their lengths.

        Args:
            query_lengths: new tokens of each row (0 is allowed), or one number for all rows.
            image_ids: int64 or int32 (total,) of the new tokens, see `CacheStep`. An image must be in one step.

        Raises:
            ValueError: not one length a row, a negative one, or a row would pass `max_seq_len`.
            OutOfPagesError: the pool is too small. In both cases the cache is unchanged.
        """
        rows = self._book.rows
        lengths = as_lengths("query_lengths", query_lengths, len(rows))
        image_ids = as_image_ids("image_ids", image_ids, sum(lengths), self.device)
        quiet = True
        for row, count in zip(rows, lengths, strict=True):
            if row.length + count > row.quiet_until:
                quiet = False
        past = tuple([row.length for row in rows])
        if quiet:
            for row, count in zip(rows, lengths, strict=True):
                row.length += count
        else:
            for index, (row, count) in enumerate(zip(rows, lengths, strict=True)):
                if row.length + count > self.max_seq_len:
                    raise ValueError(
                        f"row {index} holds {row.length} tokens and cannot take {count} more: "
                        f"positions go up to max_seq_len={self.max_seq_len}"
                    )
            self._copy_pages(self._book.reserve(lengths))
        step = self._steps.build(past, lengths, image_ids)
        self._newest = step
        self.layer_steps.close()
        return step

    def _copy_pages(self, copies: Sequence[tuple[int, int, int]]) -> None:
        with torch.no_grad():
            for group, source, destination in copies:
                for layer in self._book.groups[group].layers:
                    for pages in self._pages[layer]:
                        copy_page(pages, source, destination)

    def rollback(self, step: CacheStep) -> None:
        """Undoes `step`: its tokens are gone, its pages released. Only the newest step of an unchanged cache
        can go.

        Raises:
            ValueError: `step` is not the newest, or the cache was changed after it.
        """
        self.check_step("step", step)
        self._changed()
        for index, length in enumerate(step.past_lengths):
            if length < self._book.rows[index].length:
                self._book.crop(index, length)

    def check_step(self, name: str, step: CacheStep) -> None:
        """Raises unless `step`, given as `name`, is this cache's newest and the cache was not changed after it."""
        if step is None or step is not self._newest:
            refuse_step(name, step)

    # Keys and values

    def _check_layer(self, layer_idx: int) -> None:
        if type(layer_idx) is not int or not 0 <= layer_idx < self.num_layers:
            refuse_layer(layer_idx, self.num_layers)

    def pages(self, layer_idx: int) -> tuple[Pages, Pages]:
        """Key and value pages of a layer: (num_pages, num_kv_heads, page_size, head_dim), as the ops over pages take
        them. Unwritten slots hold anything.
        """
        self._check_layer(layer_idx)
        return self._pages[layer_idx]

    def memory_stats(self) -> CacheStats:
        """What is reserved, used, shared and wasted now."""
        sizes = self.page_size, self.num_kv_heads, self.head_dim
        return measure(self._book, 2 * page_bytes(*sizes, self.dtype, self.quantization))
