"""Gradients through the output and the LSE of the fused attention, with sinks and packed, against float64."""

from __future__ import annotations

import pytest
import torch

from atb_modules.kernels.reference.attention import attention_reference
from atb_modules.ops import attention
from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec
from atb_modules.testing import fresh_generator

SPECS = {
    "full": AttentionSpec(),
    "causal": AttentionSpec(causal=True),
    "window": AttentionSpec(causal=True, window=(5, None)),
    "both sides": AttentionSpec(window=(3, 2)),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_gradients_of_output_and_lse(npu, spec, sinks, packed):
    generator = fresh_generator()
    q_len, kv_len = (23, 23) if packed else (9, 14)
    q, k, v = (torch.randn(1, h, n, 16, generator=generator) for h, n in ((4, q_len), (2, kv_len), (2, kv_len)))
    sink = torch.randn(4, generator=generator) if sinks else None
    starts = torch.tensor([0, 4, 4, 15, 23], dtype=torch.int32) if packed else None
    d_out, d_lse = torch.randn(1, 4, q_len, 16, generator=generator), torch.randn(1, 4, q_len, generator=generator)

    wide = [t.double().requires_grad_() for t in (q, k, v)] + ([sink.double().requires_grad_()] if sinks else [])
    overlays = Overlays(starts, starts) if packed else None
    out, lse = attention_reference(*wide[:3], spec, sinks=wide[3] if sinks else None, overlays=overlays)
    truth = torch.autograd.grad((out * d_out).sum() + (lse * d_lse).sum(), wide)

    mine = [t.to("npu:0").requires_grad_() for t in (q, k, v)] + ([sink.to("npu:0").requires_grad_()] if sinks else [])
    there = {} if starts is None else {"cu_seqlens_q": starts.to("npu:0"), "cu_seqlens_k": starts.to("npu:0")}
    out, lse = attention(*mine[:3], spec, sinks=mine[3] if sinks else None, return_lse=True, strategy="ascend", **there)
    loss = (out * d_out.to("npu:0")).sum() + (lse * d_lse.to("npu:0")).sum()
    for got, want in zip(torch.autograd.grad(loss, mine), truth, strict=True):
        torch.testing.assert_close(got.cpu().double(), want, atol=2e-5, rtol=2e-5)


def test_rows_that_see_nothing_have_no_gradient(npu):
    """More queries than keys under causality: the first rows give 0, LSE -inf and gradients 0, with sinks too."""
    generator = fresh_generator()
    for sinks in (None, torch.randn(2, generator=generator).to("npu:0").requires_grad_()):
        q, k, v = (torch.randn(1, 2, n, 16, generator=generator).to("npu:0").requires_grad_() for n in (9, 4, 4))
        out, lse = attention(q, k, v, AttentionSpec(causal=True), sinks=sinks, return_lse=True, strategy="ascend")
        assert (out[:, :, :5] == 0).all()
        alone = (
            torch.full((1, 2, 5), -torch.inf) if sinks is None else sinks.detach().cpu().view(1, 2, 1).expand(1, 2, 5)
        )
        torch.testing.assert_close(lse[:, :, :5].detach().cpu(), alone)
        finite = lse.masked_fill(lse.isneginf(), 0.0)
        grads = torch.autograd.grad(out.sum() + finite.sum(), [q, k, v, *([] if sinks is None else [sinks])])
        assert all(g.isfinite().all() for g in grads) and (grads[0][:, :, :5] == 0).all()
