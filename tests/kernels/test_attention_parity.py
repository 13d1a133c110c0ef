"""Every attention kernel of the registry against the float64 reference: specs, dtypes, shapes, strides, gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from atb_modules.kernels.reference.attention import attention_reference
from atb_modules.ops import attention
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import AttentionStrategy
from atb_modules.testing import assert_parity, fresh_generator, plain_attention, poisoned_memory, summation_orders
from atb_modules.testing.devices import strategies_under_test

STRATEGIES = strategies_under_test("attention")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

SPECS = {
    "full": AttentionSpec(),
    "causal": AttentionSpec(causal=True),
    "top_left": AttentionSpec(causal="top_left"),
    "window": AttentionSpec(window=(3, 2)),
    "causal_window": AttentionSpec(causal=True, window=(5, None)),
    "scale": AttentionSpec(causal=True, scale=0.3),
    "softcap": AttentionSpec(causal=True, softcap=2.0),
}

#: batch, heads, kv_heads, q_len, kv_len, head_dim; batches for hundreds of rows: a share of ten elements says nothing
SHAPES = [
    (10, 4, 2, 7, 7, 16),
    (90, 3, 1, 1, 33, 24),
    (26, 2, 2, 5, 70, 80),
    (1, 4, 4, 65, 65, 64),
    (15, 2, 1, 9, 4, 8),
    (1, 1, 1, 130, 257, 72),
]


def draw(shape, dtype, generator):
    batch, heads, kv_heads, q_len, kv_len, dim = shape
    return tuple(
        torch.randn(batch, h, length, dim, generator=generator).to(dtype)
        for h, length in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    )


def check(strategy, q, k, v, spec, **tensors):
    """Forward, LSE where the strategy has it; a refusal must come with reasons."""
    wide = {name: t.double() if t.dtype.is_floating_point else t for name, t in tensors.items()}
    golden, golden_lse = attention_reference(q.double(), k.double(), v.double(), spec, **wide)
    plain = summation_orders(partial(plain_attention, q, k, v, spec, **tensors))
    try:
        with poisoned_memory():
            out, lse = attention(q, k, v, spec, strategy=strategy, return_lse=True, **tensors)
    except ValueError as refusal:
        assert f"strategy is '{strategy.value}', which cannot serve" in str(refusal)
        assert strategy is not AttentionStrategy.REFERENCE
        lse = None
        try:
            with poisoned_memory():
                out, _ = attention(q, k, v, spec, strategy=strategy, **tensors)
        except ValueError as second:
            assert f"strategy is '{strategy.value}', which cannot serve" in str(second)
            return
    assert out.dtype == q.dtype
    terms = k.shape[2]
    assert_parity(out, golden, plain, reduction=terms, softcap=spec.softcap is not None, what=f"out of {strategy}")
    if lse is not None:
        assert lse.dtype == torch.float32
        tolerance = 3e-6 if q.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(lse.double(), golden_lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_forward_and_lse(strategy, spec, dtype):
    generator = fresh_generator()
    for shape in SHAPES:
        check(strategy, *draw(shape, dtype, generator), spec)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_masks_sinks_and_alibi(strategy, dtype):
    generator = fresh_generator()
    for shape in SHAPES:
        batch, heads, _, q_len, kv_len, _ = shape
        q, k, v = draw(shape, dtype, generator)
        keep = torch.rand(batch, 1, q_len, kv_len, generator=generator) > 0.4
        keep[..., 0, :] = False  # a fully masked row
        bias = torch.randn(heads, q_len, kv_len, generator=generator)
        spec = AttentionSpec(causal=True, window=(9, None))
        check(strategy, q, k, v, AttentionSpec(), mask=keep)
        check(strategy, q, k, v, spec, mask=keep[:, :, :1])
        check(strategy, q, k, v, spec, mask=bias)
        check(strategy, q, k, v, spec, mask=bias.masked_fill(~keep[0], float("-inf")))
        check(strategy, q, k, v, spec, sinks=torch.randn(heads, generator=generator))
        check(strategy, q, k, v, spec, alibi_slopes=torch.rand(heads, generator=generator))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_strided_and_expanded_inputs(strategy):
    generator = fresh_generator()
    base = torch.randn(2, 33, 8, 16, generator=generator)
    q = base[:, :, :4].transpose(1, 2)  # (2, 4, 33, 16), heads inside tokens
    kv = torch.randn(1, 1, 33, 32, generator=generator).expand(2, 2, 33, 32)
    k, v = kv[..., ::2], kv[..., 1::2]  # strided last axis, stride 0 over batch and heads
    check(strategy, q, k, v, AttentionSpec(causal=True))
    square = torch.randn(1, 2, 64, 64, generator=generator).transpose(-1, -2)
    check(strategy, square, square, square, AttentionSpec())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_value_dim_other_than_head_dim(strategy):
    generator = fresh_generator()
    q, k = (torch.randn(1, 2, n, 16, generator=generator) for n in (5, 9))
    v = torch.randn(1, 2, 9, 24, generator=generator)
    check(strategy, q, k, v, AttentionSpec(causal=True))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 0, 5), (1, 5, 0), (1, 0, 0), (0, 3, 3)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_empty(strategy, sizes, causal):
    batch, q_len, kv_len = sizes
    q = torch.randn(batch, 2, q_len, 8, requires_grad=True)
    k, v = (torch.randn(batch, 2, kv_len, 8, requires_grad=True) for _ in range(2))
    out, lse = attention(q, k, v, AttentionSpec(causal=causal), return_lse=True, strategy=strategy)
    assert out.shape == (batch, 2, q_len, 8)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full((batch, 2, q_len), float("-inf")))
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_gradients(strategy, spec):
    """dq, dk, dv and those of bias, slopes and sinks, each alone requiring grad; masked-out rows give zeros."""
    generator = fresh_generator()
    for shape in ((2, 4, 2, 7, 7, 16), (1, 2, 1, 5, 20, 24), (1, 2, 2, 9, 4, 8)):
        _, heads, _, q_len, kv_len, _ = shape
        inputs = draw(shape, torch.float32, generator)
        keep = torch.rand(q_len, kv_len, generator=generator) > 0.3
        keep[0] = False
        extras = {
            "mask": torch.randn(1, heads, q_len, kv_len, generator=generator).masked_fill(~keep, float("-inf")),
            "sinks": torch.randn(heads, generator=generator),
            "alibi_slopes": torch.rand(heads, generator=generator),
        }
        for name in (None, *extras):
            tensors = {} if name is None else {name: extras[name]}
            check_gradients(strategy, inputs, spec, tensors)


def check_gradients(strategy, inputs, spec, tensors):
    leaves = list(inputs) + list(tensors.values())
    golden_leaves = [t.double().requires_grad_() for t in leaves]
    names = list(tensors)
    golden, _ = attention_reference(*golden_leaves[:3], spec, **dict(zip(names, golden_leaves[3:], strict=True)))
    weights = torch.randn(golden.shape, dtype=torch.float64)
    expected = torch.autograd.grad((golden * weights).sum(), golden_leaves)
    for alone in range(len(leaves)):
        mine = [t.clone().requires_grad_(index == alone) for index, t in enumerate(leaves)]
        try:
            out, _ = attention(*mine[:3], spec, strategy=strategy, **dict(zip(names, mine[3:], strict=True)))
        except ValueError as refusal:
            assert "cannot serve" in str(refusal)
            continue
        (gradient,) = torch.autograd.grad((out * weights.float()).sum(), mine[alone])
        torch.testing.assert_close(gradient.double(), expected[alone], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("shape", [(1, 4, 7, 7), (4, 1, 7), (1, 1, 7, 1)], ids=str)
def test_gradient_of_a_broadcast_bias_under_auto(shape):
    """A bias alone requires grad; its gradient is summed over the broadcast axes (pytorch #148476)."""
    q, k, v = draw((2, 4, 2, 7, 7, 16), torch.float32, fresh_generator())
    bias = torch.randn(shape, requires_grad=True)
    out, _ = attention(q, k, v, mask=bias)
    (gradient,) = torch.autograd.grad(out.square().sum(), bias)
    wide = bias.detach().double().requires_grad_()
    golden, _ = attention_reference(q.double(), k.double(), v.double(), AttentionSpec(), mask=wide)
    (expected,) = torch.autograd.grad(golden.square().sum(), wide)
    torch.testing.assert_close(gradient.double(), expected, atol=1e-5, rtol=1e-5)


def test_lse_is_differentiable_where_it_is_returned():
    q, k, v = draw((1, 2, 2, 5, 9, 8), torch.float64, fresh_generator())
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def both(*tensors):
        return attention(*tensors, AttentionSpec(causal=True), return_lse=True, strategy="eager")

    assert torch.autograd.gradcheck(both, leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_extreme_scores(strategy, dtype):
    """Softcap saturates, and very negative logits keep their softmax (vLLM #56578, flashinfer #4267)."""
    big = 100.0
    q = torch.full((1, 1, 3, 8), big).to(dtype)
    k = (torch.linspace(-big, big, 9).reshape(1, 1, 9, 1) * torch.ones(8)).to(dtype)
    v = torch.randn(1, 1, 9, 8).to(dtype)
    check(strategy, q, k, v, AttentionSpec(softcap=50.0, scale=1.0))
    negative = -(torch.arange(1, 10).reshape(1, 1, 9, 1) * 100.0 + 500.0) * torch.ones(8)
    check(strategy, torch.full((1, 1, 3, 8), 300.0).to(dtype), negative.to(dtype), v, AttentionSpec(scale=1.0))


@pytest.mark.parametrize("kv_len", [16384, 65536])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_long_rows(strategy, dtype, kv_len):
    generator = fresh_generator()
    q, k, v = draw((1, 1, 1, 2, kv_len, 16), dtype, generator)
    check(strategy, q, k, v, AttentionSpec(causal=True))


def test_grouped_heads_read_their_own_key_head():
    """Head h reads key head h // group: with distinct key heads, tiling instead of repeating would be seen."""
    q = torch.randn(1, 6, 130, 8)
    k = torch.randn(1, 3, 150, 8)
    v = torch.arange(3.0).reshape(1, 3, 1, 1).expand(1, 3, 150, 8)
    for strategy in STRATEGIES:
        out, _ = attention(q, k, v, strategy=strategy)
        assert torch.allclose(out[0, :, 0, 0], torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0]))


def test_sinks_with_a_window_join_each_softmax_once():
    """GPT-OSS's sinks with a window, decode and prefill (vllm-metal PR #550)."""
    sinks = torch.tensor([-2.0, 0.0, 3.0, 8.0])
    for q_len in (1, 9):
        q, k, v = draw((1, 4, 4, q_len, 37, 16), torch.float32, fresh_generator())
        spec = AttentionSpec(causal=True, window=(3, 0))
        for strategy in STRATEGIES:
            check(strategy, q, k, v, spec, sinks=sinks)
