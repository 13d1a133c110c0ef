"""Rotary operators against complex multiplication in float64."""

from __future__ import annotations

import pytest
import torch

from atb_modules.testing import fresh_generator
from atb_modules.testing.npu import EmulatedNPU, OperatorError

from .helpers import DEVICE, assert_near, check_gradients, draw, in_float64, on_device

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ops = torch.ops.npu


def tables(generator, length, planes):
    """Cosines and sines (length, planes) of random angles."""
    angles = torch.rand(length, planes, generator=generator) * 6.28
    return angles.cos(), angles.sin()


def spread(table, mode):
    return torch.cat((table, table), -1) if mode == "half" else table.repeat_interleave(2, -1)


def rotate(x, cos, sin, mode):
    """Each plane of x times cos + i sin; x (..., 2 planes) float64, tables broadcast against (..., planes)."""
    parts = x.chunk(2, -1) if mode == "half" else (x[..., ::2], x[..., 1::2])
    turned = torch.complex(*parts) * torch.complex(cos, sin)
    if mode == "half":
        return torch.cat((turned.real, turned.imag), -1)
    return torch.stack((turned.real, turned.imag), -1).flatten(-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "SBND"])
def test_rotary_mul(npu, dtype, mode, layout):
    generator = fresh_generator()
    shape = {"BNSD": (2, 3, 7, 16), "BSND": (2, 7, 3, 16), "SBND": (7, 2, 3, 16)}[layout]
    place = {"BNSD": (None, None), "BSND": (None, slice(None), None), "SBND": (slice(None), None, None)}[layout]
    cos, sin = tables(generator, 7, 8)
    x = draw(generator, *shape, dtype=dtype)
    r1, r2 = (spread(t, mode)[place].to(dtype) for t in (cos, sin))
    leaves, wide = on_device(x, r1, r2), in_float64(x, r1, r2)
    y = ops.npu_rotary_mul(*leaves, rotary_mode=mode)
    halves = [t.chunk(2, -1)[0] if mode == "half" else t[..., ::2] for t in wide[1:]]
    truth = rotate(wide[0], *halves, mode)
    assert_near(y, truth)
    y.backward(torch.ones_like(y))
    truth.backward(torch.ones_like(truth))
    assert_near(leaves[0].grad, wide[0].grad, scale=2.0)
    assert leaves[1].grad.shape == r1.shape and leaves[2].grad.shape == r2.shape


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_differentiates_its_tables(npu, mode):
    generator = fresh_generator()
    x, r1, r2 = draw(generator, 2, 3, 5, 8), draw(generator, 1, 1, 5, 8), draw(generator, 1, 1, 5, 8)
    leaves, wide = on_device(x, r1, r2), in_float64(x, r1, r2)
    if mode == "half":
        turned = torch.cat((-wide[0][..., 4:], wide[0][..., :4]), -1)
    else:
        turned = torch.stack((-wide[0][..., 1::2], wide[0][..., ::2]), -1).flatten(-2)
    truth = wide[0] * wide[1] + turned * wide[2]
    check_gradients([ops.npu_rotary_mul(*leaves, mode)], [truth], leaves, wide, generator, scale=2.0)


def test_apply_rotary_pos_emb_writes_in_place(npu):
    generator = fresh_generator()
    query, key = draw(generator, 2, 5, 4, 64), draw(generator, 2, 5, 1, 64)
    cos, sin = tables(generator, 10, 32)
    cos, sin = (spread(t, "half").view(2, 5, 1, 64) for t in (cos, sin))
    q, k, c, s = (t.to(DEVICE) for t in (query, key, cos, sin))
    rotated_q, rotated_k = ops.npu_apply_rotary_pos_emb(q, k, c, s)
    for one, source in ((rotated_q, query), (rotated_k, key)):
        assert_near(one, rotate(source.double(), cos[..., :32].double(), sin[..., :32].double(), "half"))
    assert torch.equal(q.cpu(), rotated_q.cpu()) and torch.equal(k.cpu(), rotated_k.cpu())


@pytest.mark.parametrize("cache_mode", ["default", "interleave"])
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_mrope_picks_a_position_for_each_plane(npu, mode, cache_mode):
    generator = fresh_generator()
    section, heads, tokens = [4, 6, 6], 3, 9
    cos, sin = tables(generator, 50, 16)
    positions = torch.randint(0, 50, (3, tokens), generator=generator)
    query, key = draw(generator, tokens, heads * 40), draw(generator, tokens, 40)
    cache = torch.cat((cos, sin), -1)
    q, k = ops.npu_mrope(
        positions.to(DEVICE), query.to(DEVICE), key.to(DEVICE), cache.to(DEVICE), 40,
        mrope_section=section, rotary_mode=mode, cache_mode=cache_mode,
    )  # fmt: skip
    if cache_mode == "default":
        axes = [0] * 4 + [1] * 6 + [2] * 6
    else:  # t h w t h w ..., what is left over is temporal
        axes = [(plane % 3 if plane < 3 * section[plane % 3] else 0) for plane in range(16)]
    for one, source in ((q, query), (k, key)):
        vectors = source.double().view(tokens, -1, 40)
        turned = vectors.clone()
        for token in range(tokens):
            rows = torch.tensor([int(positions[axis, token]) for axis in axes])
            c, s = (t.double()[rows, torch.arange(16)] for t in (cos, sin))
            turned[token, :, :32] = rotate(vectors[token, :, :32], c, s, mode)
        assert_near(one, turned.view(tokens, -1))


def test_mrope_without_sections_is_plain_rotary(npu):
    generator = fresh_generator()
    cos, sin = tables(generator, 20, 16)
    positions = torch.randint(0, 20, (6,), generator=generator)
    query = draw(generator, 6, 64)
    q, _ = ops.npu_mrope(
        positions.to(DEVICE), query.to(DEVICE), query.to(DEVICE), torch.cat((cos, sin), -1).to(DEVICE), 32
    )
    c, s = (t[positions][:, None].double() for t in (cos, sin))
    assert_near(q, rotate(query.double().view(6, 2, 32), c, s, "half").view(6, 64))


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=DEVICE)


FORBIDDEN = {
    "head dim of the pair": (lambda: ops.npu_apply_rotary_pos_emb(*[ones(1, 2, 1, 80)] * 4), "64 or 128"),
    "layout of the pair": (lambda: ops.npu_apply_rotary_pos_emb(*[ones(1, 2, 1, 64)] * 4, "BNSD"), "BSND, TND"),
    "mode of the pair": (lambda: ops.npu_apply_rotary_pos_emb(*[ones(1, 2, 1, 64)] * 4, "BSND", "interleave"), "half"),
    "broadcast batch": (
        lambda: ops.npu_apply_rotary_pos_emb(ones(2, 3, 1, 64), ones(2, 3, 1, 64), *[ones(1, 3, 1, 64)] * 2),
        "must agree",
    ),
    "odd head dim": (lambda: ops.npu_rotary_mul(*[ones(1, 1, 2, 7)] * 3), "even and below 896"),
    "large head dim": (lambda: ops.npu_rotary_mul(*[ones(1, 1, 2, 896)] * 3), "even and below 896"),
    "three dims": (lambda: ops.npu_rotary_mul(*[ones(1, 2, 8)] * 3), "must have 4 dims"),
    "interleaved with a batch of tables": (
        lambda: ops.npu_rotary_mul(ones(2, 3, 4, 8), *[ones(2, 1, 4, 8)] * 2, "interleave"),
        "11SD, 1S1D or S11D",
    ),
    "many heads interleaved": (
        lambda: ops.npu_rotary_mul(ones(40, 25, 1, 8), *[ones(1, 1, 1, 8)] * 2, "interleave"),
        "below 1000",
    ),
    "rotary dim of mrope": (
        lambda: ops.npu_mrope(ones(3).long(), *[ones(3, 64)] * 2, ones(9, 24), 64),
        "multiple of 16",
    ),
    "position beyond the table": (
        lambda: ops.npu_mrope(ones(3).long() * 9, *[ones(3, 64)] * 2, ones(9, 32), 64),
        "beyond the 9 rows",
    ),
    "sections": (
        lambda: ops.npu_mrope(ones(3, 3).long(), *[ones(3, 64)] * 2, ones(9, 32), 64, mrope_section=[4, 4, 4]),
        "must sum to 16",
    ),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_calls(npu, name):
    call, rule = FORBIDDEN[name]
    with pytest.raises(OperatorError, match=rule):
        call()


@pytest.mark.parametrize("mode, dim, rule", [("interleave", 128, "'half' only"), ("half", 64, "supports 128 only")])
def test_310p_turns_halves_of_128_channels(mode, dim, rule):
    with EmulatedNPU(soc="ascend310p"):
        x, table = ones(1, 2, 3, 128), ones(1, 2, 1, 128)
        assert ops.npu_rotary_mul(x, table, table).shape == x.shape
        with pytest.raises(OperatorError, match=rule):
            ops.npu_rotary_mul(x[..., :dim], table[..., :dim], table[..., :dim], mode)


def test_rules_follow_the_soc():
    with EmulatedNPU(soc="ascend310p"), pytest.raises(OperatorError, match="bfloat16, which this SoC lacks"):
        ops.npu_apply_rotary_pos_emb(*[ones(1, 2, 1, 64, dtype=torch.bfloat16)] * 4)
    with EmulatedNPU(soc="ascend950"):
        q, _ = ops.npu_apply_rotary_pos_emb(*[ones(1, 2, 1, 80)] * 4, "BSND", "interleave")
        assert q.shape == (1, 2, 1, 80)
