"""What a TransformerLayer computes: every placement and kind against a plain composition, torch and the reference."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import atb_modules as atb
from atb_modules import (
    AttentionConfig,
    MLPConfig,
    NormConfig,
    ResidualConfig,
    RotaryConfig,
    TransformerLayer,
)

PLACEMENTS = ["pre", "post", "sandwich", "parallel"]


def plain(layer, x, other=None):
    """The formulas at the top of layer.py, written out."""
    attn = lambda y: layer.attention(y)  # noqa: E731
    cross = lambda y: layer.cross_attention(y, key_value_states=other)  # noqa: E731
    if layer.placement == "parallel":
        return x + attn(layer.attention_norm(x)) + layer.mlp(layer.attention_norm(x))
    if layer.placement == "post":
        x = layer.attention_norm(x + attn(x))
        if other is not None:
            x = layer.cross_norm(x + cross(x))
        return layer.mlp_norm(x + layer.mlp(x))
    sandwich = layer.placement == "sandwich"
    y = attn(layer.attention_norm(x))
    x = x + (layer.attention_post_norm(y) if sandwich else y)
    if other is not None:
        y = cross(layer.cross_norm(x))
        x = x + (layer.cross_post_norm(y) if sandwich else y)
    y = layer.mlp(layer.mlp_norm(x))
    return x + (layer.mlp_post_norm(y) if sandwich else y)


def randomised(layer):
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return layer


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("mlp_type", ["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "silu", "relu2"])
@pytest.mark.parametrize("layernorm_type", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_layer_is_its_formula(placement, layernorm_type, mlp_type, mode):
    layer = randomised(
        TransformerLayer(
            32, 4, num_kv_heads=2, layernorm_type=layernorm_type, mlp_type=mlp_type, norm_placement=placement,
            rotary=RotaryConfig(), mode=mode,
        )
    )  # fmt: skip
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(layer(x), plain(layer, x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("placement", PLACEMENTS[:3])
def test_cross_decoder(placement):
    layer = randomised(TransformerLayer(32, 4, layer_type="cross_decoder", norm_placement=placement))
    x, other = torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    torch.testing.assert_close(layer(x, encoder_hidden_states=other), plain(layer, x, other), atol=1e-4, rtol=1e-4)
    pair = layer.cross_attention.project_keys_values(other)
    torch.testing.assert_close(layer(x, encoder_hidden_states=pair), plain(layer, x, other), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="which needs encoder_hidden_states"):
        layer(x)


@pytest.mark.parametrize("attention", [None, AttentionConfig(window=(1, 0))], ids=["plain", "window"])
def test_equals_the_decoder_layer_of_torch(attention):
    """Self attention causal, cross attention open: what hides keys by position does not reach the other sequence."""
    theirs = torch.nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, activation="gelu", batch_first=True)
    mine = TransformerLayer(
        32, 4, intermediate_size=48, layernorm_type="layernorm", mlp_type="gelu", norm_placement="post",
        layer_type="cross_decoder", bias=True, norm=NormConfig(eps=1e-5), attention=attention,
    )  # fmt: skip
    state = theirs.state_dict()
    names = {
        "attention.qkv.qkv_proj": "self_attn.in_proj_",
        "attention.o_proj": "self_attn.out_proj.",
        "cross_attention.o_proj": "multihead_attn.out_proj.",
        "mlp.up_proj": "linear1.",
        "mlp.down_proj": "linear2.",
        "attention_norm": "norm1.",
        "cross_norm": "norm2.",
        "mlp_norm": "norm3.",
    }
    ours = {f"{a}.{kind}": state[f"{b}{kind}"] for a, b in names.items() for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        for name, part in zip("qkv", state[f"multihead_attn.in_proj_{kind}"].chunk(3), strict=True):
            ours[f"cross_attention.qkv.{name}_proj.{kind}"] = part
    mine.load_state_dict(ours)
    x, other = torch.randn(2, 6, 32), torch.randn(2, 5, 32)
    hidden = ~mine.attention.spec.dense_mask(6, 6)
    torch.testing.assert_close(
        mine(x, encoder_hidden_states=other), theirs(x, other, tgt_mask=hidden), atol=1e-5, rtol=1e-5
    )


def test_equals_the_encoder_layer_of_torch():
    theirs = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, activation="gelu", batch_first=True).train()
    mine = TransformerLayer(
        32, 4, intermediate_size=48, layernorm_type="layernorm", mlp_type="gelu", norm_placement="post",
        layer_type="encoder", bias=True, norm=NormConfig(eps=1e-5),
    )  # fmt: skip
    names = {
        "attention.qkv.qkv_proj": "self_attn.in_proj_",
        "attention.o_proj": "self_attn.out_proj.",
        "mlp.up_proj": "linear1.",
        "mlp.down_proj": "linear2.",
        "attention_norm": "norm1.",
        "mlp_norm": "norm2.",
    }
    state = theirs.state_dict()
    mine.load_state_dict({f"{a}.{kind}": state[f"{b}{kind}"] for a, b in names.items() for kind in ("weight", "bias")})
    x = torch.randn(2, 6, 32)
    padding = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    expected = theirs(x, src_key_padding_mask=padding == 0)
    out = mine(x, padding)
    torch.testing.assert_close(out[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[1, :4], expected[1, :4], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_reach_every_parameter(placement):
    layer = TransformerLayer(
        32, 4, norm_placement=placement, rotary=RotaryConfig(), qk_norm="before_rotary", bias=True,
        residual=ResidualConfig(layer_scale=0.5),
    )  # fmt: skip
    x = torch.randn(2, 5, 32, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad is not None
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name


@pytest.mark.parametrize("strategies", [{"attention": "eager", "norm": "torch", "mlp": "torch", "rotary": "torch"}, {}])
def test_gradients_equal_those_of_the_reference(strategies):
    layer = randomised(TransformerLayer(32, 4, num_kv_heads=2, rotary=RotaryConfig(), qk_norm="before_rotary"))
    x = torch.randn(2, 9, 32)
    mask = torch.tensor([[1] * 9, [0] * 2 + [1] * 7])
    with atb.use_strategy(attention="reference", norm="reference", mlp="reference", rotary="reference"):
        wide = copy.deepcopy(layer).double()
        (wide(x.double(), mask)[:, 2:].square().sum()).backward()
    with atb.use_strategy(**strategies):
        (layer(x, mask)[:, 2:].square().sum()).backward()
    for (name, mine), truth in zip(layer.named_parameters(), wide.parameters(), strict=True):
        scale = truth.grad.abs().max()
        assert (mine.grad.double() - truth.grad).abs().max() < 1e-4 * scale, name


def test_dropout_drop_path_and_layer_scale():
    torch.manual_seed(0)
    x = torch.randn(64, 3, 16)
    layer = TransformerLayer(16, 2, residual=ResidualConfig(drop_path=0.5))
    dropped = (layer(x) == x).all(dim=(1, 2)).float().mean()
    assert 0.1 < dropped < 0.4  # both branches dropped: a quarter of the samples
    layer.eval()
    torch.testing.assert_close(layer(x), plain(layer, x), atol=1e-5, rtol=1e-5)
    scaled = TransformerLayer(16, 2, residual=ResidualConfig(layer_scale=1e-6))
    assert (scaled(x) - x).abs().max() < 1e-4
    noisy = TransformerLayer(16, 2, residual=ResidualConfig(dropout=0.3), mlp=MLPConfig(dropout=0.3))
    assert not torch.equal(noisy(x), noisy(x))
    noisy.eval()
    assert torch.equal(noisy(x), noisy(x))


def test_feed_forward_is_swiglu_of_the_paper():
    mlp = atb.FeedForward(16, 24)
    gate, up = torch.randn(24, 16), torch.randn(24, 16)
    mlp.load_state_dict({"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": torch.ones(16, 24)})
    x = torch.randn(3, 16)
    torch.testing.assert_close(mlp(x), (F.silu(x @ gate.t()) * (x @ up.t())) @ torch.ones(24, 16))
