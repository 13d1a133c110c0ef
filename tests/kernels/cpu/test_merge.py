"""The native merge of two attentions over disjoint keys: equal to one softmax, in place, by every instruction set."""

from __future__ import annotations

import pytest
import torch

from atb_modules.kernels.cpu.ops_attention_pair import merge_into
from atb_modules.testing import fresh_generator

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1, 1), (2, 3, 7, 20), (1, 4, 70, 129), (3, 2, 33, 64), (1, 8, 130, 128)]


def draw(generator, shape, dtype):
    """An output with the heads of a token side by side, and its LSE over several magnitudes."""
    batch, heads, q_len, head_dim = shape
    out = torch.randn(batch, q_len, heads, head_dim, generator=generator).to(dtype).transpose(1, 2)
    return out, torch.randn(batch, heads, q_len, generator=generator) * 8


def truth(out, lse, other, other_lse):
    """The definition, in float64."""
    parts = torch.stack([lse, other_lse]).double()
    joined = torch.logsumexp(parts, 0)
    weights = torch.exp(parts - joined.masked_fill(joined.isneginf(), 0.0)).unsqueeze(-1)
    return weights[0] * out.double() + weights[1] * other.double(), joined


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_is_the_definition_in_float64(isa, dtype, shape, threads, monkeypatch):
    generator = fresh_generator()
    (out, lse), (other, other_lse) = draw(generator, shape, dtype), draw(generator, shape, dtype)
    for values, hidden in ((out, lse), (other, other_lse)):
        empty = torch.rand(lse.shape, generator=generator) < 0.2
        hidden[empty] = float("-inf")
        values[empty] = 0.0
    want, want_lse = truth(out, lse, other, other_lse)
    before = other.clone(), other_lse.clone()
    monkeypatch.setattr("atb_modules.kernels.cpu.ops_attention_pair.threads", lambda: threads)
    merge_into(out, lse, other, other_lse)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-6, rtol=1e-6)
    # one rounding to the dtype, that of the result
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), want, atol=2e-7 + rounding * 1e-2, rtol=rounding + 1e-6)
    assert torch.equal(other, before[0]) and torch.equal(other_lse, before[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_nobody_or_one_part_sees(isa, dtype):
    generator = fresh_generator()
    (out, lse), (other, other_lse) = draw(generator, (1, 2, 9, 40), dtype), draw(generator, (1, 2, 9, 40), dtype)
    low = float("-inf")
    lse[0, :, 0] = lse[0, :, 1] = other_lse[0, :, 0] = other_lse[0, :, 2] = low
    out[0, :, :2] = 0.0
    other[0, :, 0] = other[0, :, 2] = 0.0
    kept, kept_lse = out.clone(), lse.clone()
    merge_into(out, lse, other, other_lse)
    assert not out[0, :, 0].any() and (lse[0, :, 0] == low).all()
    assert torch.equal(out[0, :, 1], other[0, :, 1]) and torch.equal(lse[0, :, 1], other_lse[0, :, 1])
    assert torch.equal(out[0, :, 2], kept[0, :, 2]) and torch.equal(lse[0, :, 2], kept_lse[0, :, 2])


def test_a_nan_is_not_lost(isa):
    generator = fresh_generator()
    (out, lse), (other, other_lse) = (draw(generator, (1, 1, 4, 24), torch.float32) for _ in range(2))
    lse[0, 0, 0] = other_lse[0, 0, 1] = float("nan")
    other[0, 0, 2, 5] = float("nan")
    merge_into(out, lse, other, other_lse)
    assert lse[0, 0, :2].isnan().all() and out[0, 0, :2].isnan().all()
    assert out[0, 0, 2, 5].isnan() and out[0, 0, 3].isfinite().all() and lse[0, 0, 2:].isfinite().all()


def test_shares_of_threads_change_no_bit(monkeypatch):
    generator = fresh_generator()
    (out, lse), (other, other_lse) = (draw(generator, (2, 4, 333, 64), torch.bfloat16) for _ in range(2))
    found = []
    for count in (1, 2, 3):
        monkeypatch.setattr("atb_modules.kernels.cpu.ops_attention_pair.threads", lambda count=count: count)
        mine = out.transpose(1, 2).clone().transpose(1, 2), lse.clone()
        merge_into(*mine, other, other_lse)
        found.append(mine)
    assert all(torch.equal(a, b) for result in found[1:] for a, b in zip(result, found[0], strict=True))


def test_layouts_that_the_kernel_does_not_read_are_refused():
    generator = fresh_generator()
    (out, lse), (other, other_lse) = (draw(generator, (1, 2, 5, 8), torch.float32) for _ in range(2))
    with pytest.raises(ValueError, match="out must have the heads of a token side by side, got strides"):
        merge_into(out.contiguous(), lse, other, other_lse)
    with pytest.raises(ValueError, match="other must have the shape"):
        merge_into(out, lse, other[:, :1], other_lse)
    with pytest.raises(TypeError, match="other_lse must have the dtype torch.float32"):
        merge_into(out, lse, other, other_lse.double())
    with pytest.raises(TypeError, match="out must be float32, bfloat16 or float16"):
        merge_into(out.double(), lse, other.double(), other_lse)
