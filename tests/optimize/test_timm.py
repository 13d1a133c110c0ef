"""timm's models with our kernels inside: same outputs, same gradients, same parameters, and back again."""

from __future__ import annotations

import copy
import logging

import pytest
import timm
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import atb_modules as atb
from atb_modules.integrations import timm as ours

#: name -> options that make it small
MODELS = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 3},
    "vit_small_patch14_reg4_dinov2": {"img_size": 56, "depth": 2},
    "deit_tiny_distilled_patch16_224": {"img_size": 64, "depth": 2},
    "deit3_small_patch16_224": {"img_size": 64, "depth": 2},
    "eva_giant_patch14_224": {"img_size": 56, "depth": 2, "embed_dim": 176, "num_heads": 2},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2},
    "eva02_base_patch14_448": {"img_size": 56, "depth": 2, "embed_dim": 192, "num_heads": 3},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 192, "num_heads": 3},
    "beitv2_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 192, "num_heads": 3},
    "vit_small_patch16_dinov3": {"img_size": 64, "depth": 2, "embed_dim": 192, "num_heads": 3},
    "vit_small_plus_patch16_dinov3_qkvb": {"img_size": 64, "depth": 2, "embed_dim": 192, "num_heads": 3},
    "vit_base_patch16_siglip_224": {"img_size": 64, "depth": 2, "embed_dim": 192, "num_heads": 3},
    "vit_base_patch16_siglip_gap_224": {"img_size": 64, "depth": 2, "embed_dim": 192, "num_heads": 3},
}


def small(name: str, **options) -> nn.Module:
    """A model in which nothing is zero or one by initialisation, so that nothing can be forgotten."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=11, **(MODELS[name] | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def picture(model: nn.Module, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, *model.patch_embed.img_size)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name, training):
    model = small(name).train(training)
    fast = atb.apply_optimizations(copy.deepcopy(model))
    kinds = {type(module).__module__ for module in fast.modules()}
    assert ours.__name__ in kinds
    x = picture(model)
    results = []
    for one in (model, fast):
        inputs = x.clone().requires_grad_()
        out = one(inputs)
        names = ["input", *(name for name, _ in one.named_parameters())]
        grads = torch.autograd.grad(out.square().sum(), [inputs, *one.parameters()], allow_unused=True)
        results.append((out, dict(zip(names, grads, strict=True))))
    (want, want_grads), (got, got_grads) = results
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert want_grads.keys() == got_grads.keys()
    for key, grad in want_grads.items():
        if grad is None:
            assert got_grads[key] is None
        else:
            scale = max(float(grad.abs().max()), 1.0)
            torch.testing.assert_close(got_grads[key] / scale, grad / scale, atol=1e-4, rtol=1e-4, msg=key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "beit_base_patch16_224"])
def test_other_dtypes(name, dtype):
    model = small(name).to(dtype)
    x = picture(model).to(dtype)
    with torch.no_grad():
        want = small(name).double()(x.double())
        plain = (model(x).double() - want).abs().max()
        error = (atb.apply_optimizations(model)(x).double() - want).abs().max()
    assert error <= 2 * plain + (1e-9 if dtype == torch.float64 else 1e-2)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_plus_patch16_dinov3_qkvb"])
def test_apply_twice_and_restore(name):
    model = small(name)
    other = small(name)
    x = picture(model)
    before, parameters, keys = model(x), list(model.parameters()), list(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    assert atb.apply_optimizations(model) is model
    once = [type(module) for module in model.modules()]
    atb.apply_optimizations(model)
    assert [type(module) for module in model.modules()] == once != kinds
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert [type(module) for module in other.modules()] == kinds
    twin = copy.deepcopy(model)
    atb.restore(model)
    assert [type(module) for module in model.modules()] == kinds
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(model(x), before)
    torch.testing.assert_close(twin(x), before, atol=1e-4, rtol=1e-4)
    assert torch.equal(atb.restore(twin)(x), before)


def test_hooks_fire_and_keep_their_effect():
    model = small("vit_tiny_patch16_224")
    seen = []
    for name in ("attn", "attn.qkv", "attn.proj", "norm1", "mlp", "mlp.fc1", "mlp.act"):
        model.blocks[0].get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    model.blocks[1].attn.qkv.register_forward_hook(lambda module, inputs, out: 2 * out)
    x = picture(model)
    want = model(x)
    fired = sorted(seen)
    seen.clear()
    torch.testing.assert_close(atb.apply_optimizations(model)(x), want, atol=1e-4, rtol=1e-4)
    assert sorted(seen) == fired


def test_hooks_of_all_modules_fire():
    seen = []
    model, x = small("vit_tiny_patch16_224"), torch.randn(1, 3, 64, 64)
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        model(x)
        fired = list(seen)
        seen.clear()
        atb.apply_optimizations(model)(x)
    finally:
        handle.remove()
    assert seen == fired


def test_a_patched_forward_of_a_class_is_kept(monkeypatch):
    kind = timm.layers.Attention
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *inputs, **options: 2 * plain(self, *inputs, **options))
    model = small("vit_tiny_patch16_224")
    x = picture(model)
    want = model(x)
    fast = atb.apply_optimizations(model)
    assert type(fast.blocks[0].attn) is kind and type(fast.blocks[0].mlp) is ours.FusedMlp
    torch.testing.assert_close(fast(x), want, atol=1e-4, rtol=1e-4)


def test_attention_weights_of_a_model_that_is_not_fused():
    """``fused_attn`` off is how timm's users reach the weights: their hooks keep firing."""
    model = small("vit_tiny_patch16_224")
    weights = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, inputs, out: weights.append(out))
    x = picture(model)
    want = model(x)
    torch.testing.assert_close(atb.apply_optimizations(model)(x), want, atol=1e-4, rtol=1e-4)
    assert len(weights) == 2 * len(model.blocks)


def test_masks_and_causality():
    attention = timm.layers.Attention(64, 4, qk_norm=True, norm_layer=timm.layers.RmsNorm, gated=True)
    fast = atb.apply_optimizations(copy.deepcopy(attention))
    x = torch.randn(2, 9, 64)
    keep = torch.rand(2, 1, 9, 9) > 0.4
    keep[..., 0] = True
    for options in ({}, {"attn_mask": keep}, {"attn_mask": torch.randn(4, 9, 9)}, {"is_causal": True}):
        torch.testing.assert_close(fast(x, **options), attention(x, **options), atol=1e-5, rtol=1e-5)


def test_dropout_runs_in_training_alone():
    model = atb.apply_optimizations(small("vit_tiny_patch16_224", attn_drop_rate=0.3, proj_drop_rate=0.2))
    x = picture(model)
    assert torch.equal(model(x), model(x))
    model.train()
    torch.manual_seed(1)
    first = model(x)
    torch.manual_seed(1)
    again = model(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, model(x))


def test_what_is_not_known_is_logged_or_refused(caplog):
    with caplog.at_level(logging.INFO, logger="atb_modules.optimize"):
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, attn_layer="diff").eval()
        want = model(torch.ones(1, 3, 32, 32))
        torch.testing.assert_close(atb.apply_optimizations(model)(torch.ones(1, 3, 32, 32)), want)
    assert "left as they are: 1 DiffAttention" in caplog.text
    with pytest.raises(ValueError, match="model is Sequential, in which nothing is known; known are .*EvaAttention"):
        atb.apply_optimizations(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(TypeError, match="model is str; allowed: a torch.nn.Module"):
        atb.apply_optimizations("vit")
    with pytest.raises(TypeError, match="model is None"):
        atb.restore(None)


def test_saved_and_compiled(tmp_path):
    model = atb.apply_optimizations(small("vit_tiny_patch16_224"))
    x = picture(model)
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(x), model(x))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
