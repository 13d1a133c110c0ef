"""Refused calls: what does not fit a cache is refused first, and a call that fails later leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .manager import KVCacheManager


@contextmanager
def undone_if_refused(cache: KVCacheManager, layer_idx: int | None = None) -> Iterator[None]:
    """Where the block raises, takes back the step that it opened in `cache`, and the sequences that it opened in an
    empty one.

    A step that was open before belongs to others and stays; but where `layer_idx` is a layer called by itself, the
    step that earlier layers have opened for it too is taken back with what they wrote: the next call begins anew.
    """
    batch, lengths = cache.batch_size, cache.lengths
    joined = None if layer_idx is None else cache.layer_steps.joinable(layer_idx)
    done = False
    try:
        yield
        done = True
    finally:
        if not done and not batch:
            cache.begin(0)
        elif not done and (joined is not None or cache.lengths != lengths):
            cache.undo_newest()


def check_heads(cache: KVCacheManager, num_kv_heads: int, head_dim: int) -> None:
    """Raises where `cache` is none, or keys and values of such heads have no place in it."""
    if not isinstance(cache, KVCacheManager):
        raise TypeError(f"kv_cache is {type(cache).__name__}; allowed: KVCacheManager or None")
    if (cache.num_kv_heads, cache.head_dim) != (num_kv_heads, head_dim):
        raise ValueError(
            f"kv_cache has {cache.num_kv_heads} kv heads of {cache.head_dim} channels; this attention has "
            f"{num_kv_heads} of {head_dim}"
        )


def check_batch(cache: KVCacheManager, batch: int) -> None:
    """Raises a ValueError where the open sequences of `cache`, if there are any, are not `batch`."""
    if cache.batch_size not in (0, batch):
        raise ValueError(f"hidden_states has batch {batch}; the cache has {cache.batch_size} open sequences")
