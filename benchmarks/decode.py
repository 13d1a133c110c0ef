"""One token at a time through SmolLM2 after a prompt of 512 tokens, batch 1."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from atb_modules.inference.plan import DecodeStep
from benchmarks import smollm2
from benchmarks.timing import ReadBandwidth, Row, interleave, row

PROMPT = 512
#: Tokens in a row before the other one has its turn: decoding is a steady state.
BLOCK = 8


def rows(rounds: int = 15) -> list[Row]:
    """float32 and bfloat16 weights; the limit reads every weight and the cache once."""
    return [line for dtype in (torch.float32, torch.bfloat16) for line in _decode(dtype, rounds)]


@torch.inference_mode()
def _decode(dtype: torch.dtype, rounds: int) -> list[Row]:
    model, peer = smollm2.ours(dtype), smollm2.theirs(dtype)
    prompt = torch.randint(100, 40000, (1, PROMPT))
    cache = model.new_cache(1024)
    cache.begin(1)
    model(prompt, past_key_values=cache)
    decode = DecodeStep(model, cache)
    dynamic = DynamicCache(config=peer.config)
    peer(prompt, past_key_values=dynamic)
    token = torch.tensor([[42]])
    bandwidth = ReadBandwidth()

    def ours() -> None:
        for _ in range(BLOCK):
            decode([42])

    def theirs() -> None:
        for _ in range(BLOCK):
            peer(token, past_key_values=dynamic)

    blocks = interleave({"ours": ours, "transformers SDPA": theirs, "read": bandwidth}, rounds, warmup=2)
    times = {name: [t / (1 if name == "read" else BLOCK) for t in values] for name, values in blocks.items()}
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    config = model.config
    past = PROMPT + BLOCK * (2 + rounds / 2)
    kept = 2 * config.num_layers * config.num_kv_heads * config.head_dim * past * cache.dtype.itemsize
    limit = bandwidth.seconds_for(times, "read", weights + kept)
    name = f"decode SmolLM2, {str(dtype).removeprefix('torch.')}, 512 past"
    return [row(name, times, "transformers SDPA", ">= 2.8", limit_name="read bandwidth", limit=limit)]
