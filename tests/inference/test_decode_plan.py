"""The native decode step against the modules, and the reasons that keep a model on the long road."""

import logging
import re

import pytest
import torch

from atb_modules.attention import Attention, RotaryConfig
from atb_modules.attention.rope_scaling import RotaryScaling
from atb_modules.inference.layer_plan import layer_traits
from atb_modules.inference.plan import DecodeStep
from atb_modules.kernels.registry import explain_choice
from atb_modules.layer import TransformerLayer
from atb_modules.mlp import FeedForward
from atb_modules.norm import NormCastOrder
from atb_modules.strategies import use_strategy

VARIANTS = {
    "plain": {},
    "qk_norm": {"qk_norm": True},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "gemma": {
        "norm_placement": "sandwich",
        "norm_offset": 1.0,
        "norm_cast_order": NormCastOrder.CAST_LAST,
        "mlp_type": "geglu_tanh",
        "qk_norm": True,
        "attention_scale": 0.3,
        "attention_softcap": 20.0,
        "logit_softcap": 15.0,
        "embedding_scale": 8.0,
        "tie_word_embeddings": True,
    },
}


def step_logits(model, prompts, tokens, page_dtype=None):
    cache = model.new_cache(128, page_size=8, num_pages=100, dtype=page_dtype)
    cache.begin(len(prompts))
    for row, prompt in enumerate(prompts):
        counts = [0] * len(prompts)
        counts[row] = len(prompt)
        step = cache.step(counts)
        with torch.no_grad():
            model.run_packed(model.embed_tokens(torch.tensor(prompt)), step, cache)
    with torch.inference_mode():
        road = DecodeStep(model, cache)
        out = [road(tokens), road(tokens[::-1])]
    return torch.stack(out), road


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_equals_modules(build_model, prompt_of, variant, batch, dtype):
    model = build_model((None, 6, None), **VARIANTS[variant]).to(dtype)
    prompts = [prompt_of(5 + 11 * row) for row in range(batch)]
    tokens = list(range(10, 10 + batch))
    native, road = step_logits(model, prompts, tokens)
    assert road._native is not None
    with use_strategy(decode="modules"):
        modules, road = step_logits(model, prompts, tokens)
    assert road._native is None
    exact, _ = step_logits(model.float(), prompts, tokens)
    # In bfloat16 both round; the native road keeps the residual stream in float32 and may not be farther off.
    bound = 2e-4 if dtype == torch.float32 else float((modules.float() - exact).abs().max()) * 1.5 + 2e-2
    torch.testing.assert_close(native.float(), exact, atol=bound, rtol=1e-4)


def test_reasons(build_model):
    model = build_model()
    layer = model.layers[0]

    def reasons(**changes):
        traits = layer_traits(layer, changes.get("page_dtype", torch.float32), changes.get("batch", 1))
        explanation = explain_choice("decode_layer", None, traits)
        return next(row.reasons for row in explanation.rows if row.strategy == "cpu")

    assert reasons() == ()
    assert reasons(batch=17) == ("takes 1 to 16 rows, the step has 17",)
    assert "pages are torch.float64" in reasons(page_dtype=torch.float64)[0]
    with use_strategy(attention="reference"):
        assert reasons() == ("attention strategy is reference; it takes auto, cpu",)
    handle = layer.mlp.register_forward_hook(lambda *_: None)
    assert reasons() == ("mlp has forward hooks",)
    handle.remove()
    layer.mlp.down_proj = torch.nn.Linear(96, 64, bias=False).requires_grad_(False)
    assert reasons() == ("mlp.down_proj is torch.nn.modules.linear.Linear; it takes Linear",)


def test_reasons_of_anything_in_a_slot(build_model):
    """Collecting reasons asks foreign modules for nothing."""
    for path in ("mlp", "attention", "attention.qkv", "mlp.down_proj", "mlp_norm", "attention_branch"):
        layer = build_model((None,)).layers[0]
        outer, _, name = path.rpartition(".")
        setattr(layer.get_submodule(outer), name, torch.nn.Identity())
        (reason,) = layer_traits(layer, torch.float32, 1).structure
        assert reason.startswith(f"changed:{path} is torch.nn.modules.linear.Identity; it takes ")
    traits = layer_traits(torch.nn.Identity(), torch.float32, 1)
    assert traits.structure == ("changed:layer is torch.nn.modules.linear.Identity; it takes TransformerLayer",)


def test_the_long_road_says_why(build_model, prompt_of, caplog):
    model = build_model()
    model.layers[1].attention.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.INFO, logger="atb_modules.kernels"):
        model.generate(prompt_of(3), 3)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("decode_layer -> modules")]
    assert len(lines) == 1 and "attention has forward hooks" in lines[0]


class Twice(torch.nn.Module):
    """A wrapper as adapter libraries make them: what it wraps, its weight handed on, no bias."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, *args, **kwargs):
        return 2 * self.base_layer(*args, **kwargs)


class Louder(TransformerLayer):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


class LouderMLP(FeedForward):
    def forward(self, x):
        return 2 * super().forward(x)


class LouderAttention(Attention):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


def as_class(module, kind):
    module.__class__ = kind


def own_forward(module):
    plain = module.forward
    module.forward = lambda *args, **kwargs: 2 * plain(*args, **kwargs)


def wrap(module, name):
    setattr(module, name, Twice(getattr(module, name)))


def set_layer(model):
    model.layers[1] = Twice(model.layers[1])


def biased_head(model):
    head = torch.nn.Linear(64, 101, dtype=torch.float32).requires_grad_(False)
    model.lm_head = head


def our_biased_head(model):
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-5, 5, 101), requires_grad=False)


CHANGES = {
    "mlp": (lambda m: wrap(m.layers[1], "mlp"), "mlp is .*Twice"),
    "layer": (set_layer, "layer is .*Twice"),
    "layer subclass": (lambda m: as_class(m.layers[1], Louder), "layer is .*Louder"),
    "mlp subclass": (lambda m: as_class(m.layers[1].mlp, LouderMLP), "mlp is .*LouderMLP"),
    "attention subclass": (lambda m: as_class(m.layers[1].attention, LouderAttention), "attention is .*LouderAtt"),
    "own forward": (lambda m: own_forward(m.layers[1].mlp), "mlp has a forward of its own"),
    "own forward of a head": (lambda m: own_forward(m.lm_head), "lm_head has a forward of its own"),
    "down": (lambda m: wrap(m.layers[1].mlp, "down_proj"), "mlp.down_proj is .*Twice"),
    "o": (lambda m: wrap(m.layers[1].attention, "o_proj"), "attention.o_proj is .*Twice"),
    "qkv": (lambda m: wrap(m.layers[1].attention.qkv, "qkv_proj"), "attention.qkv.qkv_proj is .*Twice"),
    "head": (lambda m: wrap(m, "lm_head"), "lm_head is .*Twice"),
    "foreign head": (biased_head, "lm_head is torch.nn.modules.linear.Linear"),
    "bias of the head": (our_biased_head, "lm_head has a bias"),
    "norm": (lambda m: wrap(m, "norm"), "norm is .*Twice"),
    "attention norm": (
        lambda m: setattr(m.layers[1], "attention_norm", torch.nn.RMSNorm(64)),
        "attention_norm is torch.nn.modules.normalization.RMSNorm",
    ),
    "hook of the norm": (
        lambda m: m.norm.register_forward_hook(lambda _, args, out: out.flip(-1)),
        "norm has forward hooks",
    ),
    "hook before the head": (
        lambda m: m.lm_head.register_forward_pre_hook(lambda _, args: (args[0].flip(-1),)),
        "lm_head has forward hooks",
    ),
    "method": (lambda m: setattr(m, "head", lambda x: x[..., :50]), "head of the model is overridden"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_users_put_in_is_run(build_model, prompt_of, caplog, name):
    change, reason = CHANGES[name]
    model = build_model()
    prompts = [prompt_of(5), prompt_of(9)]
    before, _ = step_logits(model, prompts, [3, 4])
    change(model)
    with caplog.at_level(logging.INFO, logger="atb_modules.kernels"):
        changed, road = step_logits(model, prompts, [3, 4])
    assert road._native is None
    assert re.search(reason, "\n".join(r.getMessage() for r in caplog.records))
    with use_strategy(decode="modules"):
        expected, _ = step_logits(model, prompts, [3, 4])
    assert torch.equal(changed, expected)
    assert changed.shape != before.shape or (changed - before).abs().max() > 1e-3 or name == "attention norm"


def test_hooks_of_all_modules_and_of_the_embedding(build_model, prompt_of):
    model = build_model()
    calls = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module))
    try:
        _, road = step_logits(model, [prompt_of(4)], [3])
    finally:
        handle.remove()
    assert road._native is None and sum(module is model.layers[0].mlp for module in calls) == 3
    calls.clear()
    model.embed.register_forward_hook(lambda module, *_: calls.append(module))
    _, road = step_logits(model, [prompt_of(4)], [3])
    assert road._native is not None and len(calls) == 3  # every road calls the embedding


@pytest.mark.parametrize("kind", ["dynamic", "linear"])
def test_scaled_rotary(build_model, prompt_of, kind):
    """Dynamic NTK changes its frequencies with the length, so no table may be kept for it."""
    scaling = RotaryScaling(kind, factor=4.0, original_max_positions=32)
    model = build_model((None,))
    rotary = RotaryConfig(scaling=scaling)
    again = build_model((None,), **{})
    config = type(model.config)(**{**model.config.__dict__, "rotary": (rotary,)})
    scaled = type(model)(config, mode="inference")
    scaled.load_state_dict(again.state_dict())
    prompt = prompt_of(60)
    with use_strategy(decode="modules"):
        expected = scaled.generate(prompt, 10)
    assert scaled.generate(prompt, 10) == expected
