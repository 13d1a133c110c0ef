"""The adaptive layer norms of Qwen2.5-Omni's diffusion transformer in transformers, with their weights."""

from __future__ import annotations

import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5_OmniAdaLayerNormZero,
    Qwen2_5_OmniAdaLayerNormZero_Final,
)

from atb_modules import AdaLayerNorm, AdaLayerNormZero


def pair(theirs, ours):
    state = {name.replace("linear", "modulation"): value for name, value in theirs.state_dict().items()}
    ours.load_state_dict(state)
    return theirs, ours


def test_zero():
    theirs, ours = pair(Qwen2_5_OmniAdaLayerNormZero(48), AdaLayerNormZero(48))
    x, cond = torch.randn(3, 7, 48, requires_grad=True), torch.randn(3, 48)
    expected, gate, *rest = theirs(x, cond)
    out = ours(x, cond)
    torch.testing.assert_close(out.hidden_states, expected, atol=1e-5, rtol=1e-5)
    for mine, truth in zip(out[1:], (gate, *rest), strict=True):
        torch.testing.assert_close(mine.squeeze(1), truth, atol=1e-6, rtol=1e-5)
    weight = torch.randn_like(expected)
    (got,) = torch.autograd.grad((out.hidden_states * weight).sum(), x)
    (want,) = torch.autograd.grad((expected * weight).sum(), x)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_final():
    theirs, ours = pair(Qwen2_5_OmniAdaLayerNormZero_Final(48), AdaLayerNorm(48, scale_first=True))
    x, cond = torch.randn(3, 7, 48), torch.randn(3, 48)
    torch.testing.assert_close(ours(x, cond), theirs(x, cond), atol=1e-5, rtol=1e-5)
