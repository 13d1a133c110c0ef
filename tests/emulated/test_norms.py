"""Norms against torch's own in float64, forward and gradients through torch_npu's autograd formulas."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from atb_modules.testing import fresh_generator
from atb_modules.testing.npu import OperatorError

from .helpers import DEVICE, assert_near, check_gradients, draw, in_float64, on_device

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ops = torch.ops.npu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 64), (1, 1, 1), (130, 57)])
def test_rms_norm(npu, dtype, shape):
    generator = fresh_generator()
    x, gamma = draw(generator, *shape, dtype=dtype), draw(generator, shape[-1], dtype=dtype)
    leaves, wide = on_device(x, gamma), in_float64(x, gamma)
    y, rstd = ops.npu_rms_norm(*leaves, epsilon=1e-5)
    truth = F.rms_norm(wide[0], shape[-1:], wide[1], 1e-5)
    assert_near(y, truth)
    assert_near(rstd, torch.rsqrt(wide[0].square().mean(-1, keepdim=True) + 1e-5), scale=4.0)
    check_gradients([y], [truth], leaves, wide, generator, scale=4.0)


def test_rms_norm_over_two_axes(npu):
    generator = fresh_generator()
    x, gamma = draw(generator, 3, 4, 5), draw(generator, 4, 5)
    y, rstd = ops.npu_rms_norm(*on_device(x, gamma))
    assert rstd.shape == (3, 1, 1)
    assert_near(y, F.rms_norm(x.double(), (4, 5), gamma.double(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(npu, dtype):
    generator = fresh_generator()
    x, residual, gamma = (draw(generator, *s, dtype=dtype) for s in ((2, 7, 48), (2, 7, 48), (48,)))
    y, rstd, total = ops.npu_add_rms_norm(*on_device(x, residual, gamma), epsilon=1e-5)
    assert torch.equal(total.cpu(), x + residual)
    assert_near(y, F.rms_norm((x + residual).double(), (48,), gamma.double(), 1e-5))
    assert rstd.dtype == torch.float32


def test_add_rms_norm_has_no_derivative(npu):
    x, gamma = on_device(torch.ones(2, 8), torch.ones(8))
    y, _, _ = ops.npu_add_rms_norm(x, x, gamma)
    with pytest.raises(RuntimeError, match="derivative for npu::npu_add_rms_norm is not implemented"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemma_rms_norm(npu, dtype):
    generator = fresh_generator()
    x, gamma = draw(generator, 4, 32, dtype=dtype), draw(generator, 32, dtype=dtype)
    y, _ = ops.npu_gemma_rms_norm(x.to(DEVICE), gamma.to(DEVICE), 1e-5)
    assert_near(y, F.rms_norm(x.double(), (32,), 1.0 + gamma.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("additional_output", [False, True])
def test_add_layer_norm(npu, dtype, additional_output):
    generator = fresh_generator()
    x, residual = (draw(generator, 3, 5, 40, dtype=dtype) for _ in range(2))
    gamma, beta = (draw(generator, 40, dtype=dtype) for _ in range(2))
    leaves = on_device(x, residual, gamma, beta)
    wide = in_float64(x, residual, gamma, beta)
    y, mean, rstd, total = ops.npu_add_layer_norm(*leaves, 1e-5, additional_output)
    rounded = (x + residual).double()
    assert_near(y, F.layer_norm(rounded, (40,), wide[2], wide[3], 1e-5))
    assert_near(mean, rounded.mean(-1, keepdim=True), scale=4.0)
    assert_near(rstd, torch.rsqrt(rounded.var(-1, unbiased=False, keepdim=True) + 1e-5), scale=4.0)
    truth = F.layer_norm(wide[0] + wide[1], (40,), wide[2], wide[3], 1e-5)
    if additional_output:
        assert torch.equal(total.cpu(), x + residual)
        check_gradients([y, total], [truth, wide[0] + wide[1]], leaves, wide, generator, scale=4.0)
    else:
        assert total.isnan().all(), "nothing writes the sum"
        check_gradients([y], [truth], leaves, wide, generator, scale=4.0)


@pytest.mark.parametrize(
    "call, rule",
    [
        (lambda x, g: ops.npu_rms_norm(x, g.half()), "dtypes must be the same"),
        (lambda x, g: ops.npu_rms_norm(x[0], g), "shapes of 2 to 8 dims"),
        (lambda x, g: ops.npu_rms_norm(x, g[:4]), "gamma has shape"),
        (lambda x, g: ops.npu_rms_norm(x.double(), g.double()), "supported: float16, bfloat16, float32"),
        (lambda x, g: ops.npu_add_rms_norm(x, x[:1], g), "they must agree"),
        (lambda x, g: ops.npu_gemma_rms_norm(x.t(), torch.ones(3, device=DEVICE)), "not contiguous"),
    ],
)
def test_forbidden_calls(npu, call, rule):
    with pytest.raises(OperatorError, match=rule):
        call(torch.ones(3, 8, device=DEVICE), torch.ones(8, device=DEVICE))
