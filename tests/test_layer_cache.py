"""The caches of a TransformerLayer: shared by the layers of a model, or made by a layer for itself."""

from __future__ import annotations

import copy

import pytest
import torch

from atb_modules import (
    KVCacheManager,
    OutOfPagesError,
    RotaryConfig,
    TransformerLayer,
)


def test_inference_mode_manages_its_cache():
    layer = TransformerLayer(32, 4, num_kv_heads=2, rotary=RotaryConfig(), mode="inference")
    x = torch.randn(2, 12, 32)
    full = layer(x)
    pieces = []
    for start, end in ((0, 6), (6, 7), (7, 8), (8, 12)):
        out, cache = layer(x[:, start:end], use_cache=True)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, atol=1e-5, rtol=1e-5)
    assert cache is layer.kv_cache_manager and cache.lengths == (12, 12)
    cache.reset()
    again, _ = layer(x, use_cache=True)
    torch.testing.assert_close(again, full, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="batch"):
        layer(x[:1], use_cache=True)


def test_layers_share_one_manager():
    cache = KVCacheManager(32, 4, 3, 4, 8, torch.float32, num_pages=30)
    layers = [
        TransformerLayer(32, 4, rotary=RotaryConfig(), mode="inference", kv_cache_manager=cache) for _ in range(3)
    ]
    assert [layer.layer_idx for layer in layers] == [0, 1, 2]
    x = torch.randn(2, 9, 32)
    expected = x
    for layer in layers:
        expected = layer(expected)
    cache.begin(2)
    pieces = []
    for start, end in ((0, 5), (5, 6), (6, 9)):
        y = x[:, start:end]
        for layer in layers:
            y, returned = layer(y, use_cache=True)
        pieces.append(y)
    assert returned is cache
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-5, rtol=1e-5)
    assert copy.deepcopy(layers[2]).layer_idx == 2


def test_a_cached_call_never_differentiates_half_the_graph():
    layer = TransformerLayer(32, 4)
    cache = KVCacheManager(32, 4, 1, 4, 8, torch.float32)
    out = layer(torch.randn(1, 3, 32, requires_grad=True), cache=cache, use_cache=True)
    assert not out[0].requires_grad
    with pytest.raises(ValueError, match="use_cache is True; allowed with mode='inference'"):
        layer(torch.randn(1, 3, 32), use_cache=True)


def inference_layer(**options):
    return TransformerLayer(32, 4, num_kv_heads=2, rotary=RotaryConfig(), mode="inference", **options)


@pytest.mark.parametrize("start", ["reset", "begin"])
def test_an_own_cache_grows_for_a_larger_batch_while_it_is_empty(start):
    layer = inference_layer()
    x = torch.randn(3, 4096, 32)
    _, cache = layer(x[:1, :9], use_cache=True)
    assert cache.num_pages == 64
    cache.reset() if start == "reset" else cache.begin(3)
    if start == "begin":
        out, returned = layer(x[:, :5], use_cache=True)
        assert returned is cache and cache.lengths == (5, 5, 5)
        cache.begin(0)
    pieces = [layer(part, use_cache=True)[0] for part in x.split([4000, 95, 1], dim=1)]
    assert layer.kv_cache_manager is cache and cache.lengths == (4096,) * 3 and cache.num_pages == 192
    torch.testing.assert_close(torch.cat(pieces, dim=1), layer(x), atol=1e-4, rtol=1e-4)


def test_a_row_joins_an_own_cache_or_learns_how_to():
    layer = inference_layer()
    x = torch.randn(2, 4000, 32)
    layer(x[:1, :3000], use_cache=True)
    cache = layer.kv_cache_manager
    with pytest.raises(ValueError, match=r"batch 2; .* own cache has 1 open .*cache.join .*, cache.begin\(2\) starts"):
        layer(x, use_cache=True)
    assert cache.join() == [1]
    mask = torch.ones(2, 700, dtype=torch.long)
    mask[0, 200:] = 0
    step = torch.stack([x[0, 3000:3700], x[1, :700]])
    out, _ = layer(step, mask, use_cache=True)
    assert cache.lengths == (3200, 700)
    torch.testing.assert_close(out[0, :200], layer(x[:1, :3200])[0, 3000:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out[1], layer(x[1:, :700])[0], atol=1e-4, rtol=1e-4)
    with pytest.raises(
        OutOfPagesError, match=r"the layer made itself, with room for 1 x 4096 .*kv_cache_manager=.*cache="
    ):
        layer(x[:, :500], use_cache=True)
    assert cache.lengths == (3200, 700)
    larger = KVCacheManager(4096, 64, 1, 4, 8, torch.float32, num_kv_heads=2, num_pages=128)
    torch.testing.assert_close(layer(x, cache=larger), layer(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layer_idx", [None, 0, 3])
def test_an_own_cache_serves_the_layer_whatever_its_index(layer_idx):
    layer = inference_layer(layer_idx=layer_idx)
    x = torch.randn(2, 8, 32)
    expected = layer(x)
    first, cache = layer(x[:, :5], use_cache=True)
    second = layer(x[:, 5:6], cache=cache)
    layer = copy.deepcopy(layer)
    third, _ = layer(x[:, 6:], use_cache=True)
    torch.testing.assert_close(torch.cat([first, second, third], dim=1), expected, atol=1e-5, rtol=1e-5)
    assert layer.layer_idx == layer_idx and cache.num_layers == 1
    shared = KVCacheManager(16, 4, 4, 4, 8, torch.float32, num_kv_heads=2, num_pages=8)
    torch.testing.assert_close(layer(x, cache=shared), expected, atol=1e-5, rtol=1e-5)
    assert layer.layer_idx == (layer_idx or 0)


def test_an_own_cache_is_no_place_for_another_layer():
    first, second = inference_layer(), inference_layer()
    x = torch.randn(2, 8, 32)
    y, cache = first(x, use_cache=True)
    with pytest.raises(ValueError, match="num_layers=1 layers have already been registered"):
        second(y, cache=cache)
    assert cache.lengths == (8, 8)


def test_a_failing_call_leaves_an_own_cache_as_it_was():
    layer = inference_layer(layer_idx=2)
    x = torch.randn(2, 8, 32)
    for begin, end in ((0, 5), (5, 8)):
        handle = layer.mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            layer(x[:, begin:end], use_cache=True)
        handle.remove()
        assert layer.kv_cache_manager.lengths == ((5, 5) if begin else ())
        out, _ = layer(x[:, begin:end], use_cache=True)
        torch.testing.assert_close(out, layer(x)[:, begin:end], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5, 32), (2, 0, 32)], ids=["no rows", "no tokens"])
def test_nothing_new_is_a_step_too(shape):
    layer = inference_layer()
    out, cache = layer(torch.randn(shape), use_cache=True)
    assert out.shape == shape and cache.lengths == (0,) * shape[0]
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(layer(x, use_cache=True)[0], layer(x), atol=1e-5, rtol=1e-5)
