"""Products with int8 weights: codes, every kernel against the float64 reference, gradients, refusals."""

from __future__ import annotations

import pytest
import torch

from atb_modules.kernels.reference.quantized_linear import quantized_linear_reference, weight_only_linear_reference
from atb_modules.quantized_linear import quantize_weight, quantized_linear, weight_only_linear
from atb_modules.testing import assert_parity, fresh_generator
from atb_modules.testing.devices import strategies_under_test

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
#: shape of x, out_features, channels of a group, whether there is a bias
CASES = [
    ((0, 64), 4, None, True),
    ((1, 72), 130, None, True),
    ((2, 3, 192), 40, 64, False),
    ((33, 1408), 96, 128, True),
]
WEIGHT_ONLY, QUANTIZED = strategies_under_test("weight_only_linear"), strategies_under_test("quantized_linear")


def drawn(shape, out_features, group, bias, dtype):
    generator = fresh_generator()
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.randn(out_features, shape[-1], generator=generator) / shape[-1] ** 0.5
    shift = torch.randn(out_features, generator=generator).to(dtype) if bias else None
    return x, *quantize_weight(weight, group), shift


def kernel_dtypes(strategy):
    """The operators of NPUs take half precision alone."""
    return HALVES if strategy.value == "ascend" else DTYPES


def skip_free(strategies):
    return [pytest.param(s, d, id=f"{s}-{d}") for s in strategies for d in kernel_dtypes(s)]


def matches(out, golden, x, reduction):
    assert out.dtype == x.dtype and out.shape == golden.shape
    assert_parity(out, golden, reduction=reduction)


@pytest.mark.parametrize("strategy,dtype", skip_free(WEIGHT_ONLY))
def test_weight_only_parity(strategy, dtype):
    for shape, out_features, group, bias in CASES:
        x, codes, scales, shift = drawn(shape, out_features, group, bias, dtype)
        out = weight_only_linear(x, codes, scales, shift, strategy=strategy)
        wide = None if shift is None else shift.double()
        matches(out, weight_only_linear_reference(x.double(), codes, scales, wide), x, 2048)


@pytest.mark.parametrize("strategy,dtype", skip_free(QUANTIZED))
def test_quantized_parity(strategy, dtype):
    for shape, out_features, _, bias in [*CASES, ((2, 4000), 3, None, True)]:
        x, codes, scales, shift = drawn(shape, out_features, None, bias, dtype)
        out = quantized_linear(x, codes, scales, shift, strategy=strategy)
        wide = None if shift is None else shift.double()
        matches(out, quantized_linear_reference(x.double(), codes, scales, wide), x, 2048)


@pytest.mark.parametrize("strategy,dtype", skip_free(QUANTIZED))
def test_rows_of_zeros_and_the_largest_codes(strategy, dtype):
    """The longest sums that float32 does not hold: each product is 127 * 128."""
    x = torch.ones(3, 2500, dtype=dtype)
    x[1] = 0.0
    codes = torch.full((2, 2500), -128, dtype=torch.int8)
    codes[:, -1] = 1
    scales = torch.tensor([2.0**-18, 2.0**-19])
    out = quantized_linear(x, codes, scales, strategy=strategy)
    total = (127 - 2499 * 127 * 128) / 127.0
    golden = torch.tensor([[total], [0.0], [total]], dtype=torch.float64) * scales.double()
    assert_parity(out, golden)


@pytest.mark.parametrize("strategy,dtype", skip_free(WEIGHT_ONLY))
@pytest.mark.parametrize("group", [None, 32])
def test_gradients(strategy, dtype, group):
    x, codes, scales, bias = drawn((2, 5, 96), 7, group, True, dtype)
    leaves = [x.requires_grad_(), bias.requires_grad_()]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    d = torch.randn(2, 5, 7, generator=fresh_generator()).to(dtype)
    got = torch.autograd.grad(weight_only_linear(x, codes, scales, bias, strategy=strategy), leaves, d)
    truth = weight_only_linear_reference(wide[0], codes, scales, wide[1])
    want = torch.autograd.grad(truth, wide, d.double())
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        bound = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(one.double(), other, atol=bound, rtol=bound)


@pytest.mark.parametrize("strategy", QUANTIZED, ids=str)
def test_any_strides(strategy):
    """A transposed x, and codes that are columns of a wider tensor."""
    x, codes, scales, bias = drawn((6, 64), 9, None, True, torch.float16)
    strided = x.t().contiguous().t()
    wide = torch.stack([codes, codes.flip(0)], -1)[..., 0]
    assert not strided.is_contiguous() and not wide.is_contiguous()
    for op in (weight_only_linear, quantized_linear):
        expected = op(x, codes, scales, bias, strategy=strategy)
        torch.testing.assert_close(op(strided, wide, scales, bias, strategy=strategy), expected)


@pytest.mark.parametrize("group", [None, 8, 24, 120])
def test_codes_are_half_a_step_from_the_weight(group):
    weight = torch.randn(5, 120, generator=fresh_generator())
    weight[2] = 0.0
    codes, scales = quantize_weight(weight, group)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32
    assert scales.shape == ((5,) if group is None else (5, 120 // group))
    step = scales.view(5, -1, 1).expand(-1, -1, group or 120).flatten(1)
    assert ((codes * step - weight).abs() <= 0.5001 * step).all()
    largest = codes.view(5, -1, group or 120).abs().amax(-1)
    assert not largest[2].any() and (largest[[0, 1, 3, 4]] >= 126).all() and codes.min() >= -127
    for dtype in HALVES:
        assert torch.equal(scales.to(dtype).float(), scales)


def test_the_quantised_product_is_near_the_product():
    generator = fresh_generator()
    x, weight = torch.randn(64, 512, generator=generator), torch.randn(32, 512, generator=generator) / 512**0.5
    truth = x @ weight.t()
    for out in (weight_only_linear(x, *quantize_weight(weight, 64)), quantized_linear(x, *quantize_weight(weight))):
        assert 0 < (out - truth).norm() / truth.norm() < 0.02


def test_autocast_rounds_x_and_no_sum():
    x, codes, scales, bias = drawn((4, 2048), 6, None, True, torch.float32)
    for op in (weight_only_linear, quantized_linear):
        with torch.autocast("cpu", torch.bfloat16):
            out = op(x, codes, scales, bias)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, op(x.bfloat16(), codes, scales, bias), atol=0, rtol=0)


def test_it_compiles_into_one_graph():
    x, codes, scales, bias = drawn((4, 96), 6, 32, True, torch.float32)
    for op, given in ((weight_only_linear, scales), (quantized_linear, scales[:, 0].contiguous())):
        compiled = torch.compile(op, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, codes, given, bias), op(x, codes, given, bias, strategy="torch"))


def test_forward_mode_and_vmap():
    x, codes, scales, bias = drawn((4, 96), 6, 32, True, torch.float32)
    call = lambda t: weight_only_linear(t, codes, scales, bias)  # noqa: E731
    tangent = torch.randn(4, 96, generator=fresh_generator())
    _, derivative = torch.func.jvp(call, (x,), (tangent,))
    torch.testing.assert_close(derivative, weight_only_linear(tangent, codes, scales))
    torch.testing.assert_close(torch.func.vmap(call)(x), call(x))


def test_refusals():
    x, codes, scales = torch.randn(3, 8), torch.ones(4, 8, dtype=torch.int8), torch.ones(4)
    grad = torch.randn(3, 8, requires_grad=True)
    for op in (weight_only_linear, quantized_linear):
        for arguments, error, message in (
            ((x.long(), codes, scales), TypeError, "x is torch.int64"),
            ((x, codes.long(), scales), TypeError, "codes is torch.int64; allowed: torch.int8"),
            ((x, codes, scales.half()), TypeError, "scales is torch.float16; allowed: torch.float32"),
            ((x, [1], scales), TypeError, "codes is list"),
            ((x, codes.t(), scales), ValueError, r"x has shape \(3, 8\) and codes \(8, 4\)"),
            ((x, codes, scales[:3]), ValueError, r"scales has shape \(3,\); allowed: \(4,\)"),
            ((x, codes, torch.ones(4, 3)), ValueError, r"scales has shape \(4, 3\); allowed: \(4,\)"),
            ((x, codes, scales, torch.ones(8)), ValueError, r"bias has shape \(8,\); allowed: \(4,\)"),
            ((x, codes.to("meta"), scales), ValueError, "codes is on meta"),
            ((x, codes, scales.clone().requires_grad_()), ValueError, "scales requires a gradient"),
            ((x, codes[:0], scales[:0]), ValueError, "at least 1 of both"),
        ):
            with pytest.raises(error, match=message):
                op(*arguments)
        with pytest.raises(ValueError, match="strategy is 'cpu', which has no kernel"):
            op(x, codes, scales, strategy="cpu")
    with pytest.raises(ValueError, match="x requires a gradient, which quantized_linear has not"):
        quantized_linear(grad, codes, scales)
    with torch.no_grad():
        quantized_linear(grad, codes, scales)
    with pytest.raises(ValueError, match="codes has 131073 input channels; allowed: up to 131072"):
        quantized_linear(torch.ones(1, 131073), torch.ones(1, 131073, dtype=torch.int8), torch.ones(1))
    with pytest.raises(ValueError, match="group is 3; allowed: a divisor of weight's 8"):
        quantize_weight(x, 3)
    with pytest.raises(ValueError, match="group is 0"):
        quantize_weight(x, 0)
    with pytest.raises(ValueError, match=r"weight has shape \(8,\)"):
        quantize_weight(x[0])
