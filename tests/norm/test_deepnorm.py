"""DeepNorm: the numbers of the paper's table, the residual, the layer that takes alpha, and the initial weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from atb_modules import (
    DeepNorm,
    DeepNormResidual,
    MLPConfig,
    MoEConfig,
    NormConfig,
    ResidualConfig,
    TransformerLayer,
    deepnorm_init_,
)


def test_table_of_the_paper():
    """Values for 100 layers and for DeepNet's own 1,000-layer translation model (500 and 500), from the formulas."""
    single = DeepNorm.of_encoder(100)
    assert (single.alpha, single.beta) == pytest.approx((200**0.25, 800**-0.25))
    assert single == DeepNorm.of_decoder(100)
    encoder, decoder = DeepNorm.of_encoder_decoder(18, 6)
    assert (encoder.alpha, encoder.beta) == pytest.approx(
        (0.81 * (18**4 * 6) ** (1 / 16), 0.87 * (18**4 * 6) ** (-1 / 16))
    )
    assert (decoder.alpha, decoder.beta) == pytest.approx((18**0.25, 72**-0.25))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_residual_is_its_formula(kind):
    module = DeepNormResidual(16, 1.7, kind, config=NormConfig(eps=1e-5))
    torch.nn.init.normal_(module.norm.weight)
    x, branch = torch.randn(2, 3, 16, requires_grad=True), torch.randn(2, 3, 16, requires_grad=True)
    total = 1.7 * x + branch
    norm = F.layer_norm if kind == "layernorm" else F.rms_norm
    expected = norm(total, (16,), module.norm.weight, eps=1e-5)
    out = module(branch, x)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    leaves = (x, branch, module.norm.weight)
    got, want = (torch.autograd.grad((y * y.detach().sin()).sum(), leaves) for y in (out, expected))
    for mine, truth in zip(got, want, strict=True):
        torch.testing.assert_close(mine, truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layer_type", ["encoder", "decoder", "cross_decoder"])
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_a_post_norm_layer_takes_alpha(layer_type, mode):
    residual = ResidualConfig(residual_scale=DeepNorm.of_decoder(12).alpha)
    options = {"norm_placement": "post", "layernorm_type": "layernorm", "layer_type": layer_type, "mode": mode}
    layer = TransformerLayer(32, 4, residual=residual, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x, other, alpha = torch.randn(2, 7, 32), torch.randn(2, 5, 32), residual.residual_scale
    y = layer.attention_norm(alpha * x + layer.attention(x))
    extra = {}
    if layer_type == "cross_decoder":
        extra = {"encoder_hidden_states": other}
        y = layer.cross_norm(alpha * y + layer.cross_attention(y, key_value_states=other))
    expected = layer.mlp_norm(alpha * y + layer.mlp(y))
    torch.testing.assert_close(layer(x, **extra), expected, atol=1e-5, rtol=1e-5)


def test_initial_weights_have_their_gains():
    beta = 0.25
    moe = MLPConfig(moe=MoEConfig(3, 1), bias=True)
    layers = [
        TransformerLayer(256, 4, num_kv_heads=2, intermediate_size=512, bias=True),
        TransformerLayer(256, 4, intermediate_size=512, mlp_type="gelu", layer_type="cross_decoder"),
        TransformerLayer(256, 4, intermediate_size=512, mlp=moe),
    ]
    torch.manual_seed(0)
    for layer in layers:
        for parameter in layer.parameters():
            torch.nn.init.ones_(parameter)
        assert deepnorm_init_(layer, beta) is layer

    def spread(weight, gain):
        """Standard deviation over Xavier's, for (out, in)."""
        return float(weight.detach().std()) / (gain * (2 / (weight.shape[0] + weight.shape[1])) ** 0.5)

    first, second, third = layers
    q, k, v = first.attention.qkv.qkv_proj.weight.split([256, 128, 128])
    gate, up = first.mlp.gate_up_proj.weight.chunk(2)
    found = [(q, 1), (k, 1), (v, beta), (first.attention.o_proj.weight, beta), (gate, beta), (up, beta)]
    cross = second.cross_attention
    found += [(first.mlp.down_proj.weight, beta), (second.mlp.up_proj.weight, beta), (cross.o_proj.weight, beta)]
    found += [(cross.qkv.q_proj.weight, 1), (cross.qkv.k_proj.weight, 1), (cross.qkv.v_proj.weight, beta)]
    for expert in range(3):
        gate, up = third.mlp.experts.gate_up_proj[expert].chunk(2)
        found += [(gate, beta), (up, beta), (third.mlp.experts.down_proj[expert], beta)]
    for weight, gain in found:
        assert spread(weight, gain) == pytest.approx(1.0, rel=0.05)
    for bias in (first.attention.qkv.qkv_proj.bias, first.mlp.down_proj.bias, third.mlp.experts.down_proj_bias):
        assert not bias.any()
    assert torch.equal(first.mlp_norm.weight, torch.ones(256))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: DeepNorm(0.0, 1.0), ValueError, "alpha is 0.0"),
        (lambda: DeepNorm.of_encoder(0), ValueError, "num_layers is 0"),
        (lambda: DeepNorm.of_encoder_decoder(6, 2.0), TypeError, "decoder_layers is 2.0"),
        (lambda: DeepNormResidual(8, -1.0), ValueError, "alpha is -1.0"),
        (lambda: ResidualConfig(residual_scale=0.0), ValueError, "residual_scale is 0.0"),
        (
            lambda: TransformerLayer(32, 4, residual=ResidualConfig(residual_scale=2.0)),
            ValueError,
            "residual_scale is 2.0; norm_placement 'pre' allows 1.0",
        ),
        (lambda: deepnorm_init_(torch.nn.Linear(2, 2), 0), ValueError, "beta is 0"),
        (lambda: deepnorm_init_(None, 1.0), TypeError, "module is None"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
