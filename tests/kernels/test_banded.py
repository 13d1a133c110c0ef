"""A causal window by triangles: equal to the dense call under its mask, forward and gradients, at any length."""

import pytest
import torch
import torch.nn.functional as F

import atb_modules as atb
from atb_modules.attention.functional import attention
from atb_modules.kernels.torch import banded as band


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr(band, "_LEAST", 1)


def dense(q, k, v, spec):
    mask = spec.dense_mask(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=True)


@pytest.mark.parametrize("left", [0, 1, 6, 15])
@pytest.mark.parametrize("length", [17, 32, 33, 47])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_equal_to_the_dense_call(left, length, kv_heads):
    torch.manual_seed(0)
    q = torch.randn(2, 4, length, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    spec = atb.AttentionSpec(causal=True, window=(left, 0), scale=0.4)
    assert band.fits_band(q, k, v, spec, None)
    found, _ = attention(q, k, v, spec, strategy="blocked")
    expected = dense(q, k, v, spec)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
    weight = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-8)


def test_gradients_by_differences():
    q, k, v = (torch.randn(1, 2, 11, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    spec = atb.AttentionSpec(causal=True, window=(3, 0))
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, spec, strategy="blocked")[0], (q, k, v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_strides(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 3, 16).to(dtype).transpose(1, 2) for _ in range(3))
    spec = atb.AttentionSpec(causal=True, window=(8, 0))
    expected = dense(*(t.float() for t in (q, k, v)), spec)
    found, _ = attention(q, k, v, spec, strategy="blocked")
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)
    spread = (t.repeat_interleave(2, -1)[..., ::2] for t in (q, k, v))
    torch.testing.assert_close(attention(*spread, spec, strategy="blocked")[0], found)
    again, _ = attention(q, k, v, spec, strategy="blocked")
    assert torch.equal(again, found)


def test_what_is_more_than_a_window_goes_another_way():
    q = torch.randn(1, 2, 12, 4)
    spec = atb.AttentionSpec(causal=True, window=(3, 0))
    assert band.fits_band(q, q, q, spec, None)
    assert not band.fits_band(q, q, q, spec, None, torch.ones(12, 12, dtype=torch.bool))
    assert not band.fits_band(q, q, q, atb.AttentionSpec(window=(3, 0)), None)
    assert not band.fits_band(q, q, q, atb.AttentionSpec(causal=True, window=(3, 0), softcap=2.0), None)
    assert not band.fits_band(q[:, :, :4], q, q, spec, None)
    assert not band.fits_band(q[:, :, :3], q[:, :, :3], q[:, :, :3], spec, None)
