"""The attention module against the plain unfused sequence: separate products, a mask, softmax."""

from __future__ import annotations

import torch

import atb_modules as atb
from benchmarks.timing import Row, interleave, row

TOKENS, HIDDEN, HEADS, DIM = 1024, 1024, 16, 64


@torch.inference_mode()
def rows() -> list[Row]:
    """Causal self attention at 1,024 tokens, float32."""
    module = atb.Attention(HIDDEN, HEADS).eval()
    x = torch.randn(1, TOKENS, HIDDEN)
    wq, wk, wv = module.qkv.qkv_proj.weight.split(HIDDEN)
    wo = module.o_proj.weight

    def plain() -> torch.Tensor:
        q, k, v = ((x @ w.t()).view(1, TOKENS, HEADS, DIM).transpose(1, 2) for w in (wq, wk, wv))
        scores = q @ k.transpose(-1, -2) * DIM**-0.5
        hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return (weights @ v).transpose(1, 2).reshape(1, TOKENS, HIDDEN) @ wo.t()

    torch.testing.assert_close(module(x), plain(), atol=1e-4, rtol=1e-4)
    times = interleave({"ours": lambda: module(x), "plain PyTorch": plain}, 25)
    return [row("Attention module, 1,024 tokens, float32", times, "plain PyTorch", ">= 2")]
