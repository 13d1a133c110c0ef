"""Every kernel of norms, activations, linear, rotary and cache writes against its float64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules import ops
from atb_modules.kernels.reference.linear import linear_reference
from atb_modules.kernels.reference.mlp import gated_activation_reference
from atb_modules.kernels.reference.norm import (
    add_layer_norm_reference,
    add_rms_norm_reference,
    layer_norm_reference,
    rms_norm_reference,
)
from atb_modules.kernels.reference.rotary import rotary_reference
from atb_modules.testing import assert_parity, fresh_generator, poisoned_memory
from atb_modules.testing.devices import strategies_under_test

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, 7), (1, 1, 1), (2, 5, 64), (4, 1030), (0, 16), (130, 576)]


def strategies(op):
    return pytest.mark.parametrize("strategy", strategies_under_test(op), ids=str)


def randn(shape, generator, dtype=torch.float32):
    return torch.randn(shape, generator=generator).to(dtype)


def check(call, reference, tensors, what, rounds_inside=False):
    """Forward parity, and gradients in float32: ``call`` and ``reference`` take the same tensors.

    ``rounds_inside`` is for formulas that round to the input's dtype on the way, which float64 would not show.
    """
    wide = tensors if rounds_inside else [None if t is None else t.double() for t in tensors]
    with poisoned_memory():
        mine = call(*tensors)
    golden = reference(*wide)
    for one, truth in zip(as_tuple(mine), as_tuple(golden), strict=True):
        assert_parity(one, truth, reduction=tensors[0].shape[-1], what=what)
    if tensors[0].dtype != torch.float32:
        return
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    wide_leaves = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    weights = [torch.randn(t.shape, dtype=torch.float64) for t in as_tuple(golden)]
    got = gradients(as_tuple(call(*leaves)), weights, leaves)
    want = gradients(as_tuple(reference(*wide_leaves)), weights, wide_leaves)
    for one, truth in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), truth, atol=2e-4, rtol=2e-4)


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def gradients(outputs, weights, leaves):
    total = sum((out * weight.to(out.dtype)).sum() for out, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None])


@strategies("rms_norm")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("cast_first", [False, True])
def test_rms_norm(strategy, dtype, offset, cast_first):
    generator = fresh_generator()
    options = {"eps": 1e-5, "weight_offset": offset, "cast_first": cast_first}
    for shape in SHAPES:
        x, residual = randn(shape, generator, dtype), randn(shape, generator, dtype)
        for weight in (None, randn(shape[-1:], generator, dtype)):
            check(
                lambda x, w: ops.rms_norm(x, w, strategy=strategy, **options),
                lambda x, w: rms_norm_reference(x, w, **options),
                (x, weight),
                "rms_norm",
                rounds_inside=cast_first,
            )
            check(
                lambda x, r, w: ops.add_rms_norm(x, r, w, strategy=strategy, **options),
                lambda x, r, w: add_rms_norm_reference(x, r, w, **options),
                (x, residual, weight),
                "add_rms_norm",
                rounds_inside=True,
            )


@strategies("layer_norm")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm(strategy, dtype):
    generator = fresh_generator()
    for shape in SHAPES:
        if shape[-1] == 1:
            continue  # one element is its own mean: the gradient is 0 by cancellation alone
        x, residual = randn(shape, generator, dtype), randn(shape, generator, dtype)
        affine = (randn(shape[-1:], generator, dtype), randn(shape[-1:], generator, dtype))
        for weight, bias in ((None, None), affine, (affine[0], None)):
            check(
                lambda x, w, b: ops.layer_norm(x, w, b, 1e-5, strategy=strategy),
                lambda x, w, b: layer_norm_reference(x, w, b, 1e-5),
                (x, weight, bias),
                "layer_norm",
            )
            check(
                lambda x, r, w, b: ops.add_layer_norm(x, r, w, b, 1e-5, strategy=strategy),
                lambda x, r, w, b: add_layer_norm_reference(x, r, w, b, 1e-5),
                (x, residual, weight, bias),
                "add_layer_norm",
                rounds_inside=True,
            )


@strategies("rms_norm")
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_norms_of_strided_inputs(strategy, op):
    generator = fresh_generator()
    base = randn((6, 5, 40), generator)
    call = getattr(ops, op)
    for x in (base[:, :, 3:33], base.transpose(0, 2), base[::2], base[:1].expand(4, 5, 40), base[..., ::2]):
        torch.testing.assert_close(call(x, strategy=strategy), call(x.contiguous(), strategy=strategy))


@strategies("rms_norm")
def test_rms_norm_of_huge_and_zero_rows(strategy):
    x = torch.tensor([[0.0, 0.0, 0.0], [3e18, -3e18, 1e18], [1e-20, 2e-20, -1e-20]])
    check(
        lambda x: ops.rms_norm(x, None, 1e-6, strategy=strategy), lambda x: rms_norm_reference(x, None, 1e-6), (x,), ""
    )


@strategies("gated_activation")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_gated_activation(strategy, kind, dtype):
    generator = fresh_generator()
    for shape in SHAPES:
        fused = 3.0 * randn((*shape[:-1], 2 * shape[-1]), generator, dtype)
        gate, up = fused.split(shape[-1], dim=-1)
        if (strategy, kind) == ("ascend", "relu2"):  # torch_npu has no such operator
            with pytest.raises(ValueError, match="no gated operator of kind 'relu2'"):
                ops.gated_activation(gate, up, kind, strategy=strategy)
            continue
        check(
            lambda g, u: ops.gated_activation(g, u, kind, strategy=strategy),
            lambda g, u: gated_activation_reference(g, u, kind),
            (gate, up),
            kind,
        )


@strategies("gated_activation")
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gated_activation_saturates_without_nan(strategy, kind):
    gate = torch.tensor([-1e4, -200.0, -90.0, -1e-30, 0.0, 90.0, 200.0, 1e4])
    out = ops.gated_activation(gate, torch.ones(8), kind, strategy=strategy)
    assert torch.isfinite(out).all()
    assert torch.equal(out[-2:], gate[-2:])
    assert out[:2].abs().max() < 1e-20


@strategies("linear")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_linear(strategy, dtype, weight_dtype):
    generator = fresh_generator()
    for rows in (0, 1, 3, 8, 33):
        for inner, outer in ((7, 5), (64, 130), (576, 96)):
            x = randn((rows, inner), generator, dtype)
            weight = randn((outer, inner), generator, weight_dtype) / inner**0.5
            for bias in (None, randn((outer,), generator, weight_dtype)):
                tensors = (x, weight, bias)
                if weight_dtype != torch.float32 and dtype == torch.float32:
                    golden = linear_reference(*(None if t is None else t.double() for t in tensors))
                    assert_parity(ops.linear(*tensors, strategy=strategy), golden, reduction=inner)
                else:
                    check(lambda x, w, b: ops.linear(x, w, b, strategy=strategy), linear_reference, tensors, "linear")


@strategies("linear")
def test_linear_of_strided_inputs(strategy):
    generator = fresh_generator()
    x, weight = randn((5, 2, 64), generator)[:, 0], randn((64, 48), generator).t()
    golden = linear_reference(x.double(), weight.double())
    assert_parity(ops.linear(x, weight, strategy=strategy), golden, reduction=64)
    assert_parity(ops.linear(x[:1].expand(4, 64), weight, strategy=strategy), golden[:1].expand(4, 48), reduction=64)


@strategies("rotary")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(0, 9),
    heads=st.integers(1, 4),
    pairs=st.integers(1, 20),
    rest=st.integers(0, 6),
)
def test_rotary(strategy, dtype, layout, tokens, heads, pairs, rest):
    generator = fresh_generator()
    x = randn((tokens, heads, 2 * pairs + rest), generator, dtype)
    angles = randn((tokens, pairs), generator) * 100
    cos, sin = angles.cos(), angles.sin()
    check(
        lambda x: ops.rotary(x, cos, sin, layout=layout, strategy=strategy),
        lambda x: rotary_reference(x, cos, sin, layout == "interleaved"),
        (x,),
        "rotary",
    )


@strategies("rotary_append")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotary_append_and_cache_append(strategy, dtype, page_dtype, layout):
    """Against the float64 reference, over pages that hold NaN; slot -1 and every other slot are left alone."""
    generator = fresh_generator()
    tokens, heads, kv_heads, dim, page_size = 11, 4, 2, 24, 4
    qkv = randn((tokens, heads + 2 * kv_heads, dim), generator, dtype)
    angles = randn((tokens, 8), generator)
    slots = torch.randperm(6 * page_size, generator=generator)[:tokens]
    slots[3] = -1
    results = []
    for chosen in (strategy, "reference"):
        wide = torch.float64 if chosen == "reference" else None
        q, k, v = qkv.to(wide or dtype, copy=True).split([heads, kv_heads, kv_heads], dim=1)
        pages = [torch.full((6, kv_heads, page_size, dim), float("nan"), dtype=wide or page_dtype) for _ in range(4)]
        ops.rotary_append(
            q, k, v, angles.cos(), angles.sin(), *pages[:2], slots, interleaved=layout == "interleaved", strategy=chosen
        )
        ops.cache_append(k, v, *pages[2:], slots, strategy=chosen)
        results.append([q, *pages])
    coarser = max(dtype, page_dtype, key=lambda d: torch.finfo(d).eps)
    twice = 2.0 if dtype != page_dtype else 1.0  # rounded to the dtype of k, then to that of the pages
    for mine, truth in zip(*results, strict=True):
        assert torch.equal(mine.isnan(), truth.isnan())
        error = (mine.double() - truth).nan_to_num(0.0).abs()
        assert (error <= twice * torch.finfo(coarser).eps * truth.nan_to_num(0.0).abs() + 1e-6).all()


def test_what_is_not_floating_or_does_not_fit_is_refused():
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    for call in (
        lambda: ops.linear(x.long(), w),
        lambda: ops.gated_activation(x.long(), x.long()),
        lambda: ops.rotary(x.long().reshape(3, 1, 8), torch.ones(3, 4), torch.ones(3, 4)),
        lambda: ops.rms_norm(x.long()),
    ):
        with pytest.raises(TypeError, match="torch.int64"):
            call()
    for bias in (torch.zeros(5), torch.zeros(1)):
        with pytest.raises(ValueError, match="bias has shape"):
            ops.linear(x, w, bias)
    with pytest.raises(ValueError, match="x has shape"):
        ops.rotary(x, torch.ones(3, 4), torch.ones(3, 4))
