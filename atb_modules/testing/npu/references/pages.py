"""Pages of a key-value cache: reading them by a block table, writing them by slots."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.references.registry import reference
from atb_modules.testing.npu.references.rules import require_contiguous, require_not_310p, require_same_dtype


def gather_pages(pages: Tensor, row: Tensor, length: int, block_size: int, heads: int) -> Tensor:
    """The first ``length`` tokens of a sequence as (heads, length, D), from pages (blocks, block_size, H) or (blocks,
    heads, block_size, D). "Block ids are not checked": an id out of range reads NaN here.
    """
    if pages.dim() == 3:
        pages = pages.unflatten(-1, (heads, -1)).transpose(1, 2)
    blocks = row[: -(-length // block_size)].long()
    inside = (blocks >= 0) & (blocks < pages.shape[0])
    found = pages[torch.where(inside, blocks, 0)].float()
    found = found.masked_fill(~inside[:, None, None, None], float("nan"))
    return found.transpose(0, 1).flatten(1, 2)[:, :length]


def require_unique_slots(slots: Tensor, room: int, allow_negative: bool) -> Tensor:
    """Which tokens are written. Docs: "slot_mapping lies in [0, num_blocks * block_size - 1], and its elements are not
    repeated; where they are, nothing is promised".
    """
    require(slots.dtype in (torch.int32, torch.int64), f"slots are {slots.dtype}; int32 or int64")
    kept = slots >= 0 if allow_negative else torch.ones_like(slots, dtype=torch.bool)
    used = slots[kept]
    inside = used.numel() == 0 or bool((used >= 0).all() and (used < room).all())
    require(inside, f"a slot lies outside [0, {room - 1}]")
    require(used.unique().numel() == used.numel(), "a slot is repeated; slots must be unique")
    return kept


@reference("atb::_npu_reshape_and_cache")
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor) -> None:
    """ATB ReshapeAndCache: key and value (tokens, heads, D) go to the pages (blocks, block_size, heads, D) at
    "slotMapping: the offset of each token in the cache", int32. A slot below 0 writes nothing, as vLLM's padding
    relies on.
    """
    require_not_310p()
    require(slot_indices.dtype == torch.int32, f"slot_indices is {slot_indices.dtype}; int32")
    require(tuple(slot_indices.shape) == (key.shape[0],), "slot_indices must have one entry a token")
    _write(key, key_cache, slot_indices, True)
    _write(value, value_cache, slot_indices, True)


@reference("atb::_npu_reshape_and_cache_siso")
def reshape_and_cache_siso(key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> None:
    """The same for one tensor, the latent of multi-head latent attention."""
    require_not_310p()
    require(slot_indices.dtype == torch.int32, f"slot_indices is {slot_indices.dtype}; int32")
    _write(key, key_cache, slot_indices, True)


@reference("npu::npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Docs: "None or 'Norm': ND memory, keyCache (num_blocks, block_size, num_head, k_head_size)"; "'PA_NZ': NZ memory,
    (num_blocks, num_head * k_head_size // last_dim, block_size, last_dim); the default is 'PA_NZ'"; "inputs must be
    contiguous; key, value and the caches must have one data type"; slots unique and in range; products A2 and A3.
    """
    require_not_310p()
    require(cache_mode in (None, "Norm", "PA_NZ"), f"cache_mode is {cache_mode!r}; None, 'Norm' or 'PA_NZ'")
    require_same_dtype(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    require_contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    require(key.dim() == value.dim() == 3, "key and value have 3 dims (4 belong to the compressed cache, not emulated)")
    require(key.shape[:2] == value.shape[:2], "the first two axes of key and value must agree")
    require(tuple(slot_mapping.shape) == (key.shape[0],), "slot_mapping must have one entry a token")
    for source, cache in ((key, key_cache), (value, value_cache)):
        require(cache.dim() == 4, "the caches have 4 dims")
        if cache_mode == "PA_NZ":
            _write_nz(source, cache, slot_mapping)
        else:
            _write(source, cache, slot_mapping, False)


def _write(source: Tensor, cache: Tensor, slots: Tensor, allow_negative: bool) -> None:
    require_same_dtype(key=source, key_cache=cache)
    require(cache.dim() == 4, f"the cache has {cache.dim()} dims; (blocks, block_size, heads, D)")
    fits = tuple(cache.shape[2:]) == tuple(source.shape[1:])
    require(fits, f"the cache holds (heads, D) {tuple(cache.shape[2:])}, the tokens {tuple(source.shape[1:])}")
    require(cache.is_contiguous(), "the cache is not contiguous; such caches are not supported")
    kept = require_unique_slots(slots, cache.shape[0] * cache.shape[1], allow_negative)
    cache.view(-1, *cache.shape[2:])[slots[kept].long()] = source[kept]


def _write_nz(source: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Channels in groups of 32 bytes: (blocks, heads * D / last, block_size, last)."""
    _, groups, block_size, last = cache.shape
    wide = 32 // source.element_size()
    fits = last == wide and groups * last == source.shape[1] * source.shape[2]
    wanted = f"(blocks, heads * D / {wide}, block_size, {wide})"
    require(fits, f"cache_mode 'PA_NZ' takes {wanted}, the cache is {tuple(cache.shape)}")
    kept = require_unique_slots(slots, cache.shape[0] * block_size, False)
    where = slots[kept].long()
    cache[where // block_size, :, where % block_size] = source[kept].reshape(-1, groups, last)
