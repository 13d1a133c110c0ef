"""Dropout inside the fused attention, emulated: what is dropped, its expectation, and one mask in both directions.

The mask of a call is recovered with values that are the identity: the output is then the weights times the mask.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from atb_modules.attention import Attention, AttentionConfig
from atb_modules.kernels.reference.attention import attention_reference
from atb_modules.kernels.registry import record_choices
from atb_modules.ops import attention
from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec
from atb_modules.testing import fresh_generator
from atb_modules.testing.npu import OperatorError, dry_run

from .helpers import DEVICE, draw
from .test_planted_faults import Tampered

CAUSAL = AttentionSpec(causal=True)
SPECS = {"full": AttentionSpec(), "causal": CAUSAL, "window": AttentionSpec(causal=True, window=(5, None))}
FORWARD, BACKWARD = "npu::npu_fusion_attention", "npu::npu_fusion_attention_grad"
P = 0.3


def seeded(seed):
    torch.npu.manual_seed(seed)


def starts_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def call(q, k, v, spec, p, seed, strategy="ascend", **more):
    seeded(seed)
    return attention(q, k, v, spec, dropout_p=p, strategy=strategy, **more)


def recovered(q, k, spec, p, seed, **more):
    """Which weights (batch, heads, q_len, kv_len) the call of this seed keeps, and what it makes of them."""
    kv_heads, columns = k.shape[1:3]
    eye = torch.eye(columns).expand(k.shape[0], kv_heads, -1, -1).contiguous()
    wide = [torch.nn.functional.pad(t, (0, max(0, columns - t.shape[-1]))) for t in (q, k)]
    scale = AttentionSpec(spec.causal, spec.window, scale=q.shape[-1] ** -0.5)
    there = [t.to(DEVICE) for t in (*wide, eye)]
    weights = [call(*there, scale, rate, seed, **more)[0].cpu() for rate in (p, 0.0)]
    return weights[0] != 0, weights


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_what_is_kept_is_scaled_and_the_rest_is_zero(npu, spec):
    generator = fresh_generator()
    q, k = draw(generator, 2, 4, 24, 16), draw(generator, 2, 2, 32, 16)
    kept, (dropped, plain) = recovered(q, k, spec, P, 11)
    seen = plain != 0
    torch.testing.assert_close(dropped[kept], plain[kept] / (1 - P), rtol=1e-5, atol=0)
    assert (dropped[~kept] == 0).all() and not (kept & ~seen).any()
    # Binomial: six standard deviations, which a right mask passes with all but 2e-9.
    count, hits = int(seen.sum()), int(kept.sum())
    assert abs(hits - (1 - P) * count) < 6 * math.sqrt(count * P * (1 - P))
    assert (kept[0] != kept[1]).any() and (kept[:, 0] != kept[:, 1]).any(), "rows and heads draw for themselves"


def test_the_expectation_is_the_output_without_dropout(npu):
    """Hoeffding: an element is a sum of independent terms 0 or t_j = P_j v_j / keep, so the mean of n calls is off by
    more than e with probability at most 2 exp(-2 n e^2 / sum t_j^2). With the e of all elements at 1e-9 together, the
    mean lies within it; and it is small enough to tell keep * out from out.
    """
    generator = fresh_generator()
    q, k, v = draw(generator, 1, 2, 6, 16), draw(generator, 1, 2, 9, 16), draw(generator, 1, 2, 9, 16) + 1.0
    calls, keep = 1500, 1 - P
    want, _ = attention_reference(q.double(), k.double(), v.double(), CAUSAL)
    eye = torch.eye(9).expand(1, 2, -1, -1).double()
    weights, _ = attention_reference(q.double(), k.double(), eye, CAUSAL)
    squares = (weights.square() @ v.double().square()) / keep**2
    bound = (squares * math.log(2 * want.numel() / 1e-9) / (2 * calls)).sqrt() + 1e-5
    there = [t.to(DEVICE).expand(100, -1, -1, -1) for t in (q, k, v)]  # every row draws its own mask
    seeded(5)
    total = torch.zeros_like(want)
    for _ in range(calls // 100):
        total += attention(*there, CAUSAL, dropout_p=P, strategy="ascend")[0].cpu().double().sum(0, keepdim=True)
    off = (total / calls - want).abs()
    assert (off <= bound).all(), (off / bound).max()
    assert ((want - keep * want).abs() > bound).any(), "the bound tells a missing 1 / keep"


CASES = {
    "full": {},
    "causal": {"spec": CAUSAL},
    "window": {"spec": SPECS["window"]},
    "rows that see nothing": {"spec": CAUSAL, "q_len": 14},
    "lse": {"spec": CAUSAL, "lse": True},
    "sinks": {"sinks": True},
    "sinks and lse": {"spec": CAUSAL, "sinks": True, "lse": True},
    "mask": {"mask": True},
    "packed": {"spec": CAUSAL, "packed": True},
    "packed, sinks and lse": {"spec": CAUSAL, "packed": True, "sinks": True, "lse": True},
}


def dropped_attention(q, k, v, kept, spec, sinks, mask, overlays):
    """Attention through an explicit mask, by autograd: (out, lse)."""
    eye = torch.eye(k.shape[2], dtype=q.dtype).expand(k.shape[0], k.shape[1], -1, -1)
    weights, lse = attention_reference(q, k, eye, spec, mask=mask, sinks=sinks, overlays=overlays)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (weights * kept / (1 - P)) @ values, lse


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_use_one_mask(npu, name):
    """Gradients of q, k, v, sinks against autograd through the mask that values of the identity show."""
    case = {"spec": AttentionSpec(), "q_len": 7, "lse": False, "sinks": False, "mask": False, "packed": False}
    case |= CASES[name]
    spec, packed, generator = case["spec"], case["packed"], fresh_generator()
    q_len, kv_len = (23, 23) if packed else (case["q_len"], 11)
    q, k, v = (draw(generator, 1, h, n, 24) for h, n in ((4, q_len), (2, kv_len), (2, kv_len)))
    sinks = torch.randn(4, generator=generator) if case["sinks"] else None
    mask = torch.rand(q_len, kv_len, generator=generator) < 0.7 if case["mask"] else None
    starts = starts_of([4, 11, 8]) if packed else None
    there = {"return_lse": case["lse"]}
    there |= {} if mask is None else {"mask": mask.to(DEVICE)}
    there |= {} if starts is None else {"cu_seqlens_q": starts.to(DEVICE), "cu_seqlens_k": starts.to(DEVICE)}
    shown = {} if sinks is None else {"sinks": sinks.to(DEVICE)}
    kept, _ = recovered(q, k, spec, P, 3, **there, **shown)
    leaves = [t.to(DEVICE).requires_grad_() for t in (q, k, v, *([] if sinks is None else [sinks]))]
    wide = [t.double().requires_grad_() for t in (q, k, v, *([] if sinks is None else [sinks]))]
    out, lse = call(*leaves[:3], spec, P, 3, **there, **({} if sinks is None else {"sinks": leaves[3]}))
    overlays = Overlays(starts, starts) if packed else None
    want, want_lse = dropped_attention(*wide[:3], kept, spec, wide[3] if sinks is not None else None, mask, overlays)
    torch.testing.assert_close(out.detach().cpu().double(), want.detach(), atol=2e-5, rtol=2e-5)
    d_out = torch.randn(want.shape, generator=generator)
    loss, truth = (out * d_out.to(DEVICE)).sum(), (want * d_out.double()).sum()
    if case["lse"]:
        torch.testing.assert_close(lse.detach().cpu().double(), want_lse.detach(), atol=2e-5, rtol=2e-5)
        d_lse = torch.randn(want_lse.shape, generator=generator)
        loss, truth = loss + (lse * d_lse.to(DEVICE)).sum(), truth + (want_lse * d_lse.double()).sum()
    gradients = zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, wide), strict=True)
    for got, expected in gradients:
        torch.testing.assert_close(got.cpu().double(), expected, atol=3e-5, rtol=3e-5)
    assert ("npu::npu_fusion_attention_v3" if sinks is not None else FORWARD) in npu.log.names


FAULTS = {
    "backward without dropout": (BACKWARD, lambda c: {"keep_prob": 1.0}),
    "backward of another seed": (BACKWARD, lambda c: {"seed": c["seed"] + 1}),
    "backward of another call": (BACKWARD, lambda c: {"offset": c["offset"] + 12}),
    "backward of another rate": (BACKWARD, lambda c: {"keep_prob": 1 - c["keep_prob"]}),
    "backward of another length": (BACKWARD, lambda c: {"numels": c["numels"] - 1}),
    "what is dropped for what is kept": (FORWARD, lambda c: {"keep_prob": 1 - c["keep_prob"]}),
    "no dropout": (FORWARD, lambda c: {"keep_prob": 1.0}),
}


@pytest.mark.parametrize("name", ["nothing", *FAULTS])
@pytest.mark.parametrize("need_lse", [False, True])
def test_planted_faults(booted_npu, name, need_lse):
    """By torch_npu's own derivative, and by ours where the LSE has a gradient."""
    operator, change = FAULTS.get(name, (BACKWARD, lambda c: {}))
    generator = fresh_generator()
    q, k, v = (draw(generator, 1, h, n, 16) for h, n in ((4, 7), (2, 11), (2, 11)))
    d_out = torch.randn(1, 4, 7, 16, generator=generator)
    with Tampered("npu::none", lambda c: {}):
        kept, _ = recovered(q, k, CAUSAL, P, 3)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    want, _ = dropped_attention(*wide, kept, CAUSAL, None, None, None)
    truth = torch.autograd.grad((want * d_out.double()).sum(), wide)
    leaves = [t.to(DEVICE).requires_grad_() for t in (q, k, v)]

    def compare():
        out, _ = call(*leaves, CAUSAL, P, 3, return_lse=need_lse)
        torch.testing.assert_close(out.detach().cpu().double(), want.detach(), atol=2e-5, rtol=2e-5)
        for got, expected in zip(torch.autograd.grad((out * d_out.to(DEVICE)).sum(), leaves), truth, strict=True):
            torch.testing.assert_close(got.cpu().double(), expected, atol=3e-5, rtol=3e-5)

    with Tampered(operator, change) as tampered:
        if name == "nothing":
            compare()
        else:
            with pytest.raises((AssertionError, OperatorError)):
                compare()
    assert tampered.hits == 1


def test_seeds_repeat_and_calls_differ(npu):
    generator = fresh_generator()
    q = draw(generator, 1, 2, 9, 16).to(DEVICE)
    draws = [call(q, q, q, CAUSAL, 0.5, seed)[0].cpu() for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    seeded(1)
    first, second = (attention(q, q, q, CAUSAL, dropout_p=0.5, strategy="ascend")[0].cpu() for _ in range(2))
    assert torch.equal(first, draws[0]) and not torch.equal(first, second)
    state = torch.npu.get_rng_state()
    third = attention(q, q, q, CAUSAL, dropout_p=0.5, strategy="ascend")[0].cpu()
    torch.npu.set_rng_state(state)
    assert torch.equal(attention(q, q, q, CAUSAL, dropout_p=0.5, strategy="ascend")[0].cpu(), third)


def test_the_generator_moves_as_torch_npus_host_code_moves_it(npu, booted_npu):
    moved, generator = [], torch.npu.default_generators[0]
    q = torch.randn(1, 2, 9, 16).to(DEVICE)
    seeded(1)
    results = torch.ops.npu.npu_fusion_attention(q, q, q, 2, "BNSD", keep_prob=0.5)
    moved.append((generator.get_offset(), results[4:]))
    with torch.utils._python_dispatch._disable_current_modes():
        seeded(1)
        with dry_run():
            results = torch.ops.npu.npu_fusion_attention(q, q, q, 2, "BNSD", keep_prob=0.5)
        moved.append((generator.get_offset(), results[4:]))
    assert moved[0] == moved[1]


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.5])
def test_rates_that_are_none_are_refused(npu, rate):
    q = torch.randn(1, 2, 9, 16).to(DEVICE)
    with pytest.raises(OperatorError, match=r"keep_prob is .*; in \(0, 1\]"):
        torch.ops.npu.npu_fusion_attention(q, q, q, 2, "BNSD", keep_prob=rate)


def test_a_module_drops_in_training_alone(npu):
    torch.manual_seed(0)
    module, plain = (
        Attention(64, 4, num_kv_heads=2, config=AttentionConfig(dropout=rate, causal=True)).to(DEVICE)
        for rate in (0.4, 0.0)
    )
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 9, 64, generator=fresh_generator()).to(DEVICE)
    module.eval()
    assert torch.equal(module(x).cpu(), plain(x).cpu())
    module.train()
    with record_choices() as choices:
        seeded(1)
        first = module(x)
        seeded(2)
        second = module(x)
    assert ("attention", "ascend") in choices
    assert not torch.equal(first.cpu(), second.cpu())
    first.sum().backward()
    assert BACKWARD in npu.log.names


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_call_drops_the_same(npu, use_reentrant):
    generator = fresh_generator()
    values = draw(generator, 1, 4, 9, 16)
    gradients = []
    for wrapped in (False, True):
        x = values.to(DEVICE).requires_grad_()
        seeded(8)
        run = lambda t: attention(t, t, t, CAUSAL, dropout_p=0.5, strategy="ascend")[0]  # noqa: E731
        out = checkpoint(run, x, use_reentrant=use_reentrant) if wrapped else run(x)
        out.square().sum().backward()
        gradients.append(x.grad.cpu())
    torch.testing.assert_close(gradients[0], gradients[1])


def test_without_gradients_it_drops_all_the_same(npu):
    q = draw(fresh_generator(), 1, 2, 9, 16, dtype=torch.float16).to(DEVICE)
    with torch.no_grad():
        plain, dropped = (call(q, q, q, CAUSAL, p, 4)[0].cpu() for p in (0.0, 0.5))
    assert not torch.equal(plain, dropped) and FORWARD in npu.log.names
