"""Layers that are called by themselves and share steps of one cache: a failure anywhere leaves no step half open."""

import pytest
import torch

from atb_modules import Attention, KVCacheManager, RotaryConfig, TransformerLayer


class _Refused(Exception):
    pass


def refuse(*_):
    raise _Refused


def built(count=3, **options):
    cache = KVCacheManager(64, 4, count, 4, 8, torch.float32, num_pages=40)
    return cache, [
        TransformerLayer(32, 4, rotary=RotaryConfig(), mode="inference", kv_cache_manager=cache, **options)
        for _ in range(count)
    ]


def run(layers, x):
    for layer in layers:
        x, _ = layer(x, use_cache=True)
    return x


def dense(layers, x):
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("part", ["attention_norm", "attention.qkv", "attention.o_proj", "mlp", "mlp_norm"])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("held", [0, 5])
def test_a_layer_that_raises_takes_the_shared_step_back(failing, part, held):
    cache, layers = built()
    x = torch.randn(2, 12, 32)
    expected = dense(layers, x)
    pieces = [run(layers, x[:, :held])] if held else []
    handle = layers[failing].get_submodule(part).register_forward_pre_hook(refuse)
    for _ in range(2):
        with pytest.raises(_Refused):
            run(layers, x[:, held:7])
        assert cache.lengths == ((held, held) if held else ())
        assert cache.memory_stats().groups[0].pages_used == (4 if held else 0)
    handle.remove()
    pieces += [run(layers, x[:, held:7]), run(layers, x[:, 7:8]), run(layers, x[:, 8:])]
    assert cache.lengths == (12, 12)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-5, rtol=1e-5)


def test_arguments_that_a_later_layer_refuses_take_the_step_back_too():
    cache, layers = built()
    x = torch.randn(2, 6, 32)
    with pytest.raises(ValueError, match="hidden_states has 16 channels"):
        layers[1](layers[0](x, use_cache=True)[0][..., :16], use_cache=True)
    assert cache.batch_size == 0
    with pytest.raises(ValueError, match="layer 1 brings .*3, 3.* tokens, earlier layers .*6, 6"):
        layers[1](layers[0](x, use_cache=True)[0][:, :3], use_cache=True)
    assert cache.batch_size == 0
    torch.testing.assert_close(run(layers, x), dense(layers, x), atol=1e-5, rtol=1e-5)


def test_a_refused_call_of_the_next_step_leaves_the_last_one():
    cache, layers = built()
    x = torch.randn(2, 6, 32)
    run(layers, x[:, :4])
    for bad in (x[:1, 4:], x[:, 4:, :16]):
        with pytest.raises(ValueError, match="hidden_states has"):
            layers[0](bad, use_cache=True)
        assert cache.lengths == (4, 4)
    torch.testing.assert_close(run(layers, x[:, 4:]), dense(layers, x)[:, 4:], atol=1e-5, rtol=1e-5)


def test_only_the_layer_that_began_a_step_begins_it_again():
    cache, layers = built()
    x = torch.randn(2, 6, 32)
    layers[2].mlp.register_forward_pre_hook(refuse)
    with pytest.raises(_Refused):
        run(layers, x)
    with pytest.raises(ValueError, match="layer 1 begins a step, but layer 0 began the last one, which was taken back"):
        layers[1](x, use_cache=True)
    cache.begin(2)
    layers[1](x, use_cache=True)
    assert cache.lengths == (6, 6)


def test_layers_that_take_their_number_in_the_failing_call():
    cache = KVCacheManager(64, 4, 2, 4, 8, torch.float32, num_pages=40)
    first, second = (TransformerLayer(32, 4, mode="inference") for _ in range(2))
    x = torch.randn(1, 3, 32)
    handle = second.mlp.register_forward_pre_hook(refuse)
    with pytest.raises(_Refused):
        second(first(x, cache=cache), cache=cache)
    handle.remove()
    assert cache.batch_size == 0
    torch.testing.assert_close(second(first(x, cache=cache), cache=cache), second(first(x)), atol=1e-5, rtol=1e-5)
    assert cache.lengths == (3,)


def test_attention_by_itself():
    cache = KVCacheManager(64, 4, 2, 4, 8, torch.float32, num_pages=40)
    first, second = Attention(32, 4), Attention(32, 4)
    x = torch.randn(1, 3, 32)
    handle = second.o_proj.register_forward_pre_hook(refuse)
    with pytest.raises(_Refused):
        second(first(x, kv_cache=cache), kv_cache=cache)
    handle.remove()
    assert cache.batch_size == 0
    second(first(x, kv_cache=cache), kv_cache=cache)
    assert cache.lengths == (3,)


def test_a_pool_grows_while_it_holds_nothing():
    cache = KVCacheManager(16, 4, 2, 4, 8, torch.float32, num_pages=4, window=(None, 3))
    assert cache.grow(4) and cache.grow(2) and cache.num_pages == 4
    cache.begin(3)
    assert cache.grow(12) and cache.num_pages == 12 and cache.batch_size == 3
    cache.step(16)
    assert not cache.grow(24) and cache.num_pages == 12
    cache.reset()
    assert cache.grow(24)
    cache.begin(6)
    step = cache.step(16)
    k = torch.randn(96, 4, 8)
    for layer in range(2):
        cache.append(step, layer, k, -k)
    assert torch.equal(cache.gather(0, 5)[0], k[80:].transpose(0, 1))
    with pytest.raises(TypeError, match="num_pages must be an int"):
        cache.grow(2.5)
