"""Attention of two modalities as one softmax under one mask, as one would write it on paper."""

from __future__ import annotations

import itertools

import torch
from einops import einsum, rearrange

MODES = ["text_see_vision", "vision_see_text", "both", "none"]


def visible(spec, vision, text, image_lengths=None):
    """Who sees whom in one sample, written out a token at a time."""
    images = [vision] if image_lengths is None else image_lengths
    image_of = [number for number, length in enumerate(images) for _ in range(length)]

    def sees(q, k):
        if q < vision and k < vision:
            return image_of[q] == image_of[k]
        if q >= vision and k >= vision:
            return k <= q or not spec.text_causal
        return spec.vision_sees_text if q < vision else spec.text_sees_vision

    total = vision + text
    seen = [sees(q, k) for q, k in itertools.product(range(total), repeat=2)]
    return torch.tensor(seen, dtype=torch.bool).reshape(total, total)


def truth(vision, text, spec, mask):
    """One softmax in the inputs' dtype over (batch, heads, tokens, dim) under one mask."""
    q, k, v = (torch.cat(parts, 2) for parts in zip(vision, text, strict=True))
    group = q.shape[1] // k.shape[1]
    q = rearrange(q, "b (h g) n d -> b h g n d", g=group)
    scores = einsum(q, k, "b h g n d, b h m d -> b h g n m") * (spec.scale or q.shape[-1] ** -0.5)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    nobody = ~mask.any(-1)
    weights = torch.softmax(scores.masked_fill(nobody[:, None], 0.0), -1).masked_fill(nobody[:, None], 0.0)
    out = rearrange(einsum(weights, v, "b h g n m, b h m d -> b h g n d"), "b h g n d -> b (h g) n d")
    lse = torch.logsumexp(scores.masked_fill(nobody[:, None], 0.0), -1).masked_fill(nobody, float("-inf"))
    lse = rearrange(lse, "b h g n -> b (h g) n")
    length = vision[0].shape[2]
    return out[:, :, :length], out[:, :, length:], lse[..., :length], lse[..., length:]


def draw(generator, vision, text, heads=4, kv_heads=2, dim=16, dtype=torch.float32, batch=None):
    """q, k and v of both; packed where there is no batch."""
    sides = []
    for tokens in (vision, text):
        shapes = [(h, tokens, dim) for h in (heads, kv_heads, kv_heads)]
        if batch is None:
            sides.append(tuple(torch.randn(n, h, d, generator=generator).to(dtype) for h, n, d in shapes))
        else:
            sides.append(tuple(torch.randn(batch, h, n, d, generator=generator).to(dtype) for h, n, d in shapes))
    return sides
