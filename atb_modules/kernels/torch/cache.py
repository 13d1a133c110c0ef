"""Cache writes in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.torch.rotary import rotary_torch
from atb_modules.kernels.traits import CacheAppendTraits
from atb_modules.strategies import CacheStrategy


def cache_append_torch(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write k, v (tokens, kv_heads, head_dim) to ``slots`` (tokens,) of the pages; slot -1 is not written."""
    page_size = k_pages.shape[2]
    written = slots >= 0
    slots = slots[written]
    page, offset = slots // page_size, slots % page_size
    k_pages[page, :, offset] = k[written].to(k_pages.dtype)
    v_pages[page, :, offset] = v[written].to(v_pages.dtype)


def rotary_append_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    interleaved: bool,
) -> None:
    """Rotate q in place, and write rotated k and plain v to the pages."""
    q.copy_(rotary_torch(q, cos, sin, interleaved))
    cache_append_torch(rotary_torch(k, cos, sin, interleaved), v, k_pages, v_pages, slots)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: CacheAppendTraits) -> Cost:
    elements = 1.0 * traits.tokens * traits.num_kv_heads * traits.head_dim
    return Cost(bytes=(40.0 if traits.rotary else 12.0) * elements, calls=25 if traits.rotary else 9)


register(Kernel("cache_append", CacheStrategy.TORCH, cache_append_torch, _no_reasons, _cost))
register(Kernel("rotary_append", CacheStrategy.TORCH, rotary_append_torch, _no_reasons, _cost))
