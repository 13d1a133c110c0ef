"""Every strategy and cross mode against one float64 softmax under one mask: outputs, LSEs, gradients, samples."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules.kernels.registry import kernels
from atb_modules.multimodal import MultiModalLayout, MultiModalSpec, multimodal_attention
from atb_modules.multimodal.attention import unified_mask
from atb_modules.testing import (
    assert_parity,
    fresh_generator,
    plain_attention,
    poisoned_memory,
    summation_orders,
)

from .formula import MODES, draw, truth, visible

#: vision tokens, text tokens, heads, key heads, channels
SIZES = [(9, 21, 4, 2, 16), (65, 130, 3, 3, 20), (33, 1, 4, 1, 72), (1, 70, 2, 2, 8)]
#: each strategy by the kernels that AUTO takes for such sizes, and by our C++ ones
STRATEGIES = [kernel.strategy.value for kernel in kernels("multimodal_attention")] + ["auto"]
WAYS = [(word, "auto") for word in STRATEGIES] + [(word, "cpu") for word in ("three_call", "prefix", "unified")]


def by(way):
    return dict(zip(("strategy", "attention_strategy"), way, strict=True))


def wide(sides):
    return [tuple(t.detach().double().requires_grad_() for t in side) for side in sides]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_one_softmax_under_one_mask(way, mode, sizes):
    vision_len, text_len, heads, kv_heads, dim = sizes
    generator = fresh_generator()
    for spec in (MultiModalSpec(mode), MultiModalSpec(mode, text_causal=False, scale=0.3, softcap=4.0)):
        sides = draw(generator, vision_len, text_len, heads, kv_heads, dim, batch=2)
        golden_sides = wide(sides)
        golden = truth(*golden_sides, spec, visible(spec, vision_len, text_len))
        mine = [tuple(t.clone().requires_grad_() for t in side) for side in sides]
        with poisoned_memory():
            found = multimodal_attention(*mine, spec, return_lse=True, **by(way))
            weights = [torch.randn(t.shape, generator=generator) for t in found]
            leaves, golden_leaves = [*mine[0], *mine[1]], [*golden_sides[0], *golden_sides[1]]
            loss = sum((t * w).sum() for t, w in zip(found, weights, strict=True))
            grads = torch.autograd.grad(loss, leaves)
        for got, want in zip(found, golden, strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), want, atol=4e-6, rtol=4e-6)
        want_loss = sum((t * w.double()).sum() for t, w in zip(golden, weights, strict=True))
        for got, want in zip(grads, torch.autograd.grad(want_loss, golden_leaves), strict=True):
            torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_dtypes_within_the_rules_of_parity(way, mode, dtype):
    generator = fresh_generator()
    spec = MultiModalSpec(mode)
    sides = draw(generator, 40, 90, dtype=dtype, batch=1)
    mask = visible(spec, 40, 90)
    golden = truth(*wide(sides), spec, mask)
    q, k, v = (torch.cat(parts, 2) for parts in zip(*sides, strict=True))
    found = multimodal_attention(*sides, spec, return_lse=True, **by(way))
    assert found[0].dtype == found[1].dtype == dtype
    plain = partial(plain_attention, q, k, v, spec.full, mask=mask)
    got, want = torch.cat(found[:2], 2), torch.cat(golden[:2], 2).detach()
    assert_parity(got, want, summation_orders(plain), reduction=130, what=f"{way} {mode}")
    for got, want in zip(found[2:], golden[2:], strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)


#: samples as (lengths of images, text tokens)
RAGGED = {
    "one image each": [([7], 12), ([20], 3), ([1], 70)],
    "several images": [([7, 5], 12), ([4, 4, 9], 30), ([66], 1)],
    "rows without": [([], 9), ([8, 3], 0), ([5], 17), ([], 0)],
    "no image": [([], 9), ([], 4)],
    "no text": [([6], 0), ([3, 5], 0)],
    "nothing": [([], 0)],
    "an image of no token": [([0, 6], 5), ([0], 3)],
}


def packed_truth(sides, spec, samples):
    """Each sample by itself."""
    parts = []
    vision_at = text_at = 0
    for images, text in samples:
        total = sum(images)
        own = [
            tuple(t[at : at + n].transpose(0, 1)[None] for t in side)
            for side, at, n in zip(sides, (vision_at, text_at), (total, text), strict=True)
        ]
        parts.append(truth(*own, spec, visible(spec, total, text, images)))
        vision_at, text_at = vision_at + total, text_at + text
    outs = [torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in (0, 1)]
    return *outs, *(torch.cat([part[i][0] for part in parts], 1) for i in (2, 3))


def layout_of(samples):
    return MultiModalLayout.from_lengths(
        [sum(images) for images, _ in samples], [text for _, text in samples], [images for images, _ in samples]
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("case", RAGGED)
def test_ragged_samples_and_images(case, way, mode):
    check_ragged(RAGGED[case], way, mode)


def check_ragged(samples, way, mode):
    generator = fresh_generator()
    spec = MultiModalSpec(mode)
    layout = layout_of(samples)
    sides = draw(generator, int(layout.cu_vision[-1]), int(layout.cu_text[-1]))
    golden_sides = wide(sides)
    golden = packed_truth(golden_sides, spec, samples)
    mine = [tuple(t.clone().requires_grad_() for t in side) for side in sides]
    found = multimodal_attention(*mine, spec, layout=layout, return_lse=True, **by(way))
    for got, want in zip(found, golden, strict=True):
        assert got.shape == want.shape and got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=4e-6, rtol=4e-6)
    weights = [torch.randn(t.shape, generator=generator) for t in found[:2]]
    loss = sum((t * w).sum() for t, w in zip(found, weights, strict=False))
    grads = torch.autograd.grad(loss, [*mine[0], *mine[1]])
    want_loss = sum((t * w.double()).sum() for t, w in zip(golden, weights, strict=False))
    wanted = torch.autograd.grad(want_loss, [*golden_sides[0], *golden_sides[1]], allow_unused=True)
    for got, want in zip(grads, wanted, strict=True):
        expected = torch.zeros_like(got).double() if want is None else want
        torch.testing.assert_close(got.double(), expected, atol=3e-5, rtol=3e-5)


@given(
    samples=st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.integers(0, 11)), min_size=1, max_size=4),
    mode=st.sampled_from(MODES),
    way=st.sampled_from(WAYS),
)
@settings(max_examples=40, deadline=None)
def test_any_ragged_batch(samples, mode, way):
    check_ragged(samples, way, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("sizes", [(0, 5), (6, 0), (0, 0)], ids=str)
def test_a_modality_without_tokens(sizes, way, mode):
    generator = fresh_generator()
    spec = MultiModalSpec(mode)
    sides = wide(draw(generator, *sizes, batch=2))
    golden = truth(*sides, spec, visible(spec, *sizes))
    mine = [tuple(t.detach().float().requires_grad_() for t in side) for side in sides]
    found = multimodal_attention(*mine, spec, return_lse=True, **by(way))
    for got, want in zip(found, golden, strict=True):
        torch.testing.assert_close(got.double(), want, atol=4e-6, rtol=4e-6)
    (found[0].sum() + found[1].sum()).backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for side in mine for t in side)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", ["three_call", "prefix", "unified"])
def test_gradcheck_in_float64(strategy, mode):
    generator = torch.Generator().manual_seed(3)
    spec = MultiModalSpec(mode)
    layout = layout_of([([2, 1], 3), ([], 2)])
    leaves = [
        torch.randn(n, 2, 3, generator=generator, dtype=torch.float64).requires_grad_() for n in (3, 3, 3, 5, 5, 5)
    ]

    def function(*qkv):
        found = multimodal_attention(
            qkv[:3], qkv[3:], spec, layout=layout, return_lse=True, strategy=strategy, attention_strategy="eager"
        )
        return tuple(t.masked_fill(~t.isfinite(), 0.0) for t in found)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_another_sample_changes_no_bit(way):
    generator = fresh_generator()
    layout = layout_of([([7, 30], 70), ([20], 40), ([5], 90)])
    sides = draw(generator, 62, 200)
    spec = MultiModalSpec("both")
    before = multimodal_attention(*sides, spec, layout=layout, return_lse=True, **by(way))
    again = multimodal_attention(*sides, spec, layout=layout, return_lse=True, **by(way))
    for t in sides[0]:
        t[37:57] = torch.randn(20, *t.shape[1:], generator=generator) * 3
    for t in sides[1]:
        t[70:110] = torch.randn(40, *t.shape[1:], generator=generator) * 3
    after = multimodal_attention(*sides, spec, layout=layout, return_lse=True, **by(way))
    assert all(torch.equal(one, other) for one, other in zip(before, again, strict=True))
    kept = [[*range(37), *range(57, 62)], [*range(70), *range(110, 200)]]
    for old, new, rows in zip(before[:2], after[:2], kept, strict=True):
        assert torch.equal(old[rows], new[rows])
        assert not torch.equal(old, new)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_strided_and_expanded_inputs(way):
    generator = fresh_generator()
    spec = MultiModalSpec("both")
    sides = draw(generator, 12, 30, batch=2)
    sides[1] = (sides[1][0], *(t[:1].expand(2, -1, -1, -1) for t in sides[1][1:]))
    odd = [tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in sides[0]), list(sides[1])]
    odd[1][0] = odd[1][0].transpose(-1, -2).contiguous().transpose(-1, -2)
    want = multimodal_attention(*(tuple(t.contiguous() for t in side) for side in sides), spec, **by(way))
    got = multimodal_attention(odd[0], tuple(odd[1]), spec, **by(way))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-6)


def test_the_mask_of_the_unified_call():
    for mode, causal in itertools.product(MODES, (True, False)):
        spec = MultiModalSpec(mode, text_causal=causal)
        assert torch.equal(unified_mask(spec, 3, 4), visible(spec, 3, 4))
        samples = [([2, 3], 4), ([], 2), ([4], 3)]
        blocks = [visible(spec, sum(images), text, images) for images, text in samples]
        got = unified_mask(spec, 9, 9, layout_of(samples))
        vision, text = ([0, 5, 5, 9], [9, 13, 15, 18])
        for number, block in enumerate(blocks):
            rows = [*range(vision[number], vision[number + 1]), *range(text[number], text[number + 1])]
            assert torch.equal(got[rows][:, rows], block)
        assert int(got.sum()) == sum(int(block.sum()) for block in blocks)


def test_issue_size_eight_heads():
    """576 vision and 2,048 text tokens: AUTO within 1e-5 of one softmax, forward and backward."""
    generator = fresh_generator()
    spec = MultiModalSpec()
    sides = draw(generator, 576, 2048, 8, 8, 128, batch=1)
    mine = [tuple(t.requires_grad_() for t in side) for side in sides]
    found = multimodal_attention(*mine, spec)
    mask = unified_mask(spec, 576, 2048)
    q, k, v = (torch.cat(parts, 2) for parts in zip(*mine, strict=True))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).split([576, 2048], 2)
    weights = [torch.randn(t.shape, generator=generator) for t in found]
    leaves = [*mine[0], *mine[1]]
    for got, other in zip(found, want, strict=True):
        torch.testing.assert_close(got, other, atol=1e-5, rtol=0)
    grads = torch.autograd.grad(sum((t * w).sum() for t, w in zip(found, weights, strict=True)), leaves)
    wanted = torch.autograd.grad(sum((t * w).sum() for t, w in zip(want, weights, strict=True)), leaves)
    for got, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, other, atol=1e-5, rtol=1e-4)


def test_a_second_derivative_is_refused_and_not_wrong():
    sides = draw(torch.Generator().manual_seed(0), 5, 7, batch=1)
    leaves = [t.requires_grad_() for side in sides for t in side]
    for inner in ("cpu", "eager"):
        outs = multimodal_attention(*sides, MultiModalSpec("both"), strategy="three_call", attention_strategy=inner)
        out = sum(part.square().sum() for part in outs)
        if inner == "cpu":
            with pytest.raises(RuntimeError, match="no second derivative; attention_strategy='eager' has"):
                torch.autograd.grad(out, leaves, create_graph=True)
        else:
            grads = torch.autograd.grad(out, leaves, create_graph=True)
            torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)


def test_dropout_keeps_the_expectation():
    generator = torch.Generator().manual_seed(1)
    sides = draw(generator, 6, 8, batch=1)
    torch.manual_seed(5)
    for strategy in ("three_call", "prefix", "unified"):
        many = [tuple(t.expand(3000, -1, -1, -1) for t in side) for side in sides]
        found = multimodal_attention(*many, MultiModalSpec(), dropout_p=0.2, strategy=strategy)
        for got, want in zip(found, multimodal_attention(*sides, MultiModalSpec()), strict=True):
            torch.testing.assert_close(got.mean(0), want[0], atol=6e-2, rtol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_of_another_width(strategy):
    generator = fresh_generator()
    sides = [(q, k, torch.randn(*v.shape[:3], 5, generator=generator)) for q, k, v in draw(generator, 6, 9, batch=2)]
    spec = MultiModalSpec("both")
    found = multimodal_attention(*sides, spec, strategy=strategy)
    for got, want in zip(found, truth(*wide(sides), spec, visible(spec, 6, 9)), strict=False):
        assert got.shape[-1] == 5
        torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-6)


def test_autocast():
    generator = fresh_generator()
    sides = draw(generator, 12, 30, batch=1)
    sides[0] = (*sides[0][:2], sides[0][2])
    with torch.autocast("cpu", torch.bfloat16):
        found = multimodal_attention(*sides)
    assert all(t.dtype == torch.bfloat16 for t in found)


def test_opcheck_of_the_pair():
    generator = torch.Generator().manual_seed(0)
    q, k, v, other_k, other_v = (torch.randn(1, 2, n, 8, generator=generator).requires_grad_() for n in (5, 5, 5, 3, 3))
    torch.library.opcheck(
        torch.ops.atb_modules.attention_pair.default,
        (q, k, v, other_k, other_v, None, None, None, None, 1, 0.3, 0.0),
    )
