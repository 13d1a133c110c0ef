"""Reference cache writes: one token after the other into its slot."""

from __future__ import annotations

import torch
from einops import reduce
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.pages import LARGEST_CODE, Pages, QuantizedPages
from atb_modules.kernels.reference.rotary import rotary_reference
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import CacheAppendTraits
from atb_modules.strategies import CacheStrategy


def cache_append_reference(k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, slots: Tensor) -> None:
    """Write k, v (tokens, kv_heads, head_dim) to ``slots`` (tokens,) of the pages; slot -1 is not written."""
    page_size = k_pages.shape[2]
    for states, pages in ((k, k_pages), (v, v_pages)):
        if isinstance(pages, QuantizedPages):
            _append_codes(states.float(), pages, slots.tolist())
            continue
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                pages[slot // page_size, :, slot % page_size] = states[token].to(pages.dtype)


def _append_codes(states: Tensor, pages: QuantizedPages, slots: list[int]) -> None:
    """One page after the other: its scale, its old codes at the new scale, its new codes."""
    page_size = pages.shape[2]
    for page in sorted({slot // page_size for slot in slots if slot >= 0}):
        tokens = [token for token, slot in enumerate(slots) if slot // page_size == page]
        offsets = [slots[token] % page_size for token in tokens]
        held = min(offsets)
        needed = reduce(states[tokens].abs(), "tokens heads dim -> heads", "max") / LARGEST_CODE
        before = pages.scales[page] if held else torch.zeros_like(needed)
        after = torch.maximum(before, needed)
        ratio = torch.where(after > before, before / after, 1.0)
        pages.codes[page, :, :held] = (pages.codes[page, :, :held] * ratio[:, None, None]).round().to(torch.int8)
        pages.scales[page] = after
        scale = after.where(after > 0.0, 1.0)
        for token, offset in zip(tokens, offsets, strict=True):
            codes = (states[token] / scale[:, None]).round().clamp(-LARGEST_CODE, LARGEST_CODE)
            pages.codes[page, :, offset] = codes.to(torch.int8)


def rotary_append_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Pages,
    v_pages: Pages,
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
