"""Prefill: one layer at 1,024 tokens against its matrix products, and SmolLM2's prompt of 512 tokens."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import atb_modules as atb
from benchmarks import smollm2
from benchmarks.timing import Row, interleave, row

TOKENS = 1024
ROUNDS = 15


def rows() -> list[Row]:
    """Layers of two sizes in float32 and bfloat16, then the whole model."""
    lines = []
    for hidden in (1024, 2048):
        lines += _layer(hidden)
    return lines + _model()


@torch.inference_mode()
def _layer(hidden: int) -> list[Row]:
    heads, kv_heads, intermediate = hidden // 64, hidden // 256, hidden * 11 // 4
    layer = atb.TransformerLayer(
        hidden, heads, 64, intermediate, num_kv_heads=kv_heads, rotary=atb.RotaryConfig(), mode="inference"
    )
    half = copy.deepcopy(layer).bfloat16()
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        attn_implementation="sdpa",
    )
    peer = LlamaDecoderLayer(config, 0).eval()
    peer_half = copy.deepcopy(peer).bfloat16()
    compiled = torch.compile(copy.deepcopy(peer))
    tables = LlamaRotaryEmbedding(config)(torch.empty(0), torch.arange(TOKENS)[None])
    half_tables = tuple(t.bfloat16() for t in tables)
    x = torch.randn(1, TOKENS, hidden)
    x_half = x.bfloat16()
    qkv, merged = layer.attention.qkv.qkv_proj.weight, torch.randn(1, TOKENS, heads * 64)
    q, k, v = torch.randn(1, heads, TOKENS, 64), *torch.randn(2, 1, kv_heads, TOKENS, 64)
    inner = torch.randn(1, TOKENS, intermediate)

    def floor() -> None:
        F.linear(x, qkv)
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        F.linear(merged, layer.attention.o_proj.weight)
        F.linear(x, layer.mlp.gate_up_proj.weight)
        F.linear(inner, layer.mlp.down_proj.weight)

    times = interleave(
        {
            "ours": lambda: layer(x),
            "products + SDPA": floor,
            "transformers SDPA": lambda: peer(x, position_embeddings=tables),
            "transformers compiled": lambda: compiled(x, position_embeddings=tables),
            "ours bfloat16": lambda: half(x_half),
            "transformers bfloat16": lambda: peer_half(x_half, position_embeddings=half_tables),
        },
        ROUNDS,
        settle=True,
    )
    name = f"prefill layer, hidden {hidden}, {TOKENS} tokens"
    return [
        row(f"{name}, float32", times, "products + SDPA", ">= 0.926"),
        row(f"{name}, float32", times, "transformers SDPA", "> 1"),
        row(f"{name}, float32", times, "transformers compiled", ">= 0.971"),
        row(f"{name}, bfloat16 against float32", times, "ours", ">= 0.909", ours="ours bfloat16"),
        row(f"{name}, bfloat16", times, "transformers bfloat16", ">= 4 (*)", ours="ours bfloat16"),
    ]


@torch.inference_mode()
def _model() -> list[Row]:
    model, peer = smollm2.ours(), smollm2.theirs()
    prompt = torch.randint(100, 40000, (1, 512))
    cache = model.new_cache(512)

    def ours() -> None:
        cache.reset()
        cache.begin(1)
        model(prompt, past_key_values=cache)

    times = interleave(
        {"ours": ours, "transformers SDPA": lambda: peer(prompt, past_key_values=DynamicCache(config=peer.config))},
        ROUNDS,
    )
    return [row("prefill SmolLM2, 512 tokens, float32", times, "transformers SDPA", ">= 1")]
