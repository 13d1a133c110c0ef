"""Attention as a module: projections of every origin, cross attention, padding, caches, options, errors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from atb_modules import Attention, AttentionConfig, KVCacheManager, QKVLayout, RotaryConfig, convert_qkv_weight
from atb_modules.attention import alibi_slopes, split_qkv


def test_unfused_state_dict_loads_into_the_fused_weight():
    attention = Attention(32, 4, num_kv_heads=2, config=AttentionConfig(qkv_bias=True))
    q, k, v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
    state = {f"qkv.{n}_proj.{p}": getattr(m, p) for n, m in (("q", q), ("k", k), ("v", v)) for p in ("weight", "bias")}
    state["o_proj.weight"] = torch.eye(32)
    attention.load_state_dict(state)
    theirs = Attention.from_projections(q, k, v, nn.Identity(), num_heads=4, num_kv_heads=2)
    theirs.spec = attention.spec
    x = torch.randn(2, 6, 32)
    torch.testing.assert_close(attention(x), theirs(x))
    del state["qkv.k_proj.weight"]
    with pytest.raises(ValueError, match="k_proj.weight; qkv_proj needs all"):
        attention.load_state_dict(state)


def test_from_projections_equals_multihead_attention_of_torch():
    reference = nn.MultiheadAttention(24, 3, batch_first=True)
    x = torch.randn(2, 5, 24)
    padding = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    expected, _ = reference(x, x, x, key_padding_mask=padding == 0, need_weights=False)
    qkv_proj = nn.Linear(24, 72)
    qkv_proj.weight, qkv_proj.bias = reference.in_proj_weight, reference.in_proj_bias
    mine = Attention.from_projections(
        qkv_proj=qkv_proj, o_proj=reference.out_proj, num_heads=3, config=AttentionConfig(causal=False)
    )
    out = mine(hidden_states=x, attention_mask=padding)
    torch.testing.assert_close(out[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[1, :3], expected[1, :3], atol=1e-5, rtol=1e-5)
    assert mine.qkv.qkv_proj.weight is reference.in_proj_weight


@pytest.mark.parametrize("layout", list(QKVLayout), ids=str)
def test_foreign_layouts(layout):
    kv_heads = 4 if layout is QKVLayout.PER_HEAD else 2
    foreign = nn.Linear(32, (4 + 2 * kv_heads) * 8)
    ours = nn.Linear(32, (4 + 2 * kv_heads) * 8)
    with torch.no_grad():
        ours.weight.copy_(convert_qkv_weight(foreign.weight, 4, kv_heads, 8, layout))
        ours.bias.copy_(convert_qkv_weight(foreign.bias, 4, kv_heads, 8, layout))
    options = {"num_heads": 4, "num_kv_heads": kv_heads, "rotary": RotaryConfig()}
    x = torch.randn(2, 6, 32)
    a = Attention.from_projections(qkv_proj=foreign, qkv_layout=layout, **options)(x)
    b = Attention.from_projections(qkv_proj=ours, **options)(x)
    torch.testing.assert_close(a, b)


def test_gpt_neox_layout_is_per_head():
    """The layout as GPT-NeoX in transformers splits it: view(heads, 3 * dim).chunk(3)."""
    product = torch.randn(2, 5, 4 * 3 * 8)
    q, k, v = (t.reshape(2, 5, 4, 8) for t in product.view(2, 5, 4, 24).chunk(3, dim=-1))
    for a, b in zip(split_qkv(product, 4, 4, 8, "per_head"), (q, k, v), strict=True):
        assert torch.equal(a, b)


def test_cross_attention_and_its_precomputed_keys():
    attention = Attention(32, 4, num_kv_heads=2, cross=True, kv_hidden_size=20)
    x, other = torch.randn(2, 5, 32), torch.randn(2, 7, 20)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    out = attention(x, mask, key_value_states=other)
    torch.testing.assert_close(out, attention(x, mask, key_value_states=attention.project_keys_values(other)))
    changed = other.clone()
    changed[1, 4:] = 99.0
    torch.testing.assert_close(attention(x, mask, key_value_states=changed), out)
    with pytest.raises(ValueError, match="key_value_states is None"):
        attention(x)
    with pytest.raises(ValueError, match="key_value_states is given"):
        Attention(32, 4)(x, key_value_states=x)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_real_tokens(side):
    attention = Attention(32, 4, num_kv_heads=2, rotary=RotaryConfig())
    x = torch.randn(1, 5, 32)
    pad = torch.full((1, 3, 32), 7.0)
    padded = torch.cat([pad, x] if side == "left" else [x, pad], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 5 if side == "left" else [1] * 5 + [0] * 3])
    real = mask[0].bool()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = attention(padded, mask, positions)
    torch.testing.assert_close(out[:, real], attention(x), atol=1e-5, rtol=1e-5)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("order", ["before_rotary", "after_rotary", None])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("window", [None, (3, None)])
def test_cached_steps_equal_one_dense_call(order, layout, window):
    config = AttentionConfig(qk_norm=order, window=window, sinks=True, softcap=9.0)
    attention = Attention(32, 4, num_kv_heads=2, rotary=RotaryConfig(layout=layout, partial_factor=0.5), config=config)
    nn.init.normal_(attention.sinks)
    cache = KVCacheManager(64, 4, 1, 4, 8, torch.float32, num_kv_heads=2, num_pages=40)
    cache.begin(2)
    x = torch.randn(2, 14, 32)
    dense = attention(x)
    pieces = [attention(x[:, a:b], kv_cache=cache) for a, b in ((0, 5), (5, 6), (6, 7), (7, 14))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), dense, atol=1e-5, rtol=1e-5)


def test_ragged_cached_prefill_with_a_padding_mask():
    attention = Attention(32, 4, rotary=RotaryConfig())
    cache = KVCacheManager(64, 4, 1, 4, 8, torch.float32, num_pages=40)
    cache.begin(2)
    x = torch.randn(2, 6, 32)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    out = attention(x, mask, kv_cache=cache)
    torch.testing.assert_close(out[0, 2:], attention(x[:1, 2:])[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[1], attention(x[1:])[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(out[0, :2], torch.zeros(2, 32))
    assert cache.lengths == (4, 6)


def test_a_users_projection_may_hand_out_its_own_memory():
    """The cached road rotates queries in place; an Identity projection must not have its input changed."""
    attention = Attention.from_projections(
        nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), None, num_heads=2, rotary=RotaryConfig()
    )
    attention.qkv.q_proj = nn.Identity()
    cache = KVCacheManager(16, 4, 1, 2, 8, torch.float32)
    cache.begin(1)
    x = torch.randn(1, 3, 16)
    before = x.clone()
    attention(x, kv_cache=cache)
    assert torch.equal(x, before)


def test_gradients_reach_every_parameter():
    config = AttentionConfig(qkv_bias=True, out_bias=True, sinks=True, qk_norm="before_rotary")
    attention = Attention(32, 4, num_kv_heads=2, rotary=RotaryConfig(), config=config)
    attention(torch.randn(2, 6, 32)).square().sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_alibi_slopes_are_those_of_the_paper():
    assert alibi_slopes(8) == tuple(2.0 ** -(i + 1) for i in range(8))
    assert len(alibi_slopes(12)) == 12 and alibi_slopes(12)[8] == 2.0**-0.5


def test_attention_dropout_acts_in_training_alone():
    attention = Attention(32, 4, config=AttentionConfig(dropout=0.5))
    x = torch.randn(2, 6, 32)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


def test_deepcopy_keeps_the_layer_index():
    assert copy.deepcopy(Attention(32, 4, layer_idx=3)).layer_idx == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Attention(30, 4), "num_heads is 4; it must divide hidden_size 30"),
        (lambda: Attention(32, 4, num_kv_heads=3), "num_kv_heads is 3; allowed: a divisor of num_heads 4"),
        (lambda: Attention(32, 0), "num_heads is 0"),
        (lambda: Attention(32, 4, head_dim=-1), "head_dim is -1"),
        (lambda: Attention(32, 4, attention_type="fast"), "attention_type is 'fast'"),
        (lambda: Attention(32, 4, kv_hidden_size=8), "kv_hidden_size is 8; self attention"),
        (lambda: AttentionConfig(window=(-1, 0)), "window is"),
        (lambda: AttentionConfig(softcap=0.0), "softcap is 0.0"),
        (lambda: AttentionConfig(dropout=1.0), "dropout is 1.0"),
        (lambda: AttentionConfig(qk_norm="late"), "qk_norm is 'late'"),
        (lambda: Attention.from_projections(num_heads=2), "give either q_proj"),
        (
            lambda: Attention.from_projections(nn.Linear(4, 5), nn.Linear(4, 4), nn.Linear(4, 4), num_heads=2),
            "5 output",
        ),
        (lambda: Attention.from_projections(nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(4, 4), num_heads=2), "k_proj"),
        (lambda: Attention(32, 4)(torch.randn(3, 32)), "hidden_states has shape"),
        (lambda: Attention(32, 4)(torch.randn(1, 3, 32), torch.ones(1, 4)), "attention_mask has shape"),
        (lambda: Attention(32, 4)(torch.randn(1, 3, 16)), "x has 16 features"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_unknown_options_are_type_errors():
    with pytest.raises(TypeError):
        Attention(32, 4, sliding_window=5)
    with pytest.raises(TypeError, match="attention_mask is torch.float32"):
        Attention(32, 4)(torch.randn(1, 3, 32), torch.ones(1, 3))
