"""Our Ascend C vector kernels, emulated, against the float64 references by the two rules of parity."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules.attention.merge import merge_attention
from atb_modules.kernels.reference.cache import rotary_append_reference
from atb_modules.kernels.reference.mlp import gated_activation_reference
from atb_modules.kernels.reference.norm import add_rms_norm_reference, rms_norm_reference
from atb_modules.testing import assert_parity, fresh_generator
from atb_modules.testing.ascendc import build_kernels
from atb_modules.testing.ascendc import kernels as emulated

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ("rms_norm", "add_rms_norm", "rms_norm_backward", "gated", "rotary_append", "lse_merge")
#: odd and even widths, widths of one buffer instead of two, and rows longer than the unified buffer
SHAPES = [(1, 1), (3, 7), (130, 64), (37, 1001), (2, 4096), (50, 5120), (3, 9000), (2, 30001)]

all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def built():
    build_kernels(emulated.ASCENDC / f"{name}.cpp" for name in NAMES)


def randn(generator, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=generator).to(dtype)


def assert_equal_but_for_ties(mine, truth):
    """Where a value lies between two that its dtype has, the last bit of a float decides which one it becomes."""
    error = (mine.double() - truth.double()).abs()
    assert (error <= 2 * torch.finfo(mine.dtype).eps * truth.double().abs()).all()
    assert int((error > 0).sum()) <= max(2, 1e-3 * error.numel())


@all_dtypes
@pytest.mark.parametrize(("offset", "cast_first"), [(0.0, False), (1.0, False), (0.0, True)])
def test_rms_norm(dtype, offset, cast_first):
    generator = fresh_generator()
    options = {"weight_offset": offset, "cast_first": cast_first}
    for rows, width in SHAPES:
        x, weight = randn(generator, rows, width, dtype=dtype), randn(generator, width, dtype=dtype)
        for w in (weight, None):
            y, rstd, _ = emulated.rms_norm(x, w, 1e-5, **options, trace=False)
            plain = rms_norm_reference(x, w, 1e-5, **options)
            if cast_first and dtype != torch.float32:
                assert_equal_but_for_ties(y, plain)
            else:
                golden = rms_norm_reference(x.double(), None if w is None else w.double(), 1e-5, **options)
                assert_parity(y, golden, plain, reduction=width, what=f"{rows} x {width}")
            assert_parity(rstd, torch.rsqrt(x.double().pow(2).mean(-1) + 1e-5), reduction=width)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 300),
    width=st.integers(1, 200),
    soc=st.sampled_from(["ascend910b3", "ascend910_93", "ascend950"]),
)
def test_norms_of_any_shape(dtype, rows, width, soc):
    generator = fresh_generator()
    x, residual = (randn(generator, rows, width, dtype=dtype) for _ in range(2))
    weight = randn(generator, width, dtype=dtype)
    y, total, _, _ = emulated.add_rms_norm(x, residual, weight, 1e-5, soc=soc, trace=False)
    assert torch.equal(total, x + residual)
    assert_parity(y, rms_norm_reference(total.double(), weight.double(), 1e-5), reduction=width)


@all_dtypes
def test_add_rms_norm(dtype):
    generator = fresh_generator()
    for rows, width in SHAPES:
        x, residual = (randn(generator, rows, width, dtype=dtype) for _ in range(2))
        weight = randn(generator, width, dtype=dtype)
        for keep in (True, False):
            y, total, rstd, _ = emulated.add_rms_norm(x, residual, weight, 1e-5, keep_rstd=keep, trace=False)
            plain, rounded = add_rms_norm_reference(x, residual, weight, 1e-5)
            assert torch.equal(total, rounded)
            golden = rms_norm_reference(rounded.double(), weight.double(), 1e-5)
            assert_parity(y, golden, plain, reduction=width, what=f"{rows} x {width}")
            assert (rstd is not None) == keep


@all_dtypes
@pytest.mark.parametrize("of_sum", [False, True])
def test_backward_of_the_norms(dtype, of_sum):
    generator = fresh_generator()
    for rows, width in SHAPES:
        x, grad_y, grad_sum = (randn(generator, rows, width, dtype=dtype) for _ in range(3))
        weight = randn(generator, width, dtype=dtype)
        rstd = torch.rsqrt(x.float().pow(2).mean(-1) + 1e-5)
        for w in (weight, None):
            leaves = [t.double().requires_grad_() for t in (x, weight)]
            y = rms_norm_reference(leaves[0], None if w is None else leaves[1], 1e-5, 1.0 if w is not None else 0.0)
            total = (y * grad_y.double()).sum() + ((leaves[0] * grad_sum.double()).sum() if of_sum else 0.0)
            grads = torch.autograd.grad(total, leaves, allow_unused=True)
            grad_x, grad_weight, _ = emulated.rms_norm_backward(
                grad_y, x, rstd, w, grad_sum if of_sum else None, weight_offset=1.0, trace=False
            )
            assert_parity(grad_x, grads[0], reduction=width, what=f"{rows} x {width}")
            if w is not None:
                torch.testing.assert_close(grad_weight.double(), grads[1], atol=1e-4, rtol=1e-4)


def test_the_backward_takes_the_rstd_of_the_forward():
    """Through both kernels, as a training step would: gradients of x, of the residual and of the weight."""
    generator = fresh_generator()
    x, residual, grad_y, grad_sum = (randn(generator, 70, 333) for _ in range(4))
    weight = randn(generator, 333)
    _, total, rstd, _ = emulated.add_rms_norm(x, residual, weight, 1e-6)
    grad_x, grad_weight, _ = emulated.rms_norm_backward(grad_y, total, rstd, weight, grad_sum)
    leaves = [t.double().requires_grad_() for t in (x, residual, weight)]
    outputs = add_rms_norm_reference(*leaves, 1e-6)
    golden = torch.autograd.grad(outputs, leaves, [grad_y.double(), grad_sum.double()])
    for gradient, truth in zip((grad_x, grad_x, grad_weight), golden, strict=True):
        torch.testing.assert_close(gradient.double(), truth, atol=1e-4, rtol=1e-4)


@all_dtypes
@pytest.mark.parametrize("kind", emulated.GATES)
def test_gated_activation(dtype, kind):
    generator = fresh_generator()
    for rows, width in [(1, 1), (3, 7), (130, 64), (37, 1001), (3, 11008), (700, 24)]:
        fused = 3.0 * randn(generator, rows, 2 * width, dtype=dtype)
        halves = fused.split(width, dim=-1)
        golden = gated_activation_reference(*(t.double() for t in halves), kind)
        plain = gated_activation_reference(*halves, kind)
        for gate, up in (halves, [t.contiguous() for t in halves]):
            out, _ = emulated.gated_activation(gate, up, kind, trace=False)
            assert_parity(out, golden, plain, what=f"{rows} x {width}")


def test_gated_activation_saturates_without_nan():
    gate = torch.tensor([[-1e4, -200.0, -90.0, -1e-30, 0.0, 90.0, 200.0, 1e4]])
    for kind in emulated.GATES:
        out, _ = emulated.gated_activation(gate, torch.ones(1, 8), kind)
        assert torch.isfinite(out).all() and torch.equal(out[:, -2:], gate[:, -2:])
        assert out[:, :2].abs().max() < 1e-20


@all_dtypes
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "value_dim", "pairs", "page_size"),
    [
        (1, 32, 8, 128, 128, 64, 128),
        (11, 4, 2, 24, 24, 8, 4),
        (5, 3, 1, 80, 80, 40, 16),
        (9, 16, 8, 192, 128, 32, 17),
        (70, 1, 1, 7, 5, 3, 3),
        (3, 0, 2, 64, 64, 32, 512),
        (2, 64, 8, 128, 128, 64, 64),
    ],
)
def test_rotary_append(dtype, interleaved, tokens, heads, kv_heads, dim, value_dim, pairs, page_size):
    """Pages hold NaN before: slot -1 and every other slot are left alone."""
    generator = fresh_generator()
    pages = tokens // page_size + 2
    qk = randn(generator, tokens, heads + kv_heads, dim, dtype=dtype)
    values = randn(generator, tokens, kv_heads, value_dim, dtype=dtype)
    angles = 10 * randn(generator, tokens, pairs)
    slots = torch.randperm(pages * page_size, generator=generator)[:tokens]
    if tokens > 1:
        slots[tokens // 2] = -1
    cos, sin = angles.cos(), angles.sin()

    def empty(kind, size):
        return torch.full((pages, kv_heads, page_size, size), math.nan, dtype=kind)

    q, k = qk.clone().split([heads, kv_heads], dim=1)
    k_pages, v_pages = empty(dtype, dim), empty(dtype, value_dim)
    for wanted in (slots, slots.int()):
        q.copy_(qk[:, :heads])
        emulated.rotary_append(q, k, values, cos, sin, k_pages, v_pages, wanted, interleaved=interleaved, trace=False)
    golden_q, golden_k = qk.double().split([heads, kv_heads], dim=1)
    golden_pages = [empty(torch.float64, dim), empty(torch.float64, value_dim)]
    rotary_append_reference(golden_q, golden_k, values.double(), cos, sin, *golden_pages, slots, interleaved)
    for mine, truth in zip((q, k_pages, v_pages), (golden_q, *golden_pages), strict=True):
        assert_parity(mine, truth)
    assert torch.equal(k, qk[:, heads:])


@all_dtypes
@pytest.mark.parametrize(
    ("parts", "rows", "width"), [(1, 1, 1), (2, 5, 64), (7, 100, 80), (3, 700, 128), (33, 50, 192)]
)
def test_lse_merge(dtype, parts, rows, width):
    generator = fresh_generator()
    outs, lses = randn(generator, parts, rows, width, dtype=dtype), 5.0 * randn(generator, parts, rows)
    empty = torch.rand(parts, rows, generator=generator) < 0.3
    empty[:, 0] = True
    outs[empty], lses[empty] = 0.0, -math.inf
    out, lse, _ = emulated.lse_merge(outs, lses, trace=False)
    wide = [[t.unsqueeze(1) for t in outs.double()], [t.unsqueeze(0) for t in lses.double()]]
    golden, golden_lse = merge_attention(*wide)
    assert_parity(out, golden[:, 0])
    assert_parity(lse, golden_lse[0])
    assert out[0].abs().max() == 0.0 and lse[0] == -math.inf


def test_results_do_not_change_from_run_to_run():
    generator = fresh_generator()
    x, grad = (randn(generator, 101, 777) for _ in range(2))
    weight = randn(generator, 777)
    runs = []
    for _ in range(2):
        y, rstd, _ = emulated.rms_norm(x, weight)
        runs.append((y, rstd, *emulated.rms_norm_backward(grad, x, rstd, weight)[:2]))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_calls_that_the_kernels_do_not_take():
    x, whole = torch.ones(2, 7), torch.ones(2, 8)
    for call, reason in (
        (lambda: emulated.rms_norm(x, None, soc="ascend310p", keep_rstd=False), "multiples of 32 bytes"),
        (lambda: emulated.rms_norm(whole, None, soc="ascend310p"), "returns no rstd"),
        (lambda: emulated.rms_norm(x.bfloat16(), None, soc="ascend310p"), "no bfloat16"),
        (lambda: emulated.rms_norm(x[:0], None), "number of rows"),
        (
            lambda: emulated.rms_norm_backward(whole, whole, whole[0], None, soc="ascend310p"),
            "the backward is not",
        ),
        (lambda: emulated.lse_merge(torch.ones(600, 1, 8), torch.ones(600, 1)), "number of parts is 1 to 512"),
    ):
        with pytest.raises(ValueError, match=reason):
            call()
    with pytest.raises(ValueError, match="kind is 'relu'"):
        emulated.gated_activation(x, x, "relu")
    with pytest.raises(TypeError, match="torch.float64"):
        emulated.rms_norm(x.double(), None)
