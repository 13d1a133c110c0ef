"""Attention of 576 vision and 2,048 text tokens against one call of SDPA under the unified bool mask.

On identical q, k, v, projections excluded; the peer's time and memory include the concatenation that it needs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from atb_modules.multimodal import MultiModalSpec, multimodal_attention
from atb_modules.multimodal.attention import unified_mask
from atb_modules.testing import peak_memory
from benchmarks.timing import Row, interleave, median, row

VISION, TEXT, DIM = 576, 2048, 128
PEER = "one SDPA call under the unified mask"
#: pairs under the unified call over those that anybody sees
WORK = (VISION + TEXT) ** 2 / (VISION**2 + TEXT * (TEXT + 1) / 2 + TEXT * VISION)
WAYS = ("auto", "three_call", "prefix", "unified")

QKV = tuple[torch.Tensor, ...]


def rows() -> list[Row]:
    """8 heads by every strategy, then 32 heads and half precision by AUTO; forward, and with backward."""
    found = [*_times(8, False, WAYS, 7), *_times(8, True, WAYS, 5)]
    return [*found, *_times(32, False, ("auto",), 3), *_times(8, False, ("auto",), 5, torch.bfloat16)]


def remarks() -> list[str]:
    """Peak memory beside the peer's, and how far the 32 heads are from one softmax."""
    lines = []
    for backward in (False, True):
        vision, text = _draw(8, backward)
        peer = peak_memory(_peer(vision, text, backward))
        for way in WAYS:
            ours = peak_memory(_ours(way, vision, text, backward))
            what = "with backward" if backward else "forward"
            lines.append(
                f"peak memory, 8 heads, {what}, {way}: {ours / 2**20:.1f} MiB, {PEER}: {peer / 2**20:.1f} MiB "
                f"({ours / peer:.0%})"
            )
    vision, text = _draw(32, False)
    with torch.no_grad():
        want = _peer(vision, text, False)()
        found = torch.cat(_ours("auto", vision, text, False)(), 2)
    lines.append(f"32 heads: largest difference to {PEER}: {float((found - want).abs().max()):.1e} (goal <= 1e-5)")
    return lines


def _draw(heads: int, backward: bool, dtype: torch.dtype = torch.float32) -> tuple[QKV, QKV]:
    generator = torch.Generator().manual_seed(0)
    vision, text = (
        tuple(torch.randn(1, heads, n, DIM, generator=generator).to(dtype).requires_grad_(backward) for _ in range(3))
        for n in (VISION, TEXT)
    )
    return vision, text


def _weights(heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the loss: for both outputs side by side, and for each."""
    whole = torch.randn(1, heads, VISION + TEXT, DIM, generator=torch.Generator().manual_seed(1))
    vision, text = (part.contiguous() for part in whole.split([VISION, TEXT], 2))
    return whole, vision, text


def _peer(vision: QKV, text: QKV, backward: bool) -> Callable:
    mask = unified_mask(MultiModalSpec(), VISION, TEXT)
    weights = _weights(vision[0].shape[1])[0] if backward else None

    def run() -> object:
        q, k, v = (torch.cat(parts, 2) for parts in zip(vision, text, strict=True))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return torch.autograd.grad(out, (*vision, *text), weights) if backward else out

    return run


def _ours(way: str, vision: QKV, text: QKV, backward: bool) -> Callable:
    weights = _weights(vision[0].shape[1])[1:] if backward else None

    def run() -> object:
        outs = multimodal_attention(vision, text, strategy=way)
        return torch.autograd.grad(outs, (*vision, *text), weights) if backward else outs

    return run


def _times(
    heads: int, backward: bool, ways: tuple[str, ...], rounds: int, dtype: torch.dtype = torch.float32
) -> list[Row]:
    vision, text = _draw(heads, backward, dtype)
    functions = {way: _ours(way, vision, text, backward) for way in ways}
    with torch.set_grad_enabled(backward):
        times = interleave({PEER: _peer(vision, text, backward), **functions}, rounds)
    limit = {"limit_name": "work ratio", "limit": median(times, PEER) / WORK}
    kind = "" if dtype == torch.float32 else ", bfloat16"
    what = f"{heads} heads{kind}{', with backward' if backward else ''}"
    goals = {"auto": ">= 1.65" if backward else ">= 1.75"} if dtype == torch.float32 else {}
    return [row(f"multimodal, {what}, {way}", times, PEER, goals.get(way, ""), ours=way, **limit) for way in ways]
