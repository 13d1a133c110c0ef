"""Our own modules on the emulated NPU, with whatever kernels serve them there, against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

import atb_modules as atb
from atb_modules.models.config import ModelConfig
from atb_modules.models.decoder import DecoderModel
from atb_modules.testing import fresh_generator

from .helpers import DEVICE, draw


def assert_equal_gradients(there, here):
    for (name, one), (_, truth) in zip(there.named_parameters(), here.named_parameters(), strict=True):
        assert one.grad is not None, name
        torch.testing.assert_close(
            one.grad.cpu(), truth.grad, atol=1e-4, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("qk_norm", [None, "before_rotary"])
def test_a_layer_trains(npu, qk_norm):
    generator = fresh_generator()
    here = atb.TransformerLayer(
        64, num_heads=4, head_dim=16, intermediate_size=96, num_kv_heads=2, rotary=atb.RotaryConfig(), qk_norm=qk_norm
    )
    there = copy.deepcopy(here).to(DEVICE)
    x = draw(generator, 2, 9, 64)
    sides = []
    for layer, leaf in ((here, x.clone().requires_grad_()), (there, x.to(DEVICE).requires_grad_())):
        y = layer(leaf)
        y.square().mean().backward()
        sides.append((y, leaf.grad))
    for truth, one in zip(*sides, strict=True):
        torch.testing.assert_close(one.detach().cpu(), truth.detach(), atol=1e-5, rtol=1e-4)
    assert_equal_gradients(there, here)


def test_a_layer_with_a_paged_cache(npu):
    generator = fresh_generator()
    here = atb.TransformerLayer(64, 4, head_dim=16, num_kv_heads=2, rotary=atb.RotaryConfig(), mode="inference")
    there = copy.deepcopy(here).to(DEVICE)
    prompt, token = draw(generator, 2, 7, 64), draw(generator, 2, 1, 64)
    want, cache = here(prompt, use_cache=True)
    got, device_cache = there(prompt.to(DEVICE), use_cache=True)
    torch.testing.assert_close(got.cpu(), want, atol=1e-5, rtol=1e-4)
    want, got = here(token, use_cache=True)[0], there(token.to(DEVICE), use_cache=True)[0]
    torch.testing.assert_close(got.cpu(), want, atol=1e-5, rtol=1e-4)


def test_vision_and_text(npu):
    generator = fresh_generator()
    here = atb.MultiModalAttention(16, 24, num_heads=4, head_dim=16)
    there = copy.deepcopy(here).to(DEVICE)
    vision, text = draw(generator, 2, 16, 64), draw(generator, 2, 24, 64)
    for one, truth in zip(there(vision.to(DEVICE), text.to(DEVICE)), here(vision, text), strict=True):
        torch.testing.assert_close(one.detach().cpu(), truth.detach(), atol=1e-5, rtol=1e-4)


CONFIG = ModelConfig("llama", 97, 64, 2, 4, 2, 16, 96, (None, 8), (atb.RotaryConfig(),) * 2, 256)


def test_a_model_trains(npu):
    here = DecoderModel(CONFIG)
    there = copy.deepcopy(here).to(DEVICE)
    ids = torch.randint(0, 97, (2, 12), generator=fresh_generator())
    want, got = here(ids).logits, there(ids.to(DEVICE)).logits
    torch.testing.assert_close(got.detach().cpu(), want.detach(), atol=1e-5, rtol=1e-4)
    want.square().mean().backward()
    got.square().mean().backward()
    assert_equal_gradients(there, here)


def test_a_model_generates(npu):
    here = DecoderModel(CONFIG, mode="inference")
    there = copy.deepcopy(here).to(DEVICE)
    prompt = torch.randint(0, 97, (5,), generator=fresh_generator()).tolist()
    assert there.generate(prompt, max_new_tokens=9) == here.generate(prompt, max_new_tokens=9)
