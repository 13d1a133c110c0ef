"""The native decode step against the modules, and the reasons that keep a model on the long road."""

import logging

import pytest
import torch

from atb_modules.attention import RotaryConfig
from atb_modules.attention.rope_scaling import RotaryScaling
from atb_modules.inference.layer_plan import layer_traits
from atb_modules.inference.plan import DecodeStep
from atb_modules.kernels.registry import explain_choice
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
            model.run_packed(torch.tensor(prompt), step, cache)
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
    layer = model.decoder_layers[0]

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
    assert reasons() == ("hooks is True; it takes False",)
    handle.remove()
    layer.mlp.down_proj = torch.nn.Linear(96, 64, bias=False).requires_grad_(False)
    assert reasons() == ("linear is Linear+torch.nn.modules.linear.Linear; it takes Linear",)


def test_the_long_road_says_why(build_model, prompt_of, caplog):
    model = build_model()
    model.decoder_layers[1].attention.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.INFO, logger="atb_modules.kernels"):
        model.generate(prompt_of(3), 3)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("decode_layer -> modules")]
    assert len(lines) == 1 and "hooks is True" in lines[0]


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
