"""Reference cache writes: one token after the other into its slot."""

from __future__ import annotations

from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.reference.rotary import rotary_reference
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import CacheAppendTraits
from atb_modules.strategies import CacheStrategy


def cache_append_reference(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write k, v (tokens, kv_heads, head_dim) to ``slots`` (tokens,) of the pages; slot -1 is not written."""
    page_size = k_pages.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_pages[slot // page_size, :, slot % page_size] = k[token].to(k_pages.dtype)
            v_pages[slot // page_size, :, slot % page_size] = v[token].to(v_pages.dtype)


def rotary_append_reference(
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
    q.copy_(rotary_reference(q, cos, sin, interleaved))
    cache_append_reference(rotary_reference(k, cos, sin, interleaved), v, k_pages, v_pages, slots)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: CacheAppendTraits) -> Cost:
    return Cost(bytes=20.0 * traits.tokens * traits.num_kv_heads * traits.head_dim, calls=10 + 8 * traits.tokens)


register(Kernel("cache_append", CacheStrategy.REFERENCE, cache_append_reference, _no_reasons, _cost))
register(Kernel("rotary_append", CacheStrategy.REFERENCE, rotary_append_reference, _no_reasons, _cost))
