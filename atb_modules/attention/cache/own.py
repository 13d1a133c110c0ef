"""The cache that a layer makes for itself: sized by its first batch, larger for a larger one while it is empty."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .manager import KVCacheManager
from .pool import OutOfPagesError
from .refusal import undone_if_refused

#: Tokens a sequence may have in such a cache, and tokens a page of it.
OWN_CACHE_TOKENS, OWN_CACHE_PAGE = 4096, 64
_PAGES_A_ROW = OWN_CACHE_TOKENS // OWN_CACHE_PAGE


def make_own_cache(
    rows: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> KVCacheManager:
    """A cache of one layer in which `rows` sequences can grow to `OWN_CACHE_TOKENS`."""
    cache = KVCacheManager(
        OWN_CACHE_TOKENS,
        OWN_CACHE_PAGE,
        1,
        num_heads,
        head_dim,
        dtype,
        num_kv_heads=num_kv_heads,
        num_pages=max(1, rows) * _PAGES_A_ROW,
        device=device,
    )
    cache.register_layer()  # it has no place for another layer that takes its number in order
    return cache


def fit_own_cache(cache: KVCacheManager, rows: int) -> None:
    """Makes room for `rows` sequences, where nothing is held that would have to move.

    Raises:
        ValueError: other sequences than `rows` are open; says how to change their number.
    """
    if cache.batch_size not in (0, rows):
        raise ValueError(
            f"hidden_states has batch {rows}; the layer's own cache has {cache.batch_size} open sequences: "
            f"cache.join and cache.leave change their number, cache.begin({rows}) starts anew"
        )
    cache.grow(max(1, rows) * _PAGES_A_ROW)


@contextmanager
def undone_in_own(cache: KVCacheManager) -> Iterator[None]:
    """A block that raises leaves a layer's own `cache` without the step that it was part of.

    Where it needs more pages than there are, the error says how to pass a larger cache.
    """
    try:
        with undone_if_refused(cache, 0):
            yield
    except OutOfPagesError as error:
        what = (
            f"{error.what} in the cache that the layer made itself, with room for {error.num_pages // _PAGES_A_ROW} x "
            f"{OWN_CACHE_TOKENS} tokens (it grows only while it is empty: for more, pass kv_cache_manager="
            f"KVCacheManager(..., num_pages=...) to the layer, or cache= to the call)"
        )
        raise OutOfPagesError(error.needed, error.available, error.num_pages, what) from None
