"""Layers with a SparseConfig: the words of users, exactness against a masked dense layer, caches, refusals."""

from __future__ import annotations

import pytest
import torch

import atb_modules as atb
from atb_modules import SparseConfig, TransformerLayer
from atb_modules.overlays import Overlays
from atb_modules.strategies import use_strategy

LAYOUT = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1]]
CONFIGS = {
    "window": {"mode": "sliding_window", "window_size": 5},
    "window_global": {"mode": "sliding_window", "window_size": 4, "global_tokens": 3},
    "prefix": {"mode": "prefix_lm", "prefix_length": 7},
    "blocks": {"mode": "block_sparse", "block_size": 8, "block_layout": LAYOUT},
}


def layer_of(sparse, **options):
    torch.manual_seed(0)
    return TransformerLayer(
        48, 4, 12, 96, num_kv_heads=2, attention_type="flash_sparse", sparse_config=sparse, **options
    )


@pytest.mark.parametrize("layer_type", ["decoder", "encoder"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_sparse_layer_is_a_dense_layer_under_its_mask(name, layer_type):
    layer = layer_of(CONFIGS[name], layer_type=layer_type, rotary=atb.RotaryConfig())
    dense = TransformerLayer(48, 4, 12, 96, num_kv_heads=2, layer_type="encoder", rotary=atb.RotaryConfig())
    dense.load_state_dict(layer.state_dict())
    x = torch.randn(2, 29, 48)
    spec = layer.attention.spec
    overlays = None
    if spec.block_size is not None:
        overlays = Overlays(block_mask=layer.attention.block_layout)
    mask = spec.dense_mask(29, 29, overlays=overlays).reshape(1, 1, 29, 29)
    torch.testing.assert_close(layer(x), dense(x, attention_mask=mask), atol=1e-5, rtol=1e-5)
    found = {}
    for strategy in ("reference", "cpu", "eager", "sdpa"):
        with use_strategy(attention=strategy):
            (found[strategy],) = torch.autograd.grad(layer(x).square().mean(), layer.attention.qkv.qkv_proj.weight)
        torch.testing.assert_close(found[strategy], found["reference"], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["window", "window_global", "prefix"])
def test_the_cached_call_equals_the_whole_one(name):
    layer = layer_of(CONFIGS[name], mode="inference", rotary=atb.RotaryConfig())
    x = torch.randn(2, 21, 48)
    whole = layer(x)
    first, cache = layer(x[:, :9], use_cache=True)
    parts = [first]
    for at in (9, 10, 11, 15):
        part, _ = layer(x[:, at : at + 1 if at < 15 else 21] if at != 11 else x[:, 11:15], use_cache=True)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
    assert cache.memory_stats().pages_used


def test_a_prefix_must_come_in_one_call():
    layer = layer_of(CONFIGS["prefix"], mode="inference")
    layer(torch.randn(1, 3, 48), use_cache=True)
    with pytest.raises(ValueError, match="prefix_length 7 needs its prefix in one call"):
        layer(torch.randn(1, 3, 48), use_cache=True)


def test_layouts_are_cut_to_shorter_sequences_and_refused_for_longer_ones_and_caches():
    layer = layer_of(CONFIGS["blocks"], mode="inference")
    x = torch.randn(1, 32, 48)
    torch.testing.assert_close(layer(x[:, :11]), layer(x)[:, :11], atol=1e-5, rtol=1e-5)
    with pytest.raises(
        ValueError, match="block_layout has \\(4, 4\\) blocks of 8; 33 queries and 33 keys need \\(5, 5\\)"
    ):
        layer(torch.randn(1, 33, 48))
    with pytest.raises(ValueError, match="block_sparse"):
        layer(x, use_cache=True)
    assert "block_layout" not in " ".join(layer.state_dict())


def test_compiles_whole():
    layer = layer_of(CONFIGS["window_global"])
    x = torch.randn(1, 40, 48)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "dilated"}, "mode is 'dilated'"),
        ({"mode": "sliding_window"}, "window_size is None; mode 'sliding_window' needs it"),
        ({"mode": "sliding_window", "window_size": -1}, "window_size is -1"),
        ({"mode": "sliding_window", "window_size": 2.5}, "window_size is 2.5"),
        (
            {"mode": "sliding_window", "window_size": 4, "block_size": 4},
            "block_size is 4; mode 'sliding_window' allows",
        ),
        ({"mode": "block_sparse", "block_size": 4}, "block_layout is None"),
        ({"mode": "block_sparse", "block_size": 4, "block_layout": [[1, 0], [1]]}, "block_layout is not a rectangle"),
        ({"mode": "block_sparse", "block_size": 4, "block_layout": [[2]]}, "block_layout has 2"),
        ({"mode": "block_sparse", "block_size": 4, "block_layout": []}, "block_layout is not a rectangle"),
        ({"window_size": 3}, "sparse_config has no 'mode'"),
        ({"mode": "prefix_lm", "prefix": 3}, "sparse_config has 'prefix'"),
        ("sliding_window", "sparse_config is str"),
    ],
    ids=str,
)
def test_what_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        TransformerLayer(48, 4, sparse_config=options)


def test_words_that_need_each_other():
    with pytest.raises(ValueError, match="attention_type is 'flash_sparse' and sparse_config is None"):
        TransformerLayer(48, 4, attention_type="flash_sparse")
    sparse = SparseConfig("sliding_window", window_size=3)
    both = atb.AttentionConfig(window=(3, None), sparse=None)
    with pytest.raises(ValueError, match="window is \\(3, None\\) and window_size 3; give one"):
        TransformerLayer(48, 4, attention=both, sparse_config=sparse)
    with pytest.raises(ValueError, match="sparse_config is given, and attention.sparse too"):
        TransformerLayer(48, 4, attention=atb.AttentionConfig(sparse=sparse), sparse_config=sparse)
    three_heads = SparseConfig("block_sparse", block_size=8, block_layout=[LAYOUT] * 3)
    with pytest.raises(ValueError, match="block_layout has 3 heads; allowed: 1 or num_heads 4"):
        TransformerLayer(48, 4, sparse_config=three_heads)
