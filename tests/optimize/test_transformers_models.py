"""Llama-like models of transformers with our kernels inside: hooks, adapters, shared configs, and back again."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers

import atb_modules as atb

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 5}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 16}),
}
IDS = torch.arange(24).reshape(2, 12) % 50


def config_of(family: str):
    kind, _, more = FAMILIES[family]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return kind(vocab_size=50, attn_implementation="sdpa", **sizes, **heads, **more)


def small(family: str, config=None):
    torch.manual_seed(0)
    model = FAMILIES[family][1](config_of(family) if config is None else config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_gradients_and_restore(family):
    model = small(family)
    kinds = [type(module) for module in model.modules()]
    parameters, before = list(model.parameters()), model(IDS).logits
    grads = torch.autograd.grad(before.square().sum(), parameters)
    assert atb.apply_optimizations(atb.apply_optimizations(model)) is model
    assert model.config._attn_implementation == "atb"
    assert sum(a is not b for a, b in zip(kinds, map(type, model.modules()), strict=True)) >= 7
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    logits = model(IDS).logits
    torch.testing.assert_close(logits, before, atol=1e-5, rtol=1e-5)
    for got, want in zip(torch.autograd.grad(logits.square().sum(), parameters), grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    atb.restore(model)
    assert [type(module) for module in model.modules()] == kinds
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(model(IDS).logits, before)


def test_a_second_model_with_the_same_config_is_untouched():
    config = config_of("llama")
    model, other = small("llama", config), small("llama", config)
    kinds, before = [type(module) for module in other.modules()], other(IDS).logits
    atb.apply_optimizations(model)
    assert [type(module) for module in other.modules()] == kinds
    assert other.config._attn_implementation == "sdpa"
    assert torch.equal(other(IDS).logits, before)


def test_a_copy_is_optimised_too_and_restored_by_itself():
    model = small("qwen3")
    before = model(IDS).logits
    twin = copy.deepcopy(atb.apply_optimizations(model))
    assert torch.equal(atb.restore(twin)(IDS).logits, before)
    assert model.config._attn_implementation == "atb"


def test_hooks_fire():
    model = small("llama")
    seen = []
    for name in ("self_attn", "self_attn.q_proj", "mlp", "mlp.gate_proj", "mlp.act_fn", "input_layernorm"):
        layer = model.model.layers[0].get_submodule(name)
        layer.register_forward_hook(lambda *_, name=name: seen.append(name))
    before = model(IDS).logits
    fired, seen[:] = sorted(seen), []
    torch.testing.assert_close(atb.apply_optimizations(model)(IDS).logits, before, atol=1e-5, rtol=1e-5)
    assert sorted(seen) == fired


def test_adapters_keep_working():
    """LoRA on products that we would take, and a norm that PEFT trains in a copy of its own."""
    targets = {"target_modules": ["q_proj", "gate_proj", "down_proj"], "modules_to_save": ["post_attention_layernorm"]}
    model = peft.get_peft_model(small("llama"), peft.LoraConfig(r=4, **targets)).eval()
    plain = model(IDS).logits
    model = atb.apply_optimizations(model)
    torch.testing.assert_close(model(IDS).logits, plain, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    changed = model(IDS).logits
    assert (changed - plain).abs().max() > 1e-2
    changed.square().sum().backward()
    trained = [parameter for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all(parameter.grad is not None and parameter.grad.any() for parameter in trained)
    torch.testing.assert_close(atb.restore(model)(IDS).logits, changed, atol=1e-4, rtol=1e-4)


def test_generation_is_the_same():
    model = small("mistral")
    want = model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(
        atb.apply_optimizations(model).generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0), want
    )
