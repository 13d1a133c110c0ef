"""Latent attention: the absorbed form over a cache against the expanded one and a written-out formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules import (
    KVCacheManager,
    LatentAttention,
    LatentConfig,
    RotaryConfig,
    RotaryScaling,
    TransformerLayer,
    use_strategy,
)
from atb_modules.ops import paged_attention
from atb_modules.spec import AttentionSpec
from atb_modules.testing import fresh_generator

SIZES = {"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}
YARN = RotaryScaling("yarn", factor=8.0, original_max_positions=16, mscale=1.0, mscale_all_dim=0.7)


def build(dtype=torch.float64, q_lora_rank=18, **options):
    module = LatentAttention(32, 3, q_lora_rank=q_lora_rank, dtype=dtype, **SIZES, **options)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def cache_for(module, rows=4, dtype=torch.float64, page_size=4):
    pages = rows * 16
    return KVCacheManager(64, page_size, 1, module.num_heads, module.head_dim, dtype, num_kv_heads=1, num_pages=pages)


def written_out(module, x):
    """The formula head by head and token by token, float64."""
    q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x))) if module.q_lora_rank else module.q_proj(x)
    c, r = module.kv_a_proj_with_mqa(x).split([20, 6], dim=-1)
    c = module.kv_a_layernorm(c)
    cos, sin = module.rotary(torch.arange(x.shape[1]))
    angle = torch.view_as_complex(torch.stack([cos, sin], -1).double())

    def turned(t):
        pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * angle).flatten(-2)

    r, outs = turned(r), []
    weights = module.kv_b_proj.weight.unflatten(0, (3, 24))
    for weight, q_head in zip(weights, q.unflatten(-1, (3, 16)).unbind(-2), strict=True):
        k = torch.cat([c @ weight[:10].t(), r], -1)
        q_head = torch.cat([q_head[..., :10], turned(q_head[..., 10:])], -1)
        scores = module.spec.scale * q_head @ k.mT
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
        outs.append(scores.softmax(-1) @ (c @ weight[10:].t()))
    return module.o_proj(torch.cat(outs, -1))


@pytest.mark.parametrize("q_lora_rank", [None, 18])
@pytest.mark.parametrize("scaling", [None, YARN])
def test_expanded_and_absorbed_are_the_formula(q_lora_rank, scaling):
    rotary = RotaryConfig(layout="interleaved", scaling=scaling)
    module = build(q_lora_rank=q_lora_rank, rotary=rotary)
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    expected = written_out(module, x)
    torch.testing.assert_close(module(x), expected, atol=1e-10, rtol=1e-10)
    cache = cache_for(module)
    tokens = [module(x[:, i : i + 1], kv_cache=cache) for i in range(11)]
    torch.testing.assert_close(torch.cat(tokens, 1), expected, atol=1e-10, rtol=1e-10)


def test_yarn_scales_the_scores():
    module = build(rotary=RotaryConfig(layout="interleaved", scaling=YARN))
    assert module.spec.scale == pytest.approx(16**-0.5 * (0.07 * torch.tensor(8.0).log().item() + 1) ** 2)
    assert build().spec.scale == pytest.approx(16**-0.5)
    assert build(config=LatentConfig(scale=0.5)).spec.scale == 0.5


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    page_size=st.integers(1, 7),
)
def test_ragged_steps_are_each_row_alone(steps, page_size):
    generator = fresh_generator()
    module = build()
    totals = [sum(step[row] for step in steps) for row in range(3)]
    x = [torch.randn(1, total, 32, generator=generator, dtype=torch.float64) for total in totals]
    cache = cache_for(module, page_size=page_size)
    cache.begin(3)
    got: list[list[torch.Tensor]] = [[], [], []]
    done = [0, 0, 0]
    for lengths in steps:
        step = cache.step(lengths)
        parts = [x[row][0, done[row] : done[row] + n] for row, n in enumerate(lengths)]
        out = module(torch.cat(parts), kv_cache=cache, cache_step=step, cache_layer=0)
        for row, piece in enumerate(out.split(lengths)):
            got[row].append(piece)
            done[row] += lengths[row]
    for row, total in enumerate(totals):
        if total:
            torch.testing.assert_close(torch.cat(got[row]), module(x[row])[0], atol=1e-10, rtol=1e-10)


def test_padding_on_the_left():
    module = build()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    dense = module(x, mask, positions)
    torch.testing.assert_close(dense[:1, 3:], module(x[:1, 3:]), atol=1e-10, rtol=1e-10)
    cache = cache_for(module)
    cached = module(x, mask, kv_cache=cache)
    torch.testing.assert_close(cached[mask.bool()], dense[mask.bool()], atol=1e-10, rtol=1e-10)
    assert not cached[0, :3].any() and cache.lengths == (4, 7)


@pytest.mark.parametrize("attention", ["reference", "eager", "sdpa", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_strategy_decodes_alike(attention, dtype):
    """The native kernel reads one page pool as keys and as values."""
    module = build(dtype, attention_type="flash")
    x = torch.randn(2, 9, 32).to(dtype)
    wide = build()
    wide.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    expected = wide(x.double())
    cache = cache_for(module, dtype=dtype)
    first = module(x[:, :5], kv_cache=cache)
    with use_strategy(attention=attention):
        rest = [module(x[:, i : i + 1], kv_cache=cache) for i in range(5, 9)]
    got = torch.cat([first, *rest], 1).double()
    step = torch.finfo(dtype).eps
    assert (got - expected).abs().max() <= 40 * step * expected.abs().max()


@pytest.mark.parametrize("strategy", ["reference", "eager", "sdpa", "cpu"])
def test_the_values_may_be_the_first_channels_of_the_keys(strategy):
    generator = fresh_generator()
    q, pages = torch.randn(3, 4, 24, generator=generator), torch.randn(5, 1, 8, 24, generator=generator)
    table = torch.tensor([[3, 1], [4, -1]], dtype=torch.int32)
    lengths, starts = torch.tensor([13, 6], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32)
    arguments = (q, pages, pages, table, lengths, starts, AttentionSpec(causal=True))
    options = {"return_lse": strategy != "sdpa", "strategy": strategy}
    whole, lse = paged_attention(*arguments, **options)
    out, its_lse = paged_attention(*arguments, value_dim=20, **options)
    assert torch.equal(out, whole[..., :20])
    assert its_lse is lse is None if strategy == "sdpa" else torch.equal(its_lse, lse)
    empty, _ = paged_attention(
        q[:0], pages, pages, table, lengths, starts * 0, AttentionSpec(causal=True), value_dim=20
    )
    assert empty.shape == (0, 4, 20)
    for wrong, error in ((0, ValueError), (25, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match=f"value_dim is {wrong}"):
            paged_attention(*arguments, value_dim=wrong)


def test_gradients():
    module = build()
    x = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    leaves = (x, *module.parameters())
    weight = torch.randn(2, 5, 32, dtype=torch.float64)
    got = torch.autograd.grad((module(x) * weight).sum(), leaves)
    want = torch.autograd.grad((written_out(module, x) * weight).sum(), leaves)
    for mine, truth in zip(got, want, strict=True):
        torch.testing.assert_close(mine, truth, atol=1e-8, rtol=1e-8)


def test_in_the_place_of_a_layers_attention():
    layer = TransformerLayer(32, 3, 16, mode="inference", dtype=torch.float64)
    layer.attention = build()
    layer.requires_grad_(False)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    expected = layer(x)
    pieces, cache = [], None
    for part in x.split([5, 1, 3], dim=1):
        out, cache = layer(part, use_cache=True)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, atol=1e-10, rtol=1e-10)
    assert cache.num_kv_heads == 1 and cache.head_dim == 26


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LatentAttention(32, 0, **SIZES), ValueError, "num_heads is 0"),
        (lambda: LatentAttention(32, 2, **(SIZES | {"v_head_dim": 2.0})), TypeError, "v_head_dim is 2.0"),
        (lambda: LatentAttention(32, 2, **(SIZES | {"qk_rope_head_dim": 5})), ValueError, "head_dim is 5"),
        (lambda: build(q_lora_rank=0), ValueError, "q_lora_rank is 0"),
        (lambda: build(config={"bias": True}), TypeError, "config is .*allowed: LatentConfig or None"),
        (lambda: LatentConfig(dropout=1.0), ValueError, "dropout is 1.0"),
        (lambda: LatentConfig(bias=1), TypeError, "bias is 1"),
        (lambda: build()(torch.randn(3, 32)), ValueError, "hidden_states has shape"),
        (
            lambda: build()(torch.randn(1, 2, 32).double(), kv_cache=KVCacheManager(8, 4, 1, 3, 16, torch.float64)),
            ValueError,
            "3 key and value heads|head",
        ),
        (
            lambda: build()(torch.randn(1, 2, 32).double(), cache_step=object()),
            ValueError,
            "cache_step is given without",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_what_cannot_be_absorbed_is_named():
    """Hooks and adapters of the up projection act where it is called; decoding does not call it."""
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    module, x = LatentAttention(16, 2, **sizes), torch.randn(1, 3, 16)
    cache = KVCacheManager(16, 4, 1, 2, module.head_dim, torch.float32, num_kv_heads=1)
    handle = module.kv_b_proj.register_forward_hook(lambda _, __, out: 2 * out)
    module(x, kv_cache=cache)
    with pytest.raises(ValueError, match="kv_b_proj has hooks"):
        module(x[:, :1], kv_cache=cache)
    assert cache.lengths == (3,)
    handle.remove()
    module.kv_b_proj = torch.nn.Sequential(module.kv_b_proj)
    with pytest.raises(ValueError, match="kv_b_proj has the class Sequential"):
        module(x[:, :1], kv_cache=cache)
