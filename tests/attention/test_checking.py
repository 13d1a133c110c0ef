"""What Attention is built from and called with: each bad argument is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from atb_modules import Attention, AttentionConfig, KVCacheManager, RotaryConfig

ATTENTION = Attention(32, 4, rotary=RotaryConfig())
CROSS = Attention(32, 4, cross=True)
X = torch.randn(2, 5, 32)


def cache(batch=2):
    manager = KVCacheManager(32, 4, 1, 4, 8, torch.float32, num_pages=40)
    manager.begin(batch)
    return manager


def linears(*sizes):
    return [nn.Linear(*size) for size in sizes]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cross": 1}, TypeError, "cross is 1"),
        ({"rotary": 10000.0}, TypeError, "rotary is 10000.0 .*allowed: RotaryConfig or None"),
        ({"config": {"sinks": True}}, TypeError, "config is .*allowed: AttentionConfig or None"),
        ({"layer_idx": -1}, ValueError, "layer_idx is -1"),
        ({"layer_idx": 1.0}, TypeError, "layer_idx is 1.0"),
        ({"layer_idx": True}, TypeError, "layer_idx is True"),
        ({"attention_type": None}, ValueError, "attention_type is None"),
    ],
)
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        Attention(32, 4, **options)
    with pytest.raises(error, match=message):
        Attention.from_projections(*linears(*[(32, 32)] * 4), num_heads=4, **options)


@pytest.mark.parametrize(
    ("projections", "options", "error", "message"),
    [
        (
            linears((32, 32), (32, 32), (32, 32), (16, 32)),
            {},
            ValueError,
            "o_proj takes 16 channels; the heads give 32",
        ),
        (linears((32, 32), (32, 32), (32, 16), (32, 32)), {}, ValueError, "v_proj has 16 output channels"),
        (linears((32, 32), (32, 32), (16, 32), (32, 32)), {}, ValueError, "k_proj 32, v_proj 16; they must be equal"),
        (linears((16, 32), (32, 32), (32, 32), (32, 32)), {}, ValueError, "q_proj 16, k_proj 32, v_proj 32"),
        ([object(), *linears(*[(32, 32)] * 3)], {}, TypeError, r"q_proj is .*\(object\); allowed: Module"),
        ([*linears(*[(32, 32)] * 3), torch.eye(32)], {}, TypeError, "o_proj is .*allowed: Module"),
        ([nn.ReLU(), nn.ReLU(), nn.ReLU()], {}, TypeError, "ReLU has neither out_features nor weight"),
        (linears(*[(32, 32)] * 4), {"num_heads": 0}, ValueError, "num_heads is 0; allowed: a positive int"),
        (linears(*[(32, 32)] * 4), {"num_heads": 4.0}, TypeError, "num_heads is 4.0"),
        (linears(*[(32, 32)] * 4), {"num_kv_heads": 0}, ValueError, "num_kv_heads is 0"),
        (linears(*[(32, 32)] * 4), {"num_kv_heads": 3}, ValueError, "num_kv_heads is 3; allowed: a divisor of"),
        (
            [],
            {"qkv_proj": nn.Linear(32, 64), "num_kv_heads": 2, "qkv_layout": "per_head"},
            ValueError,
            "qkv_layout 'per_head' needs num_kv_heads 2 equal to num_heads 4",
        ),
        ([], {"qkv_proj": nn.Linear(32, 96), "qkv_layout": None}, ValueError, "qkv_layout is None"),
        ([], {"qkv_proj": "qkv"}, TypeError, "qkv_proj is 'qkv'"),
    ],
)
def test_projections(projections, options, error, message):
    with pytest.raises(error, match=message):
        Attention.from_projections(*projections, **{"num_heads": 4} | options)


def test_cross_attention_takes_another_width_for_keys_and_values():
    attention = Attention.from_projections(*linears((16, 32), (24, 32), (24, 32), (32, 16)), num_heads=4, cross=True)
    assert attention(torch.randn(1, 2, 16), key_value_states=torch.randn(1, 3, 24)).shape == (1, 2, 16)


def test_norms_over_quantised_projections_are_floating():
    class Quantised(nn.Module):
        out_features = in_features = 32

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32, 32, dtype=torch.int8), requires_grad=False)

        def forward(self, x):
            return x @ self.weight.to(x.dtype).t()

    options = AttentionConfig(qk_norm="before_rotary", sinks=True)
    attention = Attention.from_projections(Quantised(), Quantised(), Quantised(), None, num_heads=4, config=options)
    assert attention.q_norm.weight.dtype == attention.sinks.dtype == torch.get_default_dtype()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X.numpy(),), TypeError, "hidden_states is ndarray; allowed: a tensor"),
        ((None,), TypeError, "hidden_states is NoneType"),
        ((X[0, 0],), ValueError, r"hidden_states has shape \(32,\); allowed: \(batch, seq, hidden\)"),
        ((X[None],), ValueError, r"hidden_states has shape \(1, 2, 5, 32\)"),
        ((X.long(),), TypeError, "torch.int64; allowed: a floating dtype"),
        ((X, np.ones((2, 5))), TypeError, "attention_mask is ndarray; allowed: a tensor or None"),
        ((X, [[1] * 5] * 2), TypeError, "attention_mask is list"),
        ((X, torch.ones(2, 5)), TypeError, "attention_mask is torch.float32"),
        ((X, torch.ones(2, 5, dtype=torch.complex64)), TypeError, "attention_mask is torch.complex64"),
        ((X, None, np.arange(5)), TypeError, "position_ids is ndarray; allowed: a tensor of integers"),
        ((X, None, torch.zeros(5)), TypeError, "position_ids is torch.float32; allowed: torch.int64"),
        ((X, None, torch.zeros(5, dtype=torch.bool)), TypeError, "position_ids is torch.bool"),
        (
            (X, None, torch.zeros(3, 5, dtype=torch.int64)),
            ValueError,
            r"position_ids has shape \(3, 5\); allowed: \(5,\) or \(1, 5\) or \(2, 5\)",
        ),
        ((X, None, torch.arange(4)), ValueError, r"position_ids has shape \(4,\)"),
        ((X, None, torch.tensor(3)), ValueError, r"position_ids has shape \(\)"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_calls(arguments, error, message, cached):
    kv_cache = cache() if cached else None
    with pytest.raises(error, match=message):
        ATTENTION(*arguments, kv_cache=kv_cache)
    assert not cached or kv_cache.lengths == (0, 0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rotary_tables": 3}, TypeError, r"rotary_tables is int; allowed: the pair \(cos, sin\)"),
        ({"rotary_tables": (np.zeros((10, 4)), np.zeros((10, 4)))}, TypeError, "rotary_tables are ndarray and ndarray"),
        (
            {"rotary_tables": (torch.zeros(4, 4), torch.zeros(4, 4))},
            ValueError,
            "cos has 4 tokens|allowed: .10, rotary_dim",
        ),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_rotary_tables(options, error, message, cached):
    with pytest.raises(error, match=message):
        ATTENTION(X, kv_cache=cache() if cached else None, **options)


@pytest.mark.parametrize("value", [object(), {}, KVCacheManager, (1, 2)])
def test_the_cache_is_a_manager(value):
    with pytest.raises(TypeError, match="kv_cache is .*; allowed: KVCacheManager or None"):
        ATTENTION(X, kv_cache=value)


def test_the_cache_is_where_the_tokens_are():
    kv_cache = KVCacheManager(32, 4, 1, 4, 8, torch.float32, device="meta")
    with pytest.raises(ValueError, match="kv_cache is on meta; hidden_states is on cpu"):
        ATTENTION(X, kv_cache=kv_cache)


def test_steps_belong_to_the_cache_and_are_its_newest():
    kv_cache = cache()
    with pytest.raises(TypeError, match="cache_step is object; allowed: the CacheStep"):
        ATTENTION(X, kv_cache=kv_cache, cache_step=object())
    step = kv_cache.step(5)
    with pytest.raises(ValueError, match="cache_step of 10 tokens is not the newest one of this cache"):
        ATTENTION(X, kv_cache=cache(), cache_step=step)
    for count in (9, 11):
        with pytest.raises(ValueError, match=f"hidden_states has {count} packed tokens; cache_step has 10"):
            ATTENTION(torch.randn(count, 32), kv_cache=kv_cache, cache_step=step)
    with pytest.raises(ValueError, match=r"position_ids has shape \(9,\); allowed: \(10,\)"):
        ATTENTION(torch.randn(10, 32), position_ids=torch.arange(9), kv_cache=kv_cache, cache_step=step)
    ATTENTION(torch.randn(10, 32), kv_cache=kv_cache, cache_step=step)
    kv_cache.step(1)
    with pytest.raises(ValueError, match="not the newest one of this cache, or the cache was changed"):
        ATTENTION(torch.randn(10, 32), kv_cache=kv_cache, cache_step=step)


@pytest.mark.parametrize(
    ("states", "error", "message"),
    [
        (np.zeros((2, 3, 32)), TypeError, "key_value_states is ndarray; allowed: a tensor"),
        (X[0], ValueError, r"key_value_states has shape \(5, 32\); allowed: \(2, seq, kv_hidden_size\)"),
        (torch.randn(3, 5, 32), ValueError, r"key_value_states has shape \(3, 5, 32\)"),
        ((X, X, X), TypeError, "key_value_states is tuple; allowed: .*the pair"),
        ((X, X), ValueError, r"key_value_states' keys have shape \(2, 5, 32\); allowed: \(2, seq, 4, 8\)"),
        ((X.reshape(2, 5, 4, 8), None), TypeError, "key_value_states' values is NoneType"),
    ],
)
def test_other_sequences(states, error, message):
    with pytest.raises(error, match=message):
        CROSS(X, key_value_states=states)


def test_only_tensors_are_projected():
    with pytest.raises(TypeError, match="key_value_states is ndarray"):
        CROSS.project_keys_values(np.zeros((2, 3, 32)))
