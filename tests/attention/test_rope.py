"""Rotary embeddings: the two layouts, partial rotation, the scaling family, and angles that no dtype can spoil."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from atb_modules import RotaryConfig, RotaryEmbedding, RotaryScaling, TransformerLayer, convert_rotary_weight
from atb_modules.ops import rotary, rotary_append

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


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"base": "a"}, TypeError, r"base is 'a' \(str\); allowed: a finite number greater than 1"),
        ({"base": INF}, ValueError, "base is inf"),
        ({"base": NAN}, ValueError, "base is nan"),
        ({"base": 10**400}, ValueError, "base is 1000"),
        ({"base": 1}, ValueError, "base is 1; allowed"),
        ({"layout": None}, ValueError, "layout is None"),
        ({"partial_factor": "a"}, TypeError, "partial_factor is 'a'"),
        ({"partial_factor": True}, TypeError, "partial_factor is True"),
        ({"partial_factor": NAN}, ValueError, "partial_factor is nan"),
        ({"scaling": "yarn"}, TypeError, "scaling is 'yarn' .*allowed: RotaryScaling or None"),
        ({"frequency_factors": 2.0}, TypeError, "frequency_factors is 2.0"),
        ({"frequency_factors": (1.0, 0.0)}, ValueError, r"frequency_factors\[1\] is 0.0; allowed: a positive"),
        ({"frequency_factors": (1.0, NAN)}, ValueError, r"frequency_factors\[1\] is nan"),
        ({"strategy": "fast"}, ValueError, "strategy is 'fast'"),
    ],
)
def test_bad_config_values(options, error, message):
    with pytest.raises(error, match=message):
        RotaryConfig(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": None}, ValueError, "kind is None"),
        *(
            ({"factor": value}, error, f"factor is .*{value}.*; allowed: a positive number")
            for value, error in ((0.0, ValueError), (-2, ValueError), (INF, ValueError), (NAN, ValueError))
        ),
        ({"factor": "2"}, TypeError, r"factor is '2' \(str\)"),
        ({"factor": True}, TypeError, "factor is True"),
        *(
            ({"kind": kind, "original_max_positions": -4}, ValueError, "original_max_positions is -4; allowed: a pos")
            for kind in ("linear", "dynamic", "yarn", "llama3", "longrope")
        ),
        ({"original_max_positions": 0}, ValueError, "original_max_positions is 0"),
        ({"original_max_positions": 64.0}, TypeError, "original_max_positions is 64.0"),
        ({"original_max_positions": True}, TypeError, "original_max_positions is True"),
        ({"attention_factor": 0.0}, ValueError, "attention_factor is 0.0"),
        ({"attention_factor": NAN}, ValueError, "attention_factor is nan"),
        ({"mscale": -1.0}, ValueError, "mscale is -1.0"),
        ({"mscale_all_dim": "1"}, TypeError, "mscale_all_dim is '1'"),
        ({"beta_fast": 0}, ValueError, "beta_fast is 0"),
        ({"beta_slow": INF}, ValueError, "beta_slow is inf"),
        ({"beta_fast": 1.0, "beta_slow": 2.0}, ValueError, "beta_fast is 1.0, beta_slow 2.0"),
        ({"truncate": "no"}, TypeError, "truncate is 'no'"),
        ({"low_freq_factor": 0.0}, ValueError, "low_freq_factor is 0.0"),
        ({"high_freq_factor": NAN}, ValueError, "high_freq_factor is nan"),
        ({"short_factor": 1.0}, TypeError, "short_factor is 1.0"),
        ({"long_factor": (1.0, -1.0)}, ValueError, r"long_factor\[1\] is -1.0"),
        ({"long_factor": (1.0, "a")}, TypeError, r"long_factor\[1\] is 'a'"),
    ],
)
def test_bad_scaling_values(options, error, message):
    with pytest.raises(error, match=message):
        RotaryScaling(**{"kind": "yarn", "factor": 4.0, "original_max_positions": 64} | options)


def test_lists_become_tuples_and_configs_stay_hashable():
    scaling = RotaryScaling("longrope", 4.0, 64, short_factor=[1.0, 2.0], long_factor=[1.0, 2.0])
    assert hash(RotaryConfig(scaling=scaling, frequency_factors=[1.0, 2.0])) is not None
    assert scaling.short_factor == (1.0, 2.0)


def test_two_channels_under_dynamic_ntk_keep_their_one_frequency():
    """The stretch's exponent rotary_dim / (rotary_dim - 2) has no value there; the frequency is base^0 = 1."""
    embedding = RotaryEmbedding(2, RotaryConfig(scaling=RotaryScaling("dynamic", 4.0, 64)))
    assert embedding.frequencies(10) == embedding.frequencies(1000) == (1.0,)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (RotaryScaling("linear", 1e-320), "frequencies are finite in float32"),
        (RotaryScaling("dynamic", 1e306, 64), None),
        (RotaryScaling("yarn", 4.0, 64, beta_slow=5e-324), "frequencies are finite in float32"),
        (
            RotaryScaling("longrope", 4.0, 64, short_factor=FACTORS, long_factor=FACTORS[:3]),
            "long_factor has 3 numbers",
        ),
        (RotaryScaling("longrope", 4.0, 64, short_factor=FACTORS[:3], long_factor=FACTORS), "short_factor has 3"),
    ],
)
def test_scalings_without_finite_tables_are_refused_when_built(scaling, message):
    if message is None:
        cos, sin = RotaryEmbedding(32, RotaryConfig(scaling=scaling))(torch.arange(200))
        assert cos.isfinite().all() and sin.isfinite().all()
        return
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(32, RotaryConfig(scaling=scaling))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "head_dim is 0"),
        ((32.0,), TypeError, "head_dim is 32.0"),
        ((32, {"base": 1e6}), TypeError, "config is .*allowed: RotaryConfig or None"),
    ],
)
def test_bad_embeddings(arguments, error, message):
    with pytest.raises(error, match=message):
        RotaryEmbedding(*arguments)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (np.arange(3), "position_ids is ndarray; allowed: a tensor of integers"),
        ([0, 1], "position_ids is list"),
        (torch.ones(3, dtype=torch.bool), "position_ids is torch.bool"),
        (torch.ones(3, dtype=torch.complex64), "position_ids is torch.complex64"),
    ],
)
def test_positions_are_tensors_of_integers(positions, message):
    with pytest.raises(TypeError, match=message):
        RotaryEmbedding(8)(positions)


@pytest.mark.parametrize(("length", "error"), [("a", TypeError), (4.0, TypeError), (True, TypeError), (-5, ValueError)])
def test_lengths_are_ints(length, error):
    embedding = RotaryEmbedding(8, RotaryConfig(scaling=RotaryScaling("dynamic", 2.0, 16)))
    with pytest.raises(error, match="length is .*allowed: an int of at least 0"):
        embedding(torch.arange(4), length)


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


@pytest.mark.parametrize("shape", [(4, 2, 8), (3, 4, 2, 8), (1, 3, 4, 2, 8)])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("strategy", ["auto", "cpu", "torch", "reference"])
def test_tables_without_an_angle_rotate_nothing(shape, overwrite, strategy):
    x = torch.randn(shape)
    tables = torch.randn(4, 0), torch.randn(4, 0)
    assert torch.equal(rotary(x.clone(), *tables, overwrite=overwrite, strategy=strategy), x)


@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 0, 2, 8), (3, 4, 0, 8), (0, 4, 2, 8)])
def test_rotating_nothing(shape):
    x = torch.randn(shape)
    assert rotary(x, torch.randn(shape[-3], 4), torch.randn(shape[-3], 4)).shape == shape


@pytest.mark.parametrize("strategy", ["auto", "cpu", "torch", "reference"])
@pytest.mark.parametrize(
    ("dtype", "tables"),
    [
        (torch.float32, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float64),
        (torch.float64, torch.float64),
        (torch.float64, torch.float16),
    ],
)
def test_tables_of_every_dtype(dtype, tables, strategy):
    cos, sin = (table.to(tables) for table in RotaryEmbedding(8)(torch.arange(4)))
    x = torch.randn(4, 2, 8).to(dtype)
    if strategy == "cpu" and dtype == torch.float64:
        with pytest.raises(ValueError, match="know float32, bfloat16 and float16, not torch.float64"):
            rotary(x, cos, sin, strategy=strategy)
        return
    compute = torch.promote_types(dtype, torch.float32)
    expected = rotary(x, cos.to(compute), sin.to(compute), strategy="reference")
    got = rotary(x, cos, sin, strategy=strategy)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(rotary(x.expand(2, 4, 2, 8), cos, sin, strategy=strategy)[1], expected)


@pytest.mark.parametrize("strategy", ["cpu", "torch"])
@pytest.mark.parametrize("tables", [torch.float64, torch.bfloat16])
def test_appended_keys_take_tables_of_every_dtype(strategy, tables):
    cos, sin = (table.to(tables) for table in RotaryEmbedding(8)(torch.arange(4)))
    q, k, v = torch.randn(3, 4, 2, 8)
    pages = torch.zeros(2, 1, 2, 4, 8)
    expected = rotary(q, cos, sin), rotary(k, cos, sin)
    rotary_append(q, k, v, cos, sin, *pages, torch.arange(4), interleaved=False, strategy=strategy)
    torch.testing.assert_close(q, expected[0])
    torch.testing.assert_close(pages[0, 0].transpose(0, 1), expected[1])


@pytest.mark.parametrize("table", [torch.arange(16).view(4, 4), torch.randn(4, 4).to(torch.complex64)])
def test_appended_keys_need_floating_tables(table):
    q, k, v = torch.randn(3, 4, 2, 8)
    pages = torch.zeros(2, 1, 2, 4, 8)
    with pytest.raises(TypeError, match=f"cos is {table.dtype}; allowed: a floating dtype"):
        rotary_append(q, k, v, table, table, *pages, torch.arange(4), interleaved=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_gradients_of_tables_survive_overwriting(overwrite):
    x = torch.randn(4, 2, 8)
    cos = torch.randn(4, 4, requires_grad=True)
    rotary(x, cos, cos, overwrite=overwrite).sum().backward()
    assert cos.grad is not None and cos.grad.abs().sum() > 0


def test_shares_of_the_head_are_rounded_to_the_nearest():
    for head_dim in (64, 80, 96, 104, 128, 256):
        for turned in range(2, head_dim + 1, 2):
            assert RotaryEmbedding(head_dim, RotaryConfig(partial_factor=turned / head_dim)).rotary_dim == turned


@pytest.mark.parametrize("extremes", [{"beta_fast": 1e308}, {"beta_fast": 1e308, "beta_slow": 1e307}])
@pytest.mark.parametrize("truncate", [True, False])
def test_ramps_of_yarn_at_the_ends_of_float64(extremes, truncate):
    scaling = RotaryScaling("yarn", 16.0, 2**31 - 1, truncate=truncate, **extremes)
    cos, sin = RotaryEmbedding(32, RotaryConfig(scaling=scaling))(torch.arange(9))
    assert cos.isfinite().all() and sin.isfinite().all()


@pytest.mark.parametrize(
    "options",
    [{"mscale": 1e308, "mscale_all_dim": 1e308}, {"mscale": 1e308, "mscale_all_dim": 1}, {"attention_factor": 1e39}],
)
def test_temperatures_beyond_float32_are_refused(options):
    with pytest.raises(ValueError, match="scaling is .*allowed: a factor finite in float32"):
        RotaryEmbedding(32, RotaryConfig(scaling=RotaryScaling("yarn", 1e300, 64, **options)))
