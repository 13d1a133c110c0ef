"""Rotary embeddings: the two layouts, partial rotation, the scaling family, and angles that no dtype can spoil."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from atb_modules import RotaryConfig, RotaryEmbedding, RotaryScaling, TransformerLayer, convert_rotary_weight
from atb_modules.ops import rotary

FACTORS = tuple(1.0 + 0.1 * i for i in range(16))

SCALINGS = {
    "linear": RotaryScaling("linear", 4.0),
    "dynamic": RotaryScaling("dynamic", 4.0, 64),
    "yarn": RotaryScaling("yarn", 16.0, 64),
    "yarn_float_ramp": RotaryScaling("yarn", 16.0, 64, truncate=False),
    "llama3": RotaryScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
    "longrope": RotaryScaling("longrope", 4.0, 64, short_factor=FACTORS, long_factor=FACTORS[::-1]),
}


def rotate_in_float64(vector, position, base=10000.0):
    dim = vector.shape[-1]
    angles = position * base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    a, b = vector.double().chunk(2)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])


@pytest.mark.parametrize("length", [32, 200])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_those_of_transformers(name, length):
    scaling = SCALINGS[name]
    parameters = {"rope_type": scaling.kind.value, "rope_theta": 10000.0, "factor": scaling.factor}
    if name.startswith("yarn"):
        parameters.update(original_max_position_embeddings=64, truncate=scaling.truncate)
    if name == "llama3":
        parameters.update(original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0)
    if name == "longrope":
        parameters.update(
            original_max_position_embeddings=64, short_factor=list(FACTORS), long_factor=list(FACTORS[::-1])
        )
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=64, rope_parameters=parameters
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling.kind.value](config, torch.device("cpu"), seq_len=length)
    embedding = RotaryEmbedding(32, RotaryConfig(scaling=scaling))
    torch.testing.assert_close(torch.tensor(embedding.frequencies(length)), expected.float(), rtol=2e-6, atol=1e-9)
    assert embedding.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 0.1 * math.log(16) + 1),
        ({"attention_factor": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.12175),
    ],
)
def test_yarn_attention_factor_is_the_cosine_at_position_zero(options, factor):
    """mlx-lm PR #1507: the explicit factor, or mscale and mscale_all_dim, must not be dropped."""
    cos, _ = RotaryEmbedding(32, RotaryConfig(scaling=RotaryScaling("yarn", 16.0, 64, **options)))(torch.tensor([0]))
    assert torch.allclose(cos, torch.full_like(cos, factor), atol=1e-5)


def test_angles_survive_dtype_and_device_conversions():
    """transformers #38002 and others: frequencies in a buffer are rounded by .to(bfloat16), or left as garbage."""
    vector = torch.randn(64)
    expected = rotate_in_float64(vector, 3999)
    layer = TransformerLayer(128, 2, 64, rotary=RotaryConfig())
    with torch.device("meta"):
        empty = TransformerLayer(128, 2, 64, rotary=RotaryConfig())
    built = empty.to_empty(device="cpu")
    built.load_state_dict(layer.state_dict())
    for variant in (layer, built, TransformerLayer(128, 2, 64, rotary=RotaryConfig()).bfloat16(), layer.float()):
        cos, sin = variant.attention.rotary(torch.tensor([3999]))
        assert cos.dtype == torch.float32
        rotated = rotary(vector.reshape(1, 1, 64), cos, sin).flatten()
        assert (rotated.double() - expected).abs().max() < 1e-3
    x = torch.randn(1, 9, 128)
    assert torch.equal(layer(x), built(x))


@pytest.mark.parametrize("rotary_dim", [8, 24])
def test_converted_weights_rotate_the_same_in_the_other_layout(rotary_dim):
    heads, dim, tokens = 3, 24, 5
    weight, x = torch.randn(heads * dim, 16), torch.randn(tokens, 16)
    angles = torch.randn(tokens, rotary_dim // 2)
    other = convert_rotary_weight(weight, heads, "half", "interleaved", rotary_dim)
    half = rotary((x @ weight.t()).reshape(tokens, heads, dim), angles.cos(), angles.sin(), layout="half")
    inter = rotary((x @ other.t()).reshape(tokens, heads, dim), angles.cos(), angles.sin(), layout="interleaved")
    back = convert_rotary_weight(other, heads, "interleaved", "half", rotary_dim)
    assert torch.equal(back, weight)
    for a, b in ((half, half), (inter, inter)):
        scores = torch.einsum("thd,shd->hts", a, b)
        reference = torch.einsum("thd,shd->hts", half, half)
        torch.testing.assert_close(scores, reference, atol=1e-4, rtol=1e-4)


def test_frequency_factors_divide():
    plain = RotaryEmbedding(32).frequencies(1)
    factors = (1.0,) * 8 + (8.0,) * 8
    divided = RotaryEmbedding(32, RotaryConfig(frequency_factors=factors)).frequencies(1)
    assert divided == tuple(f / factor for f, factor in zip(plain, factors, strict=True))


def test_nothing_is_saved():
    assert not RotaryEmbedding(32).state_dict()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RotaryConfig(base=0.5), "base is 0.5"),
        (lambda: RotaryConfig(layout="neox"), "layout is 'neox'; allowed: 'half', 'interleaved'"),
        (lambda: RotaryConfig(partial_factor=0.0), "partial_factor is 0.0"),
        (lambda: RotaryEmbedding(7), "head_dim is 7"),
        (lambda: RotaryEmbedding(32, RotaryConfig(frequency_factors=(1.0,))), "frequency_factors has 1 numbers"),
        (lambda: RotaryScaling("yarn", 4.0), "original_max_positions is None; yarn needs"),
        (lambda: RotaryScaling("longrope", 4.0, 64), "short_factor and long_factor"),
        (lambda: RotaryScaling("ntk"), "kind is 'ntk'"),
    ],
)
def test_bad_options(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_bad_inputs():
    x = torch.randn(4, 2, 8)
    cos = torch.randn(4, 4)
    with pytest.raises(ValueError, match=r"cos has shape .* and sin"):
        rotary(x, cos, cos[:, :2])
    with pytest.raises(ValueError, match="cos has 8 angles"):
        rotary(x, torch.randn(4, 8), torch.randn(4, 8))
    with pytest.raises(ValueError, match="cos has 3 tokens; x has 4"):
        rotary(x, cos[:3], cos[:3])
    with pytest.raises(TypeError, match="position_ids is torch.float32"):
        RotaryEmbedding(8)(torch.randn(3))
