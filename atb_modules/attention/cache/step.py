"""CacheStep: what every layer must know about one step of the model over a paged cache."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from atb_modules.kernels.host_values import freeze, remember, upload

from .book import PageBook

#: longest step whose slots are kept as numbers of the host, too, for what is made of them there
_MOST_KNOWN_SLOTS = 4096


@dataclass(frozen=True, eq=False)
class CacheStep:
    """The new tokens of one model step, packed row after row, and where they go.

    A step is made by `KVCacheManager.step` and read by all layers. The block tables are the cache's own
    memory: they stay right until the cache is changed again (another step, crop, fork, leave, reorder).

    Attributes:
        query_lengths: new tokens of each row.
        past_lengths: tokens that each row held before the step.
        cu_seqlens_q: int32 (batch + 1,), where each row begins in the packed tokens.
        kv_lengths: int32 (batch,), tokens of each row with the new ones.
        positions: int64 (total,), absolute position of each packed token, shifted as
            `KVCacheManager.shift_positions` was told.
        max_query_length: largest of `query_lengths`.
        max_kv_length: largest of `kv_lengths`.
        shifted: whether any row's positions are not the numbers of its tokens.
        image_ids: int64 (total,): equal numbers >= 0 side by side are one image, whose tokens see each other; None
            where all are text.
    """

    query_lengths: tuple[int, ...]
    past_lengths: tuple[int, ...]
    cu_seqlens_q: Tensor
    kv_lengths: Tensor
    positions: Tensor
    max_query_length: int
    max_kv_length: int
    group_slots: tuple[Tensor, ...]
    group_tables: tuple[Tensor, ...]
    layer_groups: tuple[int, ...]
    shifted: bool = False
    image_ids: Tensor | None = None

    @property
    def batch_size(self) -> int:
        return len(self.query_lengths)

    @property
    def total_tokens(self) -> int:
        return self.positions.shape[0]

    def slots(self, layer_idx: int) -> Tensor:
        """int64 (total,): page * page_size + offset of each packed token in the pages of `layer_idx`."""
        return self.group_slots[self._group(layer_idx)]

    def block_table(self, layer_idx: int) -> Tensor:
        """int32 (batch, max_blocks), contiguous: page of each block of page_size positions, -1 for none."""
        return self.group_tables[self._group(layer_idx)]

    def _group(self, layer_idx: int) -> int:
        if type(layer_idx) is not int or not 0 <= layer_idx < len(self.layer_groups):
            refuse_layer(layer_idx, len(self.layer_groups))
        return self.layer_groups[layer_idx]


def refuse_layer(layer_idx: object, num_layers: int) -> NoReturn:
    """Raises for a layer that a cache of `num_layers` does not have."""
    if isinstance(layer_idx, bool) or not isinstance(layer_idx, int):
        raise TypeError(f"layer_idx must be an int, got {layer_idx!r:.80} ({type(layer_idx).__name__})")
    raise ValueError(f"layer_idx is {layer_idx}, the cache has layers 0 to {num_layers - 1}")


def refuse_step(name: str, step: object) -> NoReturn:
    """Raises for a `step` that is none, or that its cache has left behind."""
    if not isinstance(step, CacheStep):
        raise TypeError(f"{name} is {type(step).__name__}; allowed: the CacheStep that the cache's step() returned")
    raise ValueError(
        f"{name} of {step.total_tokens} tokens is not the newest one of this cache, or the cache was changed after it; "
        "allowed: the newest step of an unchanged cache"
    )


class StepBuilder:
    """Makes the tensors of a step from the book of pages; one token a row, the decode step, has a short
    way.
    """

    def __init__(self, book: PageBook, layer_groups: tuple[int, ...], device: torch.device) -> None:
        self._book = book
        self._layer_groups = layer_groups
        self._device = device
        self._decode_boundaries: dict[int, Tensor] = {}

    def build(self, past: tuple[int, ...], lengths: tuple[int, ...], image_ids: Tensor | None = None) -> CacheStep:
        """The step that brought rows of `past` tokens `lengths` more; their pages are already in the book."""
        batch = len(past)
        if lengths.count(1) == batch:
            cu_seqlens, positions, slots = self._one_token_each(past)
        else:
            cu_seqlens, positions, slots = self._ragged(past, lengths)
        shifted = any(row.shifts for row in self._book.rows)
        if shifted:
            positions = self._shifted(positions, past, lengths)
        total = [a + b for a, b in zip(past, lengths, strict=True)]
        kv_lengths = torch.tensor(total, dtype=torch.int32)
        tables = [group.table.view(batch) for group in self._book.groups]
        if self._device.type != "cpu":
            hosted = slots
            cu_seqlens, positions, kv_lengths, *rest = (
                upload(part, self._device) for part in (cu_seqlens, positions, kv_lengths, *slots, *tables)
            )
            slots, tables = rest[: len(slots)], rest[len(slots) :]
            starts = [0, *itertools.accumulate(lengths)]
            # kernels that want lists need not wait for them, and what is made for the first layer serves all
            remember(cu_seqlens, starts)
            remember(kv_lengths, total)
            freeze(*slots, *tables)
            if starts[-1] <= _MOST_KNOWN_SLOTS:
                for there, here in zip(slots, hosted, strict=True):
                    remember(there, here.tolist())
        return CacheStep(
            query_lengths=lengths,
            past_lengths=past,
            cu_seqlens_q=cu_seqlens,
            kv_lengths=kv_lengths,
            positions=positions,
            max_query_length=max(lengths, default=0),
            max_kv_length=max(total, default=0),
            group_slots=tuple(slots),
            group_tables=tuple(tables),
            layer_groups=self._layer_groups,
            shifted=shifted,
            image_ids=image_ids,
        )

    def _shifted(self, positions: Tensor, past: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
        ahead = np.zeros(sum(lengths), dtype=np.int64)
        first = 0
        for row, begin, count in zip(self._book.rows, past, lengths, strict=True):
            for token, shift in row.shifts:
                ahead[first + min(max(token - begin, 0), count) : first + count] = shift
            first += count
        return positions + torch.from_numpy(ahead)

    def _one_token_each(self, past: tuple[int, ...]) -> tuple[Tensor, Tensor, list[Tensor]]:
        size = self._book.page_size
        batch = len(past)
        cu_seqlens = self._decode_boundaries.get(batch)
        if cu_seqlens is None:
            cu_seqlens = self._decode_boundaries[batch] = torch.arange(batch + 1, dtype=torch.int32)
        slots = []
        for index in range(len(self._book.groups)):
            taken = [
                row.pages[index][length // size] * size + length % size
                for row, length in zip(self._book.rows, past, strict=True)
            ]
            slots.append(torch.tensor(taken, dtype=torch.int64))
        return cu_seqlens, torch.tensor(past, dtype=torch.int64), slots

    def _ragged(self, past: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, list[Tensor]]:
        size = self._book.page_size
        boundaries = np.zeros(len(past) + 1, dtype=np.int32)
        np.cumsum(lengths, out=boundaries[1:])
        row_of = np.repeat(np.arange(len(past)), lengths)
        shift = np.array(past, dtype=np.int64) - boundaries[:-1]
        where = np.arange(boundaries[-1], dtype=np.int64) + np.repeat(shift, lengths)
        slots = []
        for group in self._book.groups:
            pages = group.table.array[row_of, where // size].astype(np.int64)
            slots.append(torch.from_numpy(pages * size + where % size))
        return torch.from_numpy(boundaries), torch.from_numpy(where), slots
