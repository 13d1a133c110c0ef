"""Sparse attention against PyTorch's dense causal SDPA: what share of the work saved becomes time saved."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from atb_modules import AttentionSpec
from atb_modules.ops import attention
from atb_modules.overlays import Overlays
from atb_modules.reach import reach
from benchmarks.timing import Row, interleave, median, row

HEADS, DIM = 4, 64


def rows() -> list[Row]:
    """Windows with and without global tokens, forward and backward; live blocks; packed sequences."""
    ours = [*_window(0, False), *_window(64, False), *_window(0, True), *_blocks(), *_packed()]
    return [*ours, *_window(0, False, "blocked"), *_window(0, True, "blocked")]


def _seen(spec: AttentionSpec, length: int, overlays: Overlays | None = None) -> float:
    """Query-key pairs that the structure leaves."""
    ranges = reach(spec, length, length, overlays).long()
    return float((ranges[..., 1] - ranges[..., 0] + ranges[..., 3] - ranges[..., 2]).sum())


def _compare(name: str, ours: Callable, dense: Callable, ideal: float, goal: float, rounds: int) -> list[Row]:
    """The ideal time is that of the dense call divided by the work saved."""
    times = interleave({"ours": ours, "dense causal SDPA": dense}, rounds)
    limit = {"limit_name": "ideal speed-up", "limit": median(times, "dense causal SDPA") / ideal}
    return [row(name, times, "dense causal SDPA", f">= {goal * ideal:.2f}", **limit)]


def _window(global_tokens: int, backward: bool, strategy: str = "auto") -> list[Row]:
    length, window = 16384 if backward else 32768, 2048
    q, k, v = (torch.randn(1, HEADS, length, DIM, requires_grad=backward) for _ in range(3))
    weights = torch.randn(1, HEADS, length, DIM)
    spec = AttentionSpec(causal=True, window=(window - 1, None), global_tokens=global_tokens)
    ideal = (length * (length + 1) / 2) / _seen(spec, length)

    def ours() -> None:
        out, _ = attention(q, k, v, spec, strategy=strategy)
        if backward:
            torch.autograd.grad(out, (q, k, v), weights)

    def dense() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if backward:
            torch.autograd.grad(out, (q, k, v), weights)

    what = f"window {window} of {length}" + (f", {global_tokens} global tokens" if global_tokens else "")
    goal = 0.75 if backward else 0.80 if global_tokens else 0.85
    if strategy == "blocked":
        what, goal = f"{what}, plain PyTorch", 0.70 if backward else 0.72
    return _compare(what + (", with backward" if backward else ""), ours, dense, ideal, goal, 5)


@torch.inference_mode()
def _blocks() -> list[Row]:
    length, size, density = 16384, 128, 0.1
    q, k, v = torch.randn(3, 1, HEADS, length, DIM)
    live = torch.rand(1, 1, length // size, length // size) < density
    spec = AttentionSpec(block_size=size)
    ideal = 1.0 / float(live.float().mean())
    return _compare(
        f"blocks of {size}, {density:.0%} live, {length} tokens, against dense SDPA",
        lambda: attention(q, k, v, spec, block_mask=live),
        lambda: F.scaled_dot_product_attention(q, k, v),
        ideal,
        0.70,
        5,
    )


@torch.inference_mode()
def _packed() -> list[Row]:
    lengths = torch.linspace(16, 2048, 32).int().tolist()
    longest, total = max(lengths), sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = torch.randn(3, total, HEADS, DIM)
    padded = torch.randn(3, len(lengths), HEADS, longest, DIM)
    keep = torch.arange(longest) < torch.tensor(lengths)[:, None]
    mask = keep[:, None, None, :] & torch.ones(longest, longest, dtype=torch.bool).tril()
    spec = AttentionSpec(causal=True)
    apart = [
        tuple(t[a:b].transpose(0, 1)[None] for t in (q, k, v))
        for a, b in zip(starts.tolist(), starts.tolist()[1:], strict=False)
    ]

    times = interleave(
        {
            "ours": lambda: attention(q, k, v, spec, cu_seqlens_q=starts, cu_seqlens_k=starts),
            "padded SDPA with a mask": lambda: F.scaled_dot_product_attention(*padded, attn_mask=mask),
            "separate calls": lambda: [attention(*one, spec) for one in apart],
        },
        5,
    )
    name = f"packed, 32 sequences of 16 to {longest} tokens"
    return [
        row(name, times, "padded SDPA with a mask", ">= 2"),
        row(name, times, "separate calls", ">= 0.87"),
    ]
