"""Gated and plain activations against torch in float64, gradients through torch_npu's autograd formulas."""

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
@pytest.mark.parametrize("shape, dim", [((2, 5, 24), -1), ((4, 6), 0), ((3, 8, 2), 1)])
def test_swiglu(npu, dtype, shape, dim):
    generator = fresh_generator()
    x = draw(generator, *shape, dtype=dtype)
    leaf, wide = on_device(x), in_float64(x)
    y = ops.npu_swiglu(leaf, dim)
    gate, up = wide.chunk(2, dim)
    truth = F.silu(gate) * up
    assert_near(y, truth)
    check_gradients([y], [truth], [leaf], [wide], generator, scale=2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", [0, 1])
@pytest.mark.parametrize("activate_left", [False, True])
def test_geglu(npu, dtype, approximate, activate_left):
    generator = fresh_generator()
    x = draw(generator, 3, 20, dtype=dtype)
    leaf, wide = on_device(x), in_float64(x)
    y, gelu = ops.npu_geglu(leaf, -1, approximate, activate_left)
    left, right = wide.chunk(2, -1)
    active, plain = (left, right) if activate_left else (right, left)
    activated = F.gelu(active, approximate="tanh" if approximate else "none")
    assert_near(gelu, activated)
    assert_near(y, activated * plain)
    check_gradients([y], [activated * plain], [leaf], [wide], generator, scale=3.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fast_gelu(npu, dtype):
    generator = fresh_generator()
    x = draw(generator, 5, 11, dtype=dtype)
    leaf, wide = on_device(x), in_float64(x)
    y, truth = ops.npu_fast_gelu(leaf), wide * torch.sigmoid(1.702 * wide)
    assert_near(y, truth)
    check_gradients([y], [truth], [leaf], [wide], generator, scale=2.0)


@pytest.mark.parametrize(
    "call, rule",
    [
        (lambda x: ops.npu_swiglu(x[:, :7]), "it is cut into two halves"),
        (lambda x: ops.npu_geglu(x, -1, 2), "approximate is 2"),
        (lambda x: ops.npu_fast_gelu(x.double()), "supported: float16"),
    ],
)
def test_forbidden_calls(npu, call, rule):
    with pytest.raises(OperatorError, match=rule):
        call(torch.ones(3, 8, device=DEVICE))
