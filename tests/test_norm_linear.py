"""A norm and its product as one op: every kernel against the float64 reference, gradients, refusals."""

from __future__ import annotations

import pytest
import torch

from atb_modules.kernels.reference.linear import linear_reference
from atb_modules.kernels.reference.norm import rms_norm_reference
from atb_modules.kernels.reference.norm_linear import norm_linear_reference
from atb_modules.norm_linear import norm_linear
from atb_modules.testing import assert_parity, fresh_generator
from atb_modules.testing.devices import strategies_under_test

#: rows, in_features, out_features, weight offset, whether there is a norm weight
CASES = [(0, 8, 4, 0.0, True), (1, 64, 130, 1.0, True), (33, 576, 96, 0.0, False)]
STRATEGIES = strategies_under_test("norm_linear")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_parity(strategy, dtype):
    generator = fresh_generator()
    for rows, inner, outer, offset, weighted in (
        (0, 8, 4, 0.0, True),
        (1, 64, 130, 1.0, True),
        (33, 576, 96, 0.0, False),
    ):
        x, weight = torch.randn(rows, inner, generator=generator), torch.randn(outer, inner, generator=generator)
        tensors = [t.to(dtype) for t in (x, weight / inner**0.5)]
        norm_weight = torch.rand(inner, generator=generator).to(dtype) if weighted else None
        bias = torch.randn(outer, generator=generator).to(dtype)
        out = norm_linear(tensors[0], norm_weight, tensors[1], bias, 1e-5, weight_offset=offset, strategy=strategy)
        # the op rounds in between, as two calls would
        normed = rms_norm_reference(tensors[0], norm_weight, 1e-5, offset)
        golden = linear_reference(normed.double(), tensors[1].double(), bias.double())
        assert out.dtype == dtype
        assert_parity(out, golden, reduction=2048)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_gradients(strategy):
    generator = fresh_generator()
    shapes = ((2, 5, 24), (24,), (7, 24), (7,))
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    d = torch.randn(2, 5, 7, generator=generator)
    got = torch.autograd.grad(norm_linear(*leaves, strategy=strategy), leaves, d)
    want = torch.autograd.grad(norm_linear_reference(*wide, 1e-6), wide, d.double())
    for one, truth in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), truth, atol=1e-4, rtol=1e-4)


def test_refusals():
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    for arguments, message in (
        ((x, None, w.t()), r"x has shape \(3, 8\) and weight \(8, 4\)"),
        ((x, torch.ones(4), w), r"norm_weight has shape \(4,\); allowed: \(8,\)"),
        ((x, None, w, torch.ones(8)), r"bias has shape \(8,\); allowed: \(4,\)"),
        ((x, None, w, None, -1.0), "eps is -1.0"),
        ((x, None, w.to("meta")), "weight is on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            norm_linear(*arguments)
    with pytest.raises(TypeError, match="x is"):
        norm_linear(x.long(), None, w)
