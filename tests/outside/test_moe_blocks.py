"""The mixture blocks of transformers, small and random: their state dicts load, outputs and gradients are equal."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from atb_modules import MoE, RouterConfig, load_balancing_loss, load_model, record_router_logits

QWEN = {"hidden_size": 48, "moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 3}
DEEPSEEK = {
    "hidden_size": 48,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}


def mixtral(normalize):
    config = transformers.MixtralConfig(
        hidden_size=48, intermediate_size=40, num_local_experts=6, num_experts_per_tok=2
    )
    return config, MixtralSparseMoeBlock, lambda: MoE(48, 40, 6, 2)


def qwen3(normalize):
    config = transformers.Qwen3MoeConfig(norm_topk_prob=normalize, **QWEN)
    return config, Qwen3MoeSparseMoeBlock, lambda: MoE(48, 40, 6, 3, router=RouterConfig(normalize=normalize))


def qwen2(normalize):
    config = transformers.Qwen2MoeConfig(norm_topk_prob=normalize, shared_expert_intermediate_size=56, **QWEN)
    options = {"num_shared_experts": 1, "shared_intermediate_size": 56, "shared_gate": True}
    router = RouterConfig(normalize=normalize)
    return config, Qwen2MoeSparseMoeBlock, lambda: MoE(48, 40, 6, 3, router=router, **options)


def deepseek(normalize):
    config = transformers.DeepseekV3Config(norm_topk_prob=normalize, **DEEPSEEK)
    groups = {"num_groups": 4, "top_groups": 2, "scale": 2.5}
    router = RouterConfig(scoring="sigmoid", normalize=normalize, score_correction=True, **groups)
    return config, DeepseekV3MoE, lambda: MoE(48, 40, 8, 3, num_shared_experts=2, router=router)


@pytest.fixture(
    params=[(mixtral, True), (qwen3, True), (qwen3, False), (qwen2, False), (deepseek, True)],
    ids=lambda p: f"{p[0].__name__}-{p[1]}",
)
def pair(request):
    """(transformers' block, ours with its weights)"""
    build, normalize = request.param
    config, kind, ours = build(normalize)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block = kind(config)
    for tensor in (*block.parameters(), *block.buffers()):
        torch.nn.init.normal_(tensor, std=0.2)
    module = ours()
    module.load_state_dict(block.state_dict())
    return block, module


@pytest.mark.parametrize("strategy", ["auto", "torch", "reference"])
def test_outputs_and_gradients_equal(pair, strategy):
    block, module = pair
    module.experts.config = type(module.experts.config)(strategy=strategy)
    x = torch.randn(3, 11, 48)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    theirs, ours = block(leaves[0]), module(leaves[1])
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    weight = torch.randn_like(theirs)
    (theirs * weight).sum().backward()
    (ours * weight).sum().backward()
    expected = {name: parameter.grad for name, parameter in block.named_parameters()} | {"x": leaves[0].grad}
    got = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert len(got) == len(expected) - 1 - _fused(module)
    torch.testing.assert_close(leaves[1].grad, expected["x"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got["router.weight"], expected["gate.weight"], atol=1e-5, rtol=1e-4)
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        torch.testing.assert_close(got[name], expected[name], atol=1e-5, rtol=1e-4)


def _fused(module):
    """Their shared expert has gate and up apart."""
    return 0 if module.shared_expert is None else 1


def test_experts_one_by_one_load_in_both_spellings(pair):
    block, module = pair
    state = block.state_dict()
    gate_up, down = state.pop("experts.gate_up_proj"), state.pop("experts.down_proj")
    for names in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        single = dict(state)
        for number in range(gate_up.shape[0]):
            parts = (*gate_up[number].chunk(2), down[number])
            single |= {f"experts.{number}.{name}.weight": part for name, part in zip(names, parts, strict=True)}
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        module.load_state_dict(single)
        x = torch.randn(2, 5, 48)
        torch.testing.assert_close(module(x), block(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_loss_equals(masked):
    layers = tuple(torch.randn(15, 6, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]) if masked else None
    theirs, ours = load_balancing_loss_func(layers, 6, 2, mask), load_balancing_loss(layers, 6, 2, mask)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    for mine, truth in zip(torch.autograd.grad(ours, layers), torch.autograd.grad(theirs, layers), strict=True):
        torch.testing.assert_close(mine, truth, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_auxiliary_loss_of_a_whole_model(family, build_tiny_model, tmp_path):
    theirs = build_tiny_model(family)
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    ids = torch.randint(3, 97, (2, 19))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    expected = theirs(ids, attention_mask=mask, output_router_logits=True).aux_loss
    with record_router_logits(model) as router_logits:
        model(ids, attention_mask=mask)
    config = model.config.moe
    assert len(router_logits) == 4 - len(model.config.dense_layers)
    loss = load_balancing_loss(router_logits, config.num_experts, config.top_k, mask)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    model(ids)
    assert len(router_logits) == 4 - len(model.config.dense_layers)  # nothing is collected outside of the block
