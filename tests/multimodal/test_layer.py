"""MultiModalTransformerLayer: its equations, what is shared, TransformerLayer as the case without vision, the cache."""

from __future__ import annotations

import pytest
import torch

from atb_modules import AttentionConfig, KVCacheManager, MLPConfig, RotaryConfig, TransformerLayer
from atb_modules.multimodal import MultiModalConfig, MultiModalTransformerLayer
from atb_modules.overlays import Overlays
from atb_modules.residual import ResidualConfig
from atb_modules.testing import fresh_generator

PLACEMENTS = ["pre", "post", "sandwich", "parallel"]
OWN = MultiModalConfig("per_modality", "per_modality", "per_modality")


def build(cls=MultiModalTransformerLayer, sizes=(20, 40), **options):
    torch.manual_seed(0)
    layer = cls(*sizes, 32, 4, intermediate_size=48, num_kv_heads=2, **options)
    for name, parameter in layer.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return layer


def draw(generator, batch=2, vision=9, text=17):
    return [torch.randn(batch, n, 32, generator=generator) for n in (vision, text)]


def own(parts, name):
    return parts[name] if name in parts else parts["shared"]


def plain_name(name):
    """What a shared parameter is called in a TransformerLayer."""
    return name.replace("projections.shared.", "").replace("shared.", "")


@pytest.mark.parametrize("multimodal", [MultiModalConfig(), OWN], ids=["shared", "own"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_equations(placement, multimodal):
    generator = fresh_generator()
    residual = ResidualConfig(layer_scale=0.7, residual_scale=1.5 if placement == "post" else 1.0)
    layer = build(norm_placement=placement, multimodal=multimodal, residual=residual, cross_attention_mode="both")
    streams = dict(zip(("vision", "text"), draw(generator), strict=True))
    norms = {name: own(layer.attention_norm, name) for name in streams}
    normed = {name: x if placement == "post" else norms[name](x) for name, x in streams.items()}
    attended = dict(zip(streams, layer.attention(*normed.values()), strict=True))
    found = dict(zip(streams, layer(*streams.values()), strict=True))
    for name, x in streams.items():
        mlp = own(layer.mlp, name)
        first, second = own(layer.attention_branch, name), own(layer.mlp_branch, name)
        if placement == "parallel":
            want = x + first(attended[name]) + second(mlp(normed[name]))
        elif placement == "post":
            x = norms[name](1.5 * x + first(attended[name]))
            want = own(layer.mlp_norm, name)(1.5 * x + second(mlp(x)))
        elif placement == "sandwich":
            x = x + first(own(layer.attention_post_norm, name)(attended[name]))
            want = x + second(own(layer.mlp_post_norm, name)(mlp(own(layer.mlp_norm, name)(x))))
        else:
            x = x + first(attended[name])
            want = x + second(mlp(own(layer.mlp_norm, name)(x)))
        torch.testing.assert_close(found[name], want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_shared_parts_are_a_transformer_layer_over_both(placement):
    """A causal layer over [vision | text] in which the image's tokens see each other, as Gemma 3 has it."""
    generator = fresh_generator()
    rotary = RotaryConfig(base=100.0)
    layer = build(multimodal=MultiModalConfig(vision_rotary=rotary, text_rotary=rotary), norm_placement=placement)
    plain = build(TransformerLayer, (), rotary=rotary, norm_placement=placement)
    plain.load_state_dict({plain_name(key): t for key, t in layer.state_dict().items()})
    vision, text = draw(generator)
    images = torch.tensor([[0] * 9 + [-1] * 17])
    want = plain(torch.cat([vision, text], 1), overlays=Overlays(image_ids=images)).split([9, 17], 1)
    for got, other in zip(layer(vision, text), want, strict=True):
        torch.testing.assert_close(got, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_without_vision_it_is_a_transformer_layer(placement):
    generator = fresh_generator()
    rotary = RotaryConfig(base=100.0)
    options = {"norm_placement": placement, "layernorm_type": "layernorm", "bias": True, "qk_norm": "before_rotary"}
    layer = build(multimodal=MultiModalConfig(text_rotary=rotary), **options)
    plain = build(TransformerLayer, (), rotary=rotary, **options)
    plain.load_state_dict({plain_name(key): t for key, t in layer.state_dict().items()})
    text = draw(generator)[1]
    vision, found = layer(None, text)
    assert vision.shape == (2, 0, 32)
    torch.testing.assert_close(found, plain(text), atol=2e-5, rtol=2e-5)
    grads = torch.autograd.grad(found.square().sum(), list(layer.parameters()))
    own_grads = dict(zip((plain_name(name) for name, _ in layer.named_parameters()), grads, strict=True))
    names, parameters = zip(*plain.named_parameters(), strict=True)
    for name, want in zip(names, torch.autograd.grad(plain(text).square().sum(), parameters), strict=True):
        torch.testing.assert_close(own_grads[name], want, atol=1e-3, rtol=1e-3)


def test_own_parts_learn_from_their_own_stream():
    generator = fresh_generator()
    layer = build(multimodal=OWN)
    vision, text = layer(*draw(generator))
    names, parameters = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad(vision.square().sum(), parameters, allow_unused=True, retain_graph=True)
    for name, grad in zip(names, grads, strict=True):
        assert ("vision" in name) == (grad is not None and bool(grad.any())), name
    assert set(layer.state_dict()) == set(names)
    # through the keys and values that text reads, its loss reaches vision's projections
    grads = dict(zip(names, torch.autograd.grad(text.square().sum(), parameters, allow_unused=True), strict=True))
    assert grads["attention.projections.vision.qkv.qkv_proj.weight"].any()
    assert grads["mlp.vision.down_proj.weight"] is None or not grads["mlp.vision.down_proj.weight"].any()


@pytest.mark.parametrize("mode", ["text_see_vision", "both"])
def test_ragged_rows_are_rows_by_themselves(mode):
    generator = fresh_generator()
    layer = build(multimodal=MultiModalConfig(text_rotary=RotaryConfig()), cross_attention_mode=mode)
    vision, text = draw(generator, 3)
    lengths = {"vision_lengths": [9, 0, 5], "text_lengths": [6, 17, 0], "image_lengths": [[4, 5], [], [5]]}
    found = layer(vision, text, **lengths)
    for row, (own_length, text_length) in enumerate(zip([9, 0, 5], [6, 17, 0], strict=True)):
        alone = layer(
            vision[row : row + 1, :own_length],
            text[row : row + 1, :text_length],
            image_lengths=[lengths["image_lengths"][row]],
        )
        torch.testing.assert_close(found[0][row, :own_length], alone[0][0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(found[1][row, :text_length], alone[1][0], atol=2e-5, rtol=2e-5)


def test_layers_over_a_cache():
    generator = fresh_generator()
    options = {"multimodal": MultiModalConfig(text_rotary=RotaryConfig(base=50.0)), "mlp_type": "gelu"}
    layers = [build(layer_idx=index, **options) for index in range(3)]
    vision, text = draw(generator)
    cache = KVCacheManager(64, 4, 3, 4, 8, torch.float32, num_kv_heads=2, num_pages=40)
    pieces, whole = [], (vision, text)
    for layer in layers:
        whole = layer(*whole)
    for part in (slice(0, 8), slice(8, 9), slice(9, 14), slice(14, 17)):
        streams = (vision if part.start == 0 else None, text[:, part])
        for layer in layers:
            streams = layer(*streams, kv_cache=cache)
        assert not streams[1].requires_grad
        pieces.append(streams)
    torch.testing.assert_close(pieces[0][0], whole[0], atol=5e-5, rtol=5e-5)
    torch.testing.assert_close(torch.cat([piece[1] for piece in pieces], 1), whole[1], atol=5e-5, rtol=5e-5)


def test_compiles_without_a_break():
    layer = build(multimodal=MultiModalConfig("per_modality", text_rotary=RotaryConfig()))
    streams = draw(torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(*streams)
    for got, want in zip(found, layer(*streams), strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_bfloat16_and_empty_streams():
    layer = build().bfloat16()
    vision, text = (x.bfloat16() for x in draw(torch.Generator().manual_seed(0)))
    found = layer(vision, text)
    wide = build()(vision.float(), text.float())
    for got, want in zip(found, wide, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), want, atol=0.1, rtol=0.05)
    assert layer(vision, None)[1].shape == (2, 0, 32)
    assert layer(vision[:0], text[:0])[1].shape == (0, 17, 32)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"norm_placement": "before"}, ValueError, "norm_placement is 'before'"),
        ({"attention": MLPConfig()}, TypeError, "attention is MLPConfig"),
        ({"attention": AttentionConfig(alibi=True)}, ValueError, "config.alibi is True"),
        ({"residual": ResidualConfig(residual_scale=2.0)}, ValueError, "residual_scale is 2.0"),
        ({"mlp_type": "relu7"}, ValueError, "mlp_type is 'relu7'"),
        ({"bias": 1}, TypeError, "bias is 1"),
    ],
)
def test_refusals(options, error, words):
    with pytest.raises(error, match=words):
        build(**options)
    with pytest.raises(ValueError, match="num_heads is 3; it must divide hidden_size 32"):
        MultiModalTransformerLayer(4, 4, 32, 3)
    with pytest.raises(ValueError, match=r"text has shape \(17, 32\)"):
        build()(None, torch.zeros(17, 32))
