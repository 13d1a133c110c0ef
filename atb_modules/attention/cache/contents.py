"""PageContents: keys and values written to the pages of a cache, and read back as dense tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from atb_modules.kernels.pages import Pages, take_pages
from atb_modules.kernels.torch.cache import cache_append_torch

from .book import PageBook
from .step import CacheStep
from .validation import as_row, check_appended


class PageContents(ABC):
    """The part of a KVCacheManager that reads and writes pages token by token, for those who have no kernel for it."""

    _book: PageBook
    _pages: list[tuple[Pages, Pages]]
    _layer_groups: tuple[int, ...]
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def check_step(self, name: str, step: CacheStep) -> None:
        """Raises unless `step` is this cache's newest."""

    @abstractmethod
    def _check_layer(self, layer_idx: int) -> None:
        """Raises unless there is such a layer."""

    def append(self, step: CacheStep, layer_idx: int, k: Tensor, v: Tensor) -> None:
        """Writes the keys and values of `step`, (total, num_kv_heads, head_dim), into the pages of
        `layer_idx`.

        Raises:
            ValueError: wrong shape, dtype or device, a layer that there is not, a step that is not the newest.
        """
        self._check_layer(layer_idx)
        self.check_step("step", step)
        slots = step.slots(layer_idx)
        shape = (slots.shape[0], self.num_kv_heads, self.head_dim)
        check_appended("k", k, shape, self.dtype, self.device)
        check_appended("v", v, shape, self.dtype, self.device)
        with torch.no_grad():
            cache_append_torch(k.detach(), v.detach(), *self._pages[layer_idx], slots)

    def gather(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a row as dense (num_kv_heads, tokens, head_dim) copies; in a windowed layer, of
        what is kept.

        The last token is always the row's newest; only written slots are read.
        """
        self._check_layer(layer_idx)
        row = as_row("row", row, len(self._book.rows))
        group = self._layer_groups[layer_idx]
        sequence = self._book.rows[row]
        first = sequence.evicted[group]
        held = torch.tensor(sequence.pages[group][first:], dtype=torch.int64, device=self.device)
        length = sequence.length - first * self.page_size

        def dense(pages: Pages) -> Tensor:
            blocks = take_pages(pages, held).to(self.dtype).transpose(0, 1)
            return blocks.reshape(self.num_kv_heads, -1, self.head_dim)[:, :length]

        k_pages, v_pages = self._pages[layer_idx]
        return dense(k_pages), dense(v_pages)
