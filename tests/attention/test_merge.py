"""Partial attentions merged by LSE equal one softmax: outputs, LSE, gradients; sinks counted once; empty parts."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules.attention.merge import merge_attention
from atb_modules.kernels.reference.attention import attention_reference
from atb_modules.ops import attention
from atb_modules.spec import AttentionSpec
from atb_modules.testing import fresh_generator
from atb_modules.testing.devices import strategies_under_test

STRATEGIES = [s.value for s in strategies_under_test("attention") if s not in ("sdpa", "flex")]


def in_parts(q, k, v, mask, cuts, strategy, sinks=None):
    """Attention a part of the keys at a time; the sinks count in the first part."""
    outs, lses = [], []
    for index, (begin, end) in enumerate(itertools.pairwise(cuts)):
        keys = slice(begin, end)
        own = sinks if index == 0 else None
        part = {"mask": mask[..., keys], "sinks": own, "return_lse": True, "strategy": strategy}
        out, lse = attention(q, k[:, :, keys], v[:, :, keys], **part)
        outs.append(out)
        lses.append(lse)
    return merge_attention(outs, lses)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_split_equals_the_whole(strategy, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    q_len, kv_len = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 37))
    inner = data.draw(st.lists(st.integers(0, kv_len), max_size=4))
    cuts = [0, *sorted(inner), kv_len]  # equal cuts are parts without a key
    q = torch.randn(2, 4, q_len, 8, generator=generator)
    k, v = (torch.randn(2, 2, kv_len, 8, generator=generator) for _ in range(2))
    sinks = torch.tensor([-2.0, 0.0, 3.0, 8.0]) if data.draw(st.booleans()) else None
    mask = torch.rand(2, 1, q_len, kv_len, generator=generator) > 0.4
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
    mine, wide = ([t.to(dtype).requires_grad_() for t in leaves] for dtype in (torch.float32, torch.float64))
    out, lse = in_parts(*mine[:3], mask, cuts, strategy, *mine[3:])
    golden, golden_lse = attention_reference(
        *wide[:3], AttentionSpec(), mask=mask, sinks=wide[3] if len(wide) == 4 else None
    )
    torch.testing.assert_close(out.double(), golden, atol=3e-6, rtol=3e-6)
    torch.testing.assert_close(lse.double(), golden_lse, atol=3e-6, rtol=3e-6)
    weights = [torch.randn(t.shape, generator=generator).double() for t in (golden, golden_lse)]
    finite = golden_lse.isfinite()
    loss = (out * weights[0].float()).sum() + (lse * weights[1].float())[finite].sum()
    want = (golden * weights[0]).sum() + (golden_lse * weights[1])[finite].sum()
    expected = torch.autograd.grad(want, wide)
    for got, truth in zip(torch.autograd.grad(loss, mine), expected, strict=True):
        torch.testing.assert_close(got.double(), truth, atol=3e-5, rtol=3e-5)


def test_empty_parts_are_empty_again():
    out, lse = torch.zeros(1, 2, 3, 4, requires_grad=True), torch.full((1, 2, 3), float("-inf"), requires_grad=True)
    merged, merged_lse = merge_attention([out, out], [lse, lse])
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)
    grads = torch.autograd.grad(merged.sum() + merged_lse.masked_fill(merged_lse.isneginf(), 0.0).sum(), [out, lse])
    assert not any(grad.isnan().any() or grad.any() for grad in grads)


def test_extreme_logarithms_and_half_precision():
    generator = fresh_generator()
    outs = [torch.randn(1, 1, 5, 4, generator=generator).bfloat16() for _ in range(3)]
    lses = [torch.tensor([[[-4e5, 300.0, -1e30, float("-inf"), 2.0]]]) + shift for shift in (0.0, 1.0, -1.0)]
    out, lse = merge_attention(outs, lses)
    weights = torch.softmax(torch.stack(lses).double(), 0)
    weights[..., 3] = 0.0
    golden = sum(weight.unsqueeze(-1) * part.double() for weight, part in zip(weights, outs, strict=True))
    torch.testing.assert_close(out.double(), golden, atol=2e-2, rtol=8e-3)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert lse[0, 0, 3] == float("-inf")


def test_packed_results():
    generator = fresh_generator()
    q, k, v = (torch.randn(50, 2, 8, generator=generator) for _ in range(3))
    starts = torch.tensor([0, 20, 50]).int()
    parts = []
    for half in (0, 1):  # of each segment's keys
        picked = torch.cat([torch.arange(half * 10, half * 10 + 10), torch.arange(20 + half * 15, 35 + half * 15)])
        packed = {"cu_seqlens_q": starts, "cu_seqlens_k": torch.tensor([0, 10, 25]).int(), "return_lse": True}
        parts.append(attention(q, k[picked], v[picked], **packed))
    out, lse = merge_attention(*zip(*parts, strict=True))
    whole, whole_lse = attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, return_lse=True)
    torch.testing.assert_close(out, whole, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse, whole_lse, atol=2e-6, rtol=2e-6)


def test_wrong_parts_are_refused():
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    for outs, lses, message in (
        ([], [], "outs has 0 parts and lses 0"),
        ([out], [lse, lse], "outs has 1 parts and lses 2"),
        ([out, out[..., :2]], [lse, lse], r"outs\[1\] is torch.float32 \(1, 2, 3, 2\)"),
        ([out], [lse[..., :2]], r"lses\[0\] has shape \(1, 2, 2\); outs\[0\] takes \(1, 2, 3\)"),
        ([out[0, 0]], [lse[0, 0]], r"outs\[0\] has shape \(3, 4\); allowed"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_attention(outs, lses)
    for outs, lses, message in (
        ([out], [lse.long()], r"lses\[0\] is torch.int64"),
        (out, lse, "outs is Tensor; allowed: a sequence of tensors"),
        ([out], None, "lses is NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            merge_attention(outs, lses)
