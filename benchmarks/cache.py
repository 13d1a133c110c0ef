"""The paged cache against a cache that concatenates, at SmolLM2's shapes: appending and attending, all layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from atb_modules import AttentionSpec, KVCacheManager, QuantizedPages
from atb_modules.ops import cache_append, paged_attention
from benchmarks.timing import ReadBandwidth, Row, interleave, row

LAYERS, HEADS, KV_HEADS, DIM = 30, 9, 3, 64
SPEC = AttentionSpec(causal=True)
RAGGED = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7936)


def rows() -> list[Row]:
    """One long sequence, then a ragged batch of 8 (256 steps would take minutes: 48 are timed), then grouped heads."""
    return [_throughput((7936,), 256), _throughput(RAGGED, 48), *_grouped_decode(64), *_grouped_decode(128)]


def remarks() -> list[str]:
    """The bytes that the ragged batch takes: in pages, and left-padded in a DynamicCache."""
    paged = _filled(RAGGED, 1).memory_stats().bytes_used
    padded = 2 * LAYERS * KV_HEADS * DIM * len(RAGGED) * max(RAGGED) * 4
    return [
        f"ragged batch of 8: {paged / 2**20:.0f} MiB in pages, {padded / 2**20:.0f} MiB left-padded, "
        f"{1 - paged / padded:.0%} less (goal >= 22%)"
    ]


def _filled(lengths: tuple[int, ...], room: int) -> KVCacheManager:
    pages = sum((length + room + 63) // 64 for length in lengths)
    cache = KVCacheManager(
        max(lengths) + room, 64, LAYERS, HEADS, DIM, torch.float32, num_kv_heads=KV_HEADS, num_pages=pages
    )
    cache.begin(len(lengths))
    step = cache.step(lengths)
    for layer in range(LAYERS):
        tokens = torch.randn(sum(lengths), KV_HEADS, DIM)
        cache_append(tokens, tokens, *cache.pages(layer), step.slots(layer))
    return cache


@torch.inference_mode()
def _throughput(lengths: tuple[int, ...], steps: int) -> Row:
    batch, longest = len(lengths), max(lengths)
    cache = _filled(lengths, steps + 8)
    dynamic = DynamicCache()
    for layer in range(LAYERS):
        dynamic.update(torch.randn(batch, KV_HEADS, longest, DIM), torch.randn(batch, KV_HEADS, longest, DIM), layer)
    q, k, v = torch.randn(batch, HEADS, DIM), *torch.randn(2, batch, KV_HEADS, DIM)
    q4, k4, v4 = q[:, :, None], k[:, :, None], v[:, :, None]
    padding = torch.tensor([longest - length for length in lengths])

    def ours() -> None:
        step = cache.step(1)
        for layer in range(LAYERS):
            pages = cache.pages(layer)
            cache_append(k, v, *pages, step.slots(layer))
            paged_attention(q, *pages, step.block_table(layer), step.kv_lengths, step.cu_seqlens_q, SPEC)

    def theirs() -> None:
        kv_len = dynamic.get_seq_length() + 1
        mask = None
        if batch > 1:
            mask = (torch.arange(kv_len) >= padding[:, None])[:, None, None]
        for layer in range(LAYERS):
            keys, values = dynamic.update(k4, v4, layer)
            F.scaled_dot_product_attention(q4, keys, values, attn_mask=mask, enable_gqa=True)

    bandwidth = ReadBandwidth()
    times = interleave({"ours": ours, "DynamicCache + SDPA": theirs, "read": bandwidth}, steps, warmup=4)
    limit = bandwidth.seconds_for(times, "read", 2.0 * LAYERS * KV_HEADS * DIM * sum(lengths) * 4)
    name = f"paged cache, {batch} sequence{'s' if batch > 1 else ''} of {min(lengths)}-{longest} tokens"
    return row(name, times, "DynamicCache + SDPA", ">= 1.4", limit_name="read bandwidth", limit=limit)


@torch.inference_mode()
def _grouped_decode(head_dim: int) -> list[Row]:
    """One token of 16 sequences of 4,096 tokens, 32 query heads on 4 kv heads, one layer; float32 and int8 pages."""
    rows, length, heads, kv_heads, page = 16, 4096, 32, 4, 64
    blocks = length // page
    pages = torch.randn(2, rows * blocks, kv_heads, page, head_dim)
    scales = pages.abs().amax(dim=(3, 4)) / 127
    codes = (pages / scales[..., None, None]).round().to(torch.int8)
    int8 = [QuantizedPages(*side) for side in zip(codes, scales, strict=True)]
    table = torch.randperm(rows * blocks).int().reshape(rows, blocks)
    lengths = torch.full((rows,), length, dtype=torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    q = torch.randn(rows, heads, head_dim)
    dense = torch.randn(2, rows, kv_heads, length, head_dim)
    bandwidth = ReadBandwidth()
    times = interleave(
        {
            "ours": lambda: paged_attention(q, *pages, table, lengths, starts, SPEC),
            "int8": lambda: paged_attention(q, *int8, table, lengths, starts, SPEC),
            "SDPA, contiguous": lambda: F.scaled_dot_product_attention(q[:, :, None], *dense, enable_gqa=True),
            "read": bandwidth,
        },
        25,
    )
    size = 2.0 * rows * length * kv_heads * head_dim
    name = f"paged decode, 16 x 4096 tokens, 32 heads on 4 of {head_dim}"
    exact = bandwidth.seconds_for(times, "read", 4 * size), "read bandwidth (goal 70%)"
    small = bandwidth.seconds_for(times, "read", size), "read bandwidth"
    return [
        row(name, times, "SDPA, contiguous", "", limit_name=exact[1], limit=exact[0]),
        row(f"  int8 pages, {head_dim}", times, "ours", ">= 1.6", ours="int8", limit_name=small[1], limit=small[0]),
    ]
