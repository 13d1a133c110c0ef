"""Prefix sharing: the part of KVCacheManager that finds and registers pages by the tokens in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .book import PageBook
from .prefix import PrefixImage
from .validation import as_row, as_tokens, check_keys


class PrefixHit(NamedTuple):
    """A sequence opened on shared pages: its row and how many prompt tokens the cache already holds."""

    row: int
    tokens: int


class PrefixSharing(ABC):
    """Base of KVCacheManager."""

    page_size: int
    max_seq_len: int
    _book: PageBook

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Open sequences."""

    @abstractmethod
    def _changed(self) -> None:
        """Called before every change of the sequences."""

    @abstractmethod
    def _check_rows(self, name: str, count: int, open_rows: int) -> None:
        """Raises where `count` sequences are too many beside `open_rows`."""

    def register_prefix(
        self,
        row: int,
        token_ids: Sequence[int] | Tensor,
        *,
        salt: str | None = None,
        adapter: str | None = None,
        images: Sequence[PrefixImage] = (),
    ) -> int:
        """Makes the full pages of `row` findable by the `token_ids` that were computed into it.

        Args:
            row: a sequence that holds at least `token_ids`, all layers written.
            token_ids: the row's tokens from its beginning.
            salt, adapter: what else the keys depend on; prefixes match only where both are equal.
            images: (first placeholder token, content) of every image in `token_ids`.

        Returns:
            Tokens that can be found: a multiple of the page size.
        """
        row = as_row("row", row, self.batch_size)
        tokens = as_tokens(token_ids)
        check_keys(salt, adapter, images)
        sequence = self._book.rows[row]
        if len(tokens) > sequence.length:
            raise ValueError(f"token_ids has {len(tokens)} tokens, row {row} holds {sequence.length}")
        self._changed()
        return self._book.register(sequence, tokens, salt, adapter, images) * self.page_size

    def match_prefix(
        self,
        token_ids: Sequence[int] | Tensor,
        *,
        salt: str | None = None,
        adapter: str | None = None,
        images: Sequence[PrefixImage] = (),
    ) -> int:
        """How many of the first `token_ids` are in registered pages, with the same salt, adapter and
        images.
        """
        check_keys(salt, adapter, images)
        nodes = self._book.prefixes.walk(as_tokens(token_ids), salt, adapter, images)
        return len(self._book.usable(nodes)) * self.page_size

    def join_prefix(
        self,
        token_ids: Sequence[int] | Tensor,
        *,
        salt: str | None = None,
        adapter: str | None = None,
        images: Sequence[PrefixImage] = (),
    ) -> PrefixHit:
        """Opens one sequence on the registered pages that match `token_ids`; `.tokens` of them need no
        computing.

        Leave out the last token of a prompt: its logits are wanted, so it has to be computed.
        """
        check_keys(salt, adapter, images)
        nodes = self._book.usable(self._book.prefixes.walk(as_tokens(token_ids), salt, adapter, images))
        if len(nodes) * self.page_size > self.max_seq_len:
            raise ValueError(f"token_ids is longer than max_seq_len={self.max_seq_len}")
        self._check_rows("the new sequence", 1, self.batch_size)
        self._changed()
        self._book.append_rows([self._book.sequence_on(nodes)])
        return PrefixHit(self.batch_size - 1, len(nodes) * self.page_size)
