"""Adaptive layer norms against the formulas of the papers, written out, and bad options by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from atb_modules import AdaLayerNorm, AdaLayerNormZero


def randomised(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def modulate(x, shift, scale):
    """As DiT has it."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def test_ada_layer_norm_is_dits_final_layer():
    module = randomised(AdaLayerNorm(24, 10))
    x, cond = torch.randn(2, 5, 24, requires_grad=True), torch.randn(2, 10, requires_grad=True)
    shift, scale = module.modulation(F.silu(cond)).chunk(2, dim=1)
    expected = modulate(F.layer_norm(x, (24,), eps=1e-6), shift, scale)
    out = module(x, cond)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    leaves = (x, cond, *module.parameters())
    weight = torch.randn_like(out)
    for mine, truth in zip(
        torch.autograd.grad((out * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, truth, atol=1e-4, rtol=1e-4)
    swapped = AdaLayerNorm(24, 10, scale_first=True)
    swapped.load_state_dict(
        {f"modulation.{n}": torch.cat(p.chunk(2)[::-1]) for n, p in module.modulation.named_parameters()}
    )
    torch.testing.assert_close(swapped(x, cond), out)


@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
def test_ada_layer_norm_zero_in_a_block(norm_type):
    module = AdaLayerNormZero(24, norm_type=norm_type)
    x, cond = torch.randn(2, 5, 24), torch.randn(2, 24)
    norm = (lambda x: F.layer_norm(x, (24,), eps=1e-6)) if norm_type == "layernorm" else (
        lambda x: F.rms_norm(x, (24,), eps=1e-6)
    )  # fmt: skip
    start = module(x, cond)
    torch.testing.assert_close(start.hidden_states, norm(x), atol=1e-5, rtol=1e-5)
    assert not start.attention_gate.any() and not start.mlp_gate.any()
    randomised(module)
    result = module(x, cond)
    parts = module.modulation(F.silu(cond)).chunk(6, dim=1)
    torch.testing.assert_close(result.hidden_states, modulate(norm(x), *parts[:2]), atol=1e-5, rtol=1e-5)
    assert torch.equal(result.attention_gate.squeeze(1), parts[2]) and torch.equal(result.mlp_gate.squeeze(1), parts[5])
    after = x + result.attention_gate * result.hidden_states
    torch.testing.assert_close(module.norm_mlp(after, result), modulate(norm(after), *parts[3:5]), atol=1e-5, rtol=1e-5)


def test_one_conditioning_a_token_is_each_token_by_itself():
    module = randomised(AdaLayerNormZero(24, 10, elementwise_affine=True))
    x, cond = torch.randn(2, 5, 24), torch.randn(2, 5, 10)
    together = module(x, cond)
    for token in range(5):
        alone = module(x[:, token : token + 1], cond[:, token])
        for one, part in zip(alone, together, strict=True):
            torch.testing.assert_close(one[:, 0], part[:, token])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype):
    module = randomised(AdaLayerNorm(24, 10, dtype=dtype))
    out = module(torch.randn(2, 5, 24, dtype=dtype), torch.randn(2, 10, dtype=dtype))
    assert out.dtype == dtype and out.isfinite().all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: AdaLayerNorm(0), ValueError, "hidden_size is 0"),
        (lambda: AdaLayerNorm(8, 4.0), TypeError, "cond_size is 4.0"),
        (lambda: AdaLayerNorm(8, eps=-1.0), ValueError, "eps is -1.0"),
        (lambda: AdaLayerNorm(8, norm_type="batchnorm"), ValueError, "norm_type is 'batchnorm'"),
        (lambda: AdaLayerNorm(8, scale_first=1), TypeError, "scale_first is 1"),
        (lambda: AdaLayerNorm(8, dropout=0.1), TypeError, "dropout"),
        (lambda: AdaLayerNormZero(8, elementwise_affine=1), TypeError, "elementwise_affine is 1"),
        (lambda: AdaLayerNormZero(8, strategy="fast"), ValueError, "strategy is 'fast'"),
        (lambda: AdaLayerNorm(8)(torch.randn(2, 3, 4), torch.randn(2, 8)), ValueError, "x has shape .*hidden_size=8"),
        (lambda: AdaLayerNorm(8)(torch.randn(2, 3, 8), torch.randn(3, 8)), ValueError, r"cond has shape \(3, 8\)"),
        (lambda: AdaLayerNorm(8)(torch.randn(2, 3, 8), None), TypeError, "cond is NoneType"),
        (lambda: AdaLayerNorm(8)(torch.randn(2, 3, 8), torch.ones(2, 8).long()), TypeError, "cond is torch.int64"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
