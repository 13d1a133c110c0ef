"""One token at a time through SmolLM2 after a prompt of 512 tokens, batch 1."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from atb_modules.inference.plan import DecodeStep
from benchmarks import smollm2
from benchmarks.timing import ReadBandwidth, Row, interleave, row

PROMPT = 512


def rows(rounds: int = 40) -> list[Row]:
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
    functions = {
        "ours": lambda: decode([42]),
        "transformers SDPA": lambda: peer(token, past_key_values=dynamic),
        "read": bandwidth,
    }
    times = interleave(functions, rounds, warmup=5)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    config = model.config
    past = PROMPT + 5 + rounds / 2
    kept = 2 * config.num_layers * config.num_kv_heads * config.head_dim * past * cache.dtype.itemsize
    limit = bandwidth.seconds_for(times, "read", weights + kept)
    name = f"decode SmolLM2, {str(dtype).removeprefix('torch.')}, 512 past"
    return [row(name, times, "transformers SDPA", ">= 2.8", limit_name="read bandwidth", limit=limit)]
