"""Cache writes in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.pages import LARGEST_CODE, Pages, QuantizedPages
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.torch.rotary import rotary_torch
from atb_modules.kernels.traits import CacheAppendTraits
from atb_modules.strategies import CacheStrategy


def cache_append_torch(k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, slots: Tensor) -> None:
    """Write k, v (tokens, kv_heads, head_dim) to ``slots`` (tokens,) of the pages; slot -1 is not written."""
    page_size = k_pages.shape[2]
    written = slots >= 0
    slots = slots[written]
    page, offset = slots // page_size, slots % page_size
    for states, pages in ((k, k_pages), (v, v_pages)):
        if isinstance(pages, QuantizedPages):
            _append_codes(states[written].float(), pages, page, offset)
        else:
            pages[page, :, offset] = states[written].to(pages.dtype)


def _append_codes(states: Tensor, pages: QuantizedPages, page: Tensor, offset: Tensor) -> None:
    """float32 (tokens, kv_heads, head_dim) as codes; see ``QuantizedPages``."""
    if not page.numel():
        return
    touched, of = page.unique(return_inverse=True)
    heads = states.shape[1]
    held = torch.full_like(touched, pages.shape[2]).scatter_reduce(0, of, offset, "amin")
    needed = states.new_zeros(touched.numel(), heads)
    needed = needed.scatter_reduce(0, of[:, None].expand(-1, heads), needed_scales(states), "amax")
    write_codes(states[None], [pages], page, offset, touched, of, held, needed[None])


def needed_scales(states: Tensor) -> Tensor:
    """The scale that each vector (..., head_dim) needs for itself: (...)."""
    return states.abs().amax(dim=-1) / LARGEST_CODE


def write_codes(
    states: Tensor,
    pages: Sequence[QuantizedPages],
    page: Tensor,
    offset: Tensor,
    touched: Tensor,
    of: Tensor,
    held: Tensor,
    needed: Tensor,
    some: Tensor | None = None,
) -> None:
    """float32 states (sides, tokens, kv_heads, head_dim) as codes to ``offset`` of ``page`` (tokens,) of each side.

    Args:
        pages: one or two sides, keys and values of one shape.
        touched: (n,) the pages that change; repeats of a page must come with the same ``held`` and ``needed``.
        of: (tokens,), where in ``touched`` each token's page stands.
        held: (n,), how many tokens of the page stay.
        needed: (sides, n, kv_heads), the scales that the new tokens need.
        some: bool (), whether anything is written at all; None: yes.
    """
    before = torch.stack([side.scales[touched] for side in pages])
    filled = before.masked_fill((held == 0)[:, None], 0.0)
    after = torch.maximum(filled, needed)
    # Where nothing grows the ratio is 1, and rounding changes nothing; codes from the first new slot on are not kept.
    ratio = torch.where(after > filled, filled / after, 1.0)
    kept = (torch.arange(pages[0].shape[2], device=held.device) < held[:, None])[:, None, :, None]
    codes = torch.stack([side.codes[touched] for side in pages])
    rounded = torch.where(kept, (codes.float() * ratio[..., None, None]).round().to(torch.int8), codes)
    scale = after.where(after > 0.0, 1.0)[:, of, :, None]
    limit = float(LARGEST_CODE)
    new = (states / scale).round().clamp(-limit, limit).to(torch.int8)
    if some is not None:
        rounded, after = torch.where(some, rounded, codes), torch.where(some, after, before)
        new = torch.where(some, new, torch.stack([side.codes[page, :, offset] for side in pages]))
    for place, side in enumerate(pages):
        side.codes[touched] = rounded[place]
        side.scales[touched] = after[place]
        side.codes[page, :, offset] = new[place]


def rotary_append_torch(
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
    q.copy_(rotary_torch(q, cos, sin, interleaved))
    cache_append_torch(rotary_torch(k, cos, sin, interleaved), v, k_pages, v_pages, slots)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: CacheAppendTraits) -> Cost:
    elements = 1.0 * traits.tokens * traits.num_kv_heads * traits.head_dim
    codes = 20 if traits.page_dtype == torch.int8 else 0
    return Cost(bytes=(40.0 if traits.rotary else 12.0) * elements, calls=codes + (25 if traits.rotary else 9))


register(Kernel("cache_append", CacheStrategy.TORCH, cache_append_torch, _no_reasons, _cost))
register(Kernel("rotary_append", CacheStrategy.TORCH, rotary_append_torch, _no_reasons, _cost))
