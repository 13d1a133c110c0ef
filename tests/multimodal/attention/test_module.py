"""MultiModalAttention against its formula in float64; ragged rows, images, positions, state, compilation, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from atb_modules import AttentionConfig, RotaryConfig
from atb_modules.attention import RotaryEmbedding
from atb_modules.multimodal import MultiModalAttention, MultiModalConfig, MultiModalLayout
from atb_modules.testing import fresh_generator

from .formula import MODES, truth, visible

HALF, PAIRS = RotaryConfig(base=100.0), RotaryConfig(base=50.0, layout="interleaved", partial_factor=0.5)


def build(seed=0, **options):
    torch.manual_seed(seed)
    module = MultiModalAttention(20, 40, 4, 8, 24, **{"num_kv_heads": 2, **options})
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def turned(x, positions, config):
    """Rotary embedding of (B, tokens, heads, dim), by complex numbers in float64."""
    width = config.rotary_dim(x.shape[-1])
    angles = positions[:, None] * config.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    kept, part = x[..., width:], x[..., :width]
    if config.layout == "half":
        a, b = part.chunk(2, -1)
    else:
        a, b = part[..., ::2], part[..., 1::2]
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[:, None]
    if config.layout == "half":
        part = torch.cat([turned.real, turned.imag], -1)
    else:
        part = torch.stack([turned.real, turned.imag], -1).flatten(-2)
    return torch.cat([part, kept], -1)


def formula(module, vision, text, image_lengths=None, dtype=torch.float64):
    """What the module computes for rows of equal lengths, every product rounded to ``dtype``."""
    sides = []
    start = vision.shape[1] if module.multimodal.text_start == "after_vision" else 0
    for name, states, first in (("vision", vision, 0), ("text", text, start)):
        part = module.projections_of(name)
        fused = part.qkv.qkv_proj
        bias = None if fused.bias is None else fused.bias.to(dtype)
        qkv = F.linear(states.to(dtype), fused.weight.to(dtype), bias).unflatten(-1, (8, 8))
        q, k, v = qkv.split([4, 2, 2], -2)
        if part.q_norm is not None:
            q, k = (
                F.rms_norm(t, (8,), norm.weight.to(dtype), 1e-6) for t, norm in ((q, part.q_norm), (k, part.k_norm))
            )
        rotation = getattr(module.multimodal, f"{name}_rotary")
        if rotation is not None:
            positions = torch.arange(first, first + states.shape[1])
            q, k = (turned(t, positions, rotation) for t in (q, k))
        sides.append(tuple(t.transpose(1, 2) for t in (q, k, v)))
    mask = visible(module.spec, vision.shape[1], text.shape[1], image_lengths)
    outs = truth(*sides, module.spec, mask)[:2]
    results = []
    for name, out in zip(("vision", "text"), outs, strict=True):
        o_proj = module.projections_of(name).o_proj
        bias = None if o_proj.bias is None else o_proj.bias.to(dtype)
        results.append(F.linear(out.transpose(1, 2).flatten(-2), o_proj.weight.to(dtype), bias))
    return results


OPTIONS = {
    "plain": {},
    "experts": {"multimodal": MultiModalConfig(projections="per_modality")},
    "rotary": {"multimodal": MultiModalConfig(vision_rotary=PAIRS, text_rotary=HALF)},
    "rotary from 0": {"multimodal": MultiModalConfig(text_rotary=HALF, text_start="zero")},
    "norms": {
        "multimodal": MultiModalConfig("per_modality", vision_rotary=HALF, text_rotary=HALF),
        "config": AttentionConfig(qk_norm="before_rotary", qkv_bias=True, out_bias=True, scale=0.4, softcap=6.0),
    },
    "two-way text": {"config": AttentionConfig(causal=False)},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", OPTIONS)
def test_forward_and_gradients(case, mode):
    generator = fresh_generator()
    module = build(cross_attention_mode=mode, **OPTIONS[case])
    vision = torch.randn(2, 9, 24, generator=generator, requires_grad=True)
    text = torch.randn(2, 17, 24, generator=generator, requires_grad=True)
    leaves = [vision, text, *module.parameters()]
    want = formula(module, vision, text)
    weights = [torch.randn(t.shape, generator=generator) for t in want]
    wanted = torch.autograd.grad(sum((t * w).sum() for t, w in zip(want, weights, strict=True)), leaves)
    for strategy in ("auto", "three_call", "prefix", "unified"):
        module.strategy = type(module.strategy)(strategy)
        found = module(vision, text)
        for got, other in zip(found, want, strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), other, atol=2e-5, rtol=2e-5)
        grads = torch.autograd.grad(sum((t * w).sum() for t, w in zip(found, weights, strict=True)), leaves)
        for got, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(got, other.to(got.dtype), atol=5e-4, rtol=5e-4)


def test_bfloat16_errs_no_more_than_the_formula_in_bfloat16():
    generator = fresh_generator()
    module = build(cross_attention_mode="both").bfloat16()
    vision, text = (torch.randn(2, n, 24, generator=generator).bfloat16() for n in (9, 17))
    with torch.no_grad():
        want, plain = formula(module, vision, text), formula(module, vision, text, dtype=torch.bfloat16)
        for got, rounded, exact in zip(module(vision, text), plain, want, strict=True):
            assert got.dtype == rounded.dtype == torch.bfloat16
            error, allowed = ((t.double() - exact).abs().max() for t in (got, rounded))
            assert error <= 2 * allowed + torch.finfo(torch.bfloat16).eps * exact.abs().max()


#: rows as (lengths of images, text tokens)
ROWS = [([5, 4], 12), ([], 17), ([20], 0), ([3], 40)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["lengths", "masks", "packed"])
def test_ragged_rows_are_rows_by_themselves(way, mode):
    generator = fresh_generator()
    rotaries = MultiModalConfig(vision_rotary=PAIRS, text_rotary=HALF)
    module = build(cross_attention_mode=mode, multimodal=rotaries)
    vision = torch.randn(4, 20, 24, generator=generator)
    text = torch.randn(4, 40, 24, generator=generator)
    counts = torch.tensor([[sum(images), tokens] for images, tokens in ROWS])
    images = [row[0] for row in ROWS]
    masks = [torch.arange(n) < count[:, None] for n, count in ((20, counts[:, 0]), (40, counts[:, 1]))]
    if way == "lengths":
        options = {"vision_lengths": counts[:, 0].tolist(), "text_lengths": counts[:, 1], "image_lengths": images}
        found = module(vision, text, **options)
    elif way == "masks":  # padded on the left
        masks = [mask.flip(1) for mask in masks]
        found = module(vision, text, vision_mask=masks[0], text_mask=masks[1].int(), image_lengths=images)
    else:
        layout = MultiModalLayout.from_lengths(*counts.T.tolist(), images)
        packed = module(vision[masks[0]], text[masks[1]], layout=layout)
        found = [torch.zeros(4, n, 24) for n in (20, 40)]
        for padded, mask, out in zip(found, masks, packed, strict=True):
            padded[mask] = out
    for row, (lengths, _) in enumerate(ROWS):
        alone = formula(module, vision[row : row + 1, masks[0][row]], text[row : row + 1, masks[1][row]], lengths)
        for got, mask, want in zip(found, masks, alone, strict=True):
            torch.testing.assert_close(got[row][mask[row]].double(), want[0], atol=2e-5, rtol=2e-5)
            assert not got[row][~mask[row]].any()


def test_gradients_of_ragged_rows_stay_in_their_rows():
    generator = fresh_generator()
    module = build()
    vision = torch.randn(3, 9, 24, generator=generator, requires_grad=True)
    text = torch.randn(3, 11, 24, generator=generator, requires_grad=True)
    found = module(vision, text, vision_lengths=[9, 0, 4], text_lengths=[5, 11, 3])
    found[1][2].sum().backward()
    assert not vision.grad[:2].any() and not text.grad[:2].any()
    assert vision.grad[2, :4].any() and not vision.grad[2, 4:].any() and not text.grad[2, 3:].any()


@pytest.mark.parametrize("mode", MODES)
def test_a_modality_that_is_not_there(mode):
    generator = fresh_generator()
    module = build(cross_attention_mode=mode, multimodal=MultiModalConfig(text_rotary=HALF))
    vision, text = torch.randn(2, 9, 24, generator=generator), torch.randn(2, 17, 24, generator=generator)
    nothing = torch.empty(2, 0, 24)
    for given, filled in (((vision, None), (vision, nothing)), ((None, text), (nothing, text))):
        found = module(*given)
        for got, want in zip(found, formula(module, *filled), strict=True):
            torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    with pytest.raises(ValueError, match="vision and text are None"):
        module(None, None)
    assert module(vision[:0], text[:0])[1].shape == (0, 17, 24)


def test_positions_and_tables_of_the_caller():
    generator = fresh_generator()
    module = build(multimodal=MultiModalConfig(vision_rotary=PAIRS, text_rotary=HALF))
    vision, text = torch.randn(2, 9, 24, generator=generator), torch.randn(2, 17, 24, generator=generator)
    want = module(vision, text)
    positions = {"vision_positions": torch.arange(9), "text_positions": torch.arange(9, 26).expand(2, -1)}
    # as a two-dimensional or M-RoPE table would be: any angles, a row a token
    tables = {
        "vision_tables": RotaryEmbedding(8, PAIRS)(torch.arange(9)),
        "text_tables": RotaryEmbedding(8, HALF)(torch.arange(9, 26).expand(2, -1)),
    }
    for options in (positions, tables):
        assert all(torch.equal(a, b) for a, b in zip(module(vision, text, **options), want, strict=True))
        lengths = {"vision_lengths": [9, 4], "text_lengths": [17, 6]}
        found = module(vision, text, **options, **lengths)
        torch.testing.assert_close(found[1][0], want[1][0], atol=2e-5, rtol=2e-5)
        # the second row keeps its positions from 9 on, though it has 4 vision tokens
        alone = {k: (v[..., :4] if "vision" in k else v[1:, :6]) for k, v in positions.items()}
        other = module(vision[1:, :4], text[1:, :6], **alone)
        torch.testing.assert_close(found[1][1, :6], other[1][0], atol=2e-5, rtol=2e-5)
    other = module(vision, text, text_positions=torch.arange(17))
    assert not torch.allclose(other[1], want[1])


def test_state_is_parameters_alone():
    module = build(multimodal=MultiModalConfig("per_modality", text_rotary=HALF))
    assert set(module.state_dict()) == {
        f"projections.{name}.{part}.weight" for name in ("vision", "text") for part in ("qkv.qkv_proj", "o_proj")
    }
    assert set(build().state_dict()) == {"projections.shared.qkv.qkv_proj.weight", "projections.shared.o_proj.weight"}
    state = module.state_dict()
    fused = state.pop("projections.text.qkv.qkv_proj.weight")
    names = ("q_proj", "k_proj", "v_proj")
    for name, part in zip(names, fused.split([32, 16, 16]), strict=True):
        state[f"projections.text.qkv.{name}.weight"] = part
    other = build(seed=1, multimodal=MultiModalConfig("per_modality", text_rotary=HALF))
    other.load_state_dict(state)
    vision, text = torch.randn(1, 9, 24), torch.randn(1, 17, 24)
    for one, two in ((module, other), (module, copy.deepcopy(module))):
        assert torch.equal(one(vision, text)[1], two(vision, text)[1])


def test_compiles_without_a_break():
    module = build(multimodal=MultiModalConfig(vision_rotary=PAIRS, text_rotary=HALF))
    vision, text = torch.randn(2, 9, 24), torch.randn(2, 17, 24)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    want = module(vision, text)
    found = compiled(vision, text)
    for got, other in zip(found, want, strict=True):
        torch.testing.assert_close(got, other, atol=2e-5, rtol=2e-5)
    parameters = list(module.parameters())
    grads = torch.autograd.grad(found[0].square().sum() + found[1].square().sum(), parameters)
    wanted = torch.autograd.grad(want[0].square().sum() + want[1].square().sum(), parameters)
    for got, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, other, atol=1e-3, rtol=1e-3)


def test_packed_tokens_compile_and_have_shapes_without_memory():
    module = build(multimodal=MultiModalConfig(text_rotary=HALF))
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    layout = MultiModalLayout.from_lengths([5, 7], [9, 3], [[2, 3], [7]])
    states = torch.randn(12, 24), torch.randn(12, 24)
    with torch.no_grad():
        for got, want in zip(compiled(*states, layout=layout), module(*states, layout=layout), strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    meta = MultiModalAttention(20, 40, 4, 8, 24, device="meta")
    layout = MultiModalLayout.from_lengths([5, 7], [9, 3], device="meta")
    shapes = [out.shape for out in meta(*(t.to("meta") for t in states), layout=layout)]
    assert shapes == [(12, 24), (12, 24)]
    assert [out.shape for out in meta(torch.empty(2, 3, 24, device="meta"), None)] == [(2, 3, 24), (2, 0, 24)]


def test_autocast_and_training_with_dropout():
    module = build(config=AttentionConfig(dropout=0.3))
    vision, text = torch.randn(2, 9, 24), torch.randn(2, 17, 24)
    assert torch.equal(module.eval()(vision, text)[1], module.eval()(vision, text)[1])
    assert not torch.equal(module.train()(vision, text)[1], module.train()(vision, text)[1])
    with torch.autocast("cpu", torch.bfloat16):
        out = module.eval()(vision, text)[1]
    torch.testing.assert_close(out.float(), module(vision, text)[1], atol=0.15, rtol=0.1)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"cross_attention_mode": "all"}, ValueError, "cross_attention_mode is 'all'"),
        ({"strategy": "two_call"}, ValueError, "strategy is 'two_call'"),
        ({"config": AttentionConfig(window=(4, 0))}, ValueError, r"config.window is \(4, 0\)"),
        ({"config": AttentionConfig(sinks=True)}, ValueError, "config.sinks is True"),
        ({"multimodal": "shared"}, TypeError, "multimodal is 'shared'"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads is 3"),
    ],
)
def test_options_that_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        build(**options)
    with pytest.raises(ValueError, match="projections is 'own'; allowed: 'shared', 'per_modality'"):
        MultiModalConfig(projections="own")
    with pytest.raises(ValueError, match="vision_seq_len is -1"):
        MultiModalAttention(-1, 4, 2, 8)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"vision": torch.zeros(2, 21, 24)}, ValueError, "vision has 21 tokens; vision_seq_len allows 20"),
        ({"vision": torch.zeros(3, 9, 24)}, ValueError, "vision has batch 3 and text 2"),
        ({"text": torch.zeros(2, 9, 25)}, ValueError, r"text has shape \(2, 9, 25\)"),
        ({"text": torch.zeros(2, 9, 24).int()}, TypeError, "text is torch.int32"),
        ({"vision_lengths": [9]}, ValueError, "vision_lengths has 1 rows; vision has 2"),
        ({"vision_lengths": [9, 10]}, ValueError, r"vision_lengths\[1\] is 10"),
        ({"vision_lengths": [9, 9], "vision_mask": torch.ones(2, 9)}, ValueError, "vision_mask and vision_lengths are"),
        ({"text_mask": torch.ones(2, 9, dtype=torch.bool)}, ValueError, r"text_mask is torch.bool \(2, 9\)"),
        ({"image_lengths": [[9], [4, 4]]}, ValueError, r"image_lengths\[1\] is \[4, 4\], 8 tokens; row 1 has 9"),
        ({"text_positions": torch.arange(9)}, ValueError, r"text_positions has shape \(9,\)"),
        ({"text_positions": torch.ones(17)}, TypeError, "text_positions is torch.float32"),
        ({"vision_tables": (torch.ones(9, 4),) * 2}, ValueError, "vision_tables is given; this attention has no"),
        ({"cache_step": 3}, ValueError, "cache_step is given without kv_cache"),
        ({"layout": MultiModalLayout.from_lengths([9], [17])}, ValueError, r"allowed: \(tokens, 24\) with a layout"),
    ],
)
def test_calls_that_are_refused(change, error, words):
    module = build(multimodal=MultiModalConfig(text_rotary=HALF))
    given = {"vision": torch.zeros(2, 9, 24), "text": torch.zeros(2, 17, 24), **change}
    with pytest.raises(error, match=words):
        module(given.pop("vision"), given.pop("text"), **given)
