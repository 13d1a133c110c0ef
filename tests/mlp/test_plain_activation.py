"""Plain activations: the formulas, in x's own memory where that is allowed, and only there."""

from __future__ import annotations

import pytest
import torch

from atb_modules import FeedForward
from atb_modules.kernels.reference.mlp import FORMULAS
from atb_modules.mlp import MLPConfig, activation
from atb_modules.testing import fresh_generator


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (7, 40000)])
def test_the_formula_with_and_without_its_own_memory(kind, shape):
    x = 3 * torch.randn(shape, generator=fresh_generator())
    exact = FORMULAS[kind](x.double()).float()
    torch.testing.assert_close(activation(x, kind), exact, rtol=2e-6, atol=2e-6)
    for layout in (x.clone(), x.clone().t().contiguous().t()):
        with torch.no_grad():
            out = activation(layout, kind, overwrite=True)
        torch.testing.assert_close(out, exact, rtol=2e-6, atol=2e-6)
        assert out.data_ptr() == layout.data_ptr()


@pytest.mark.parametrize("kind", FORMULAS)
def test_nothing_is_overwritten_where_gradients_are_recorded(kind):
    x = torch.randn(4, 6, generator=fresh_generator(), dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    out = activation(x, kind, overwrite=True)
    assert torch.equal(x, before)
    (ours,) = torch.autograd.grad(out.sum(), x)
    (exact,) = torch.autograd.grad(FORMULAS[kind](x).sum(), x)
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "quick_gelu", "silu", "relu2"])
def test_a_feed_forward_gives_the_same_with_and_without_gradients(kind):
    mlp = FeedForward(6, 10, kind, config=MLPConfig(bias=True))
    x = torch.randn(2, 3, 6, generator=fresh_generator())
    kept = x.clone()
    seen = []
    with torch.no_grad():
        plain = mlp(x)
        handle = mlp.up_proj.register_forward_hook(lambda _, __, out: seen.append((out, out.clone())))
        mlp(x)
        handle.remove()
    torch.testing.assert_close(plain, mlp(x).detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(x, kept) and torch.equal(*seen[0])  # what a hook has kept is left alone
