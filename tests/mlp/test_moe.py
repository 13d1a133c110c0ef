"""Mixtures of experts as modules: routing by formula, loss, layers, state dicts, and bad options by name."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import atb_modules as atb
from atb_modules import FeedForward, MLPConfig, MoE, MoEConfig, RouterConfig, TransformerLayer, load_balancing_loss
from atb_modules.mlp import Experts, route

NAN = float("nan")


def randomised(module):
    for parameter in module.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize("mlp_type", ["swiglu", "geglu", "gelu", "relu2"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_mixture_is_the_weighted_sum_of_its_feed_forwards(mlp_type, bias):
    config = MLPConfig(bias=bias)
    module = randomised(MoE(16, 24, 4, 2, mlp_type, num_shared_experts=2, shared_gate=True, config=config))
    x = torch.randn(3, 5, 16)
    probabilities = module.router(x).softmax(-1)
    best, experts = probabilities.topk(2)
    expected = module.shared_gate(x).sigmoid() * module.shared_expert(x)
    assert module.shared_expert.intermediate_size == 48
    for number in range(4):
        single = FeedForward(16, 24, mlp_type, config=config)
        name = module.experts.up_name
        parts = {f"{name}.weight": getattr(module.experts, name), "down_proj.weight": module.experts.down_proj}
        if bias:
            parts |= {f"{n}.bias": getattr(module.experts, f"{n}_bias") for n in (name, "down_proj")}
        single.load_state_dict({key: value[number] for key, value in parts.items()})
        weight = (best / best.sum(-1, keepdim=True) * (experts == number)).sum(-1, keepdim=True)
        expected = expected + weight * single(x)
    torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-5)


def test_route_of_softmax_over_all_and_over_the_best():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    weights, experts = route(logits, 2, RouterConfig(normalize=False, scale=3.0))
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, 3.0 * logits.softmax(-1)[:, [1, 2]])
    late, _ = route(logits, 2, RouterConfig(scoring="top_k_softmax"))
    normalised, _ = route(logits, 2)
    torch.testing.assert_close(late, logits[:, [1, 2]].softmax(-1))
    torch.testing.assert_close(late, normalised)  # the same thing, once normalised


def test_a_correction_moves_the_choice_and_not_the_weight():
    logits = torch.tensor([[0.0, 1.0, 2.0]], requires_grad=True)
    config = RouterConfig(scoring="sigmoid", normalize=False, score_correction=True)
    weights, experts = route(logits, 1, config, torch.tensor([5.0, 0.0, 0.0]))
    assert experts.tolist() == [[0]]
    assert torch.equal(weights, logits[:, :1].sigmoid())
    weights.sum().backward()
    assert torch.equal(logits.grad != 0, torch.tensor([[True, False, False]]))


def test_groups_limit_the_choice():
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.8, 0.0]])
    logits = scores.log() - (1 - scores).log()
    # Best sum of two: the middle group; best single score: the first.
    for group_experts, expected in ((2, [2, 3]), (1, [0, 1])):
        config = RouterConfig(scoring="sigmoid", num_groups=3, top_groups=1, group_experts=group_experts)
        assert route(logits, 2, config)[1].tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_router_scores_are_float32_and_the_output_has_the_inputs_dtype(dtype):
    module = randomised(MoE(16, 24, 4, 2, num_shared_experts=1, dtype=dtype))
    out, logits = module(torch.randn(2, 3, 16, dtype=dtype), return_router_logits=True)
    assert out.dtype == dtype and logits.shape == (6, 4)
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_nothing_of_a_call_stays_on_the_module():
    module = MoE(16, 24, 4, 2)
    before = {key: copy.copy(value) for key, value in vars(module).items()}
    module(torch.randn(2, 3, 16), return_router_logits=True)
    assert vars(module).keys() == before.keys()
    names = {"router.weight", "experts.gate_up_proj", "experts.down_proj"}
    assert set(module.state_dict()) == names


def test_load_balancing_loss_is_its_formula_and_least_where_loads_are_equal():
    logits = torch.randn(40, 4, dtype=torch.float64, requires_grad=True)
    share = torch.zeros(4, dtype=torch.float64)
    for row in logits.softmax(-1).topk(2).indices:
        share[row] += 1 / 40
    expected = 4 * (share * logits.softmax(-1).mean(0)).sum()
    loss = load_balancing_loss(logits.reshape(8, 5, 4), 4, 2)
    torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-6, rtol=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    (truth,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(gradient, truth, atol=1e-6, rtol=1e-5)
    even = 9.0 * torch.eye(4).repeat(3, 1)
    assert load_balancing_loss(even, 4, 1) < load_balancing_loss(9.0 * torch.eye(4)[[0] * 12], 4, 1) / 3
    torch.testing.assert_close(load_balancing_loss(torch.zeros(8, 4), 4, 4), torch.tensor(4.0))


def test_masked_tokens_do_not_count_in_the_loss():
    logits = torch.randn(3, 5, 4)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    alone = logits[mask.bool()]
    torch.testing.assert_close(load_balancing_loss(logits, 4, 2, mask), load_balancing_loss(alone, 4, 2))
    layers = [logits, torch.randn(3, 5, 4)]
    joined = torch.cat([layer[mask.bool()] for layer in layers])
    torch.testing.assert_close(load_balancing_loss(layers, 4, 2, mask), load_balancing_loss(joined, 4, 2))
    assert load_balancing_loss(logits, 4, 2, torch.zeros(3, 5)) == 0.0


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "parallel"])
def test_in_a_layer(placement, mode):
    mlp = MLPConfig(moe=MoEConfig(4, 2, num_shared_experts=1, router=RouterConfig(normalize=False)))
    options = {"norm_placement": placement, "mode": mode, "rotary": atb.RotaryConfig()}
    layer = randomised(TransformerLayer(32, 4, intermediate_size=24, mlp_type="moe", mlp=mlp, **options))
    assert isinstance(layer.mlp, MoE) and layer.mlp.mlp_type == "swiglu"
    x = torch.randn(2, 7, 32)
    with atb.use_strategy(mlp="reference", norm="reference", attention="reference", linear="reference"):
        expected = layer(x)
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)
    if mode == "inference":
        pieces = [layer(part, use_cache=True)[0] for part in x.split([5, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), layer(x), atol=1e-4, rtol=1e-4)
    else:
        layer(x).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_compiled_autocast_and_pickled():
    module = randomised(MoE(16, 24, 4, 2, num_shared_experts=1, shared_gate=True))
    x = torch.randn(2, 5, 16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    compiled(x).sum().backward()
    got = [p.grad for p in module.parameters()]
    want = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    for mine, truth in zip(got, want, strict=True):
        torch.testing.assert_close(mine, truth)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    torch.testing.assert_close(out, module(x), atol=0.1 * float(out.detach().abs().max()), rtol=0)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))


def test_recorded_logits_are_those_of_the_call_and_differentiable():
    module = randomised(MoE(16, 24, 4, 2))
    x = torch.randn(2, 5, 16)
    with atb.record_router_logits(torch.nn.Sequential(module, module)) as found:
        _, logits = module(x, return_router_logits=True)
        module(x)
    assert len(found) == 2 and torch.equal(found[0].flatten(0, 1), logits)
    load_balancing_loss(found, 4, 2).backward()
    assert module.router.weight.grad.abs().sum() > 0
    assert not module.router._forward_hooks
    with pytest.raises(TypeError, match="module is None"), atb.record_router_logits(None):
        pass


def test_experts_one_by_one_load_into_the_stacked_ones():
    module = randomised(MoE(16, 24, 3, 2, config=MLPConfig(bias=True)))
    state = dict(module.state_dict())
    single = {}
    for part, rows in (("gate_proj", slice(0, 24)), ("up_proj", slice(24, 48)), ("down_proj", slice(None))):
        name = "down_proj" if part == "down_proj" else "gate_up_proj"
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            for number, tensor in enumerate(state[f"experts.{name}{suffix}"]):
                single[f"experts.{number}.{part}.{kind}"] = tensor[rows].clone()
    single |= {"gate.weight": state["router.weight"]}
    other = MoE(16, 24, 3, 2, config=MLPConfig(bias=True))
    other.load_state_dict(single)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    missing = {key: value for key, value in single.items() if "experts.1.up_proj" not in key}
    with pytest.raises(ValueError, match=r"no up projection \(weight\) of the experts \[1\]"):
        other.load_state_dict(missing)
    single["experts.2.down_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"experts: down have shapes .*\(3, 3\)"):
        other.load_state_dict(single)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scoring": "hash"}, ValueError, "scoring is 'hash'; allowed: 'softmax'"),
        ({"normalize": 1}, TypeError, "normalize is 1"),
        ({"scale": 0.0}, ValueError, "scale is 0.0"),
        ({"scale": NAN}, ValueError, "scale is nan"),
        ({"num_groups": 2}, ValueError, "num_groups is 2 and top_groups None; give both or none"),
        ({"num_groups": 2, "top_groups": 3}, ValueError, "top_groups is 3; allowed: a positive int up to 2"),
        ({"group_experts": 0}, ValueError, "group_experts is 0"),
    ],
)
def test_bad_routers(options, error, message):
    with pytest.raises(error, match=message):
        RouterConfig(**options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MoE(16, 24, 4, 5), ValueError, "top_k is 5; allowed: a positive int up to 4"),
        (lambda: MoE(16, 24, 0, 1), ValueError, "num_experts is 0"),
        (lambda: MoE(16, 24, 4, 2, shared_gate=True), ValueError, "shared_gate is True with num_shared_experts 0"),
        (lambda: MoE(16, 24, 4, 2, config=MLPConfig(dropout=0.1)), ValueError, "config.dropout is 0.1; MoE allows 0.0"),
        (lambda: MLPConfig(dropout=0.1, moe=MoEConfig(4, 2)), ValueError, "dropout is 0.1; a mixture of experts"),
        (lambda: MLPConfig(moe={"top_k": 2}), TypeError, "moe is .*allowed: MoEConfig or None"),
        (lambda: FeedForward(4, 8, config=MLPConfig(moe=MoEConfig(4, 2))), ValueError, "config.moe is a MoEConfig"),
        (lambda: TransformerLayer(32, 4, mlp_type="moe"), ValueError, "mlp_type is 'moe' and mlp has no moe"),
        (lambda: Experts(16, 24, 2.0), TypeError, "num_experts is 2.0"),
        (
            lambda: MoE(6, 8, 6, 2, router=RouterConfig(num_groups=4, top_groups=1)),
            ValueError,
            "num_groups is 4; allowed",
        ),
        (lambda: MoE(16, 24, 4, 2)(torch.randn(3, 8)), ValueError, "x has shape .*hidden_size=16"),
        (lambda: MoE(16, 24, 4, 2)(None), TypeError, "x is NoneType"),
        (lambda: route(torch.zeros(2, 4), 2, None, torch.zeros(3)), ValueError, "score_correction has shape"),
        (lambda: route(torch.zeros(2, 4).long(), 2), TypeError, "router_logits is torch.int64"),
        (lambda: load_balancing_loss([], 4, 2), ValueError, "router_logits is empty"),
        (lambda: load_balancing_loss(None, 4, 2), TypeError, "router_logits is NoneType"),
        (lambda: load_balancing_loss(torch.zeros(3, 5), 4, 2), ValueError, r"router_logits\[0\] has shape"),
        (
            lambda: load_balancing_loss(torch.zeros(3, 4), 4, 2, torch.ones(2)),
            ValueError,
            "attention_mask has 2 entries",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
