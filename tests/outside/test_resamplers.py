"""Resamplers and gated cross attention against transformers' own, with the same weights: outputs and gradients."""

import types

import pytest
import torch
import transformers as tf
from transformers.models.blip_2.modeling_blip_2 import Blip2QFormerModel
from transformers.models.idefics.modeling_idefics import IdeficsGatedCrossAttentionLayer
from transformers.models.idefics.perceiver import IdeficsPerceiverResampler
from transformers.models.idefics2.configuration_idefics2 import Idefics2PerceiverConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2PerceiverResampler
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector
from transformers.models.internvl.modeling_internvl import InternVLModel, InternVLMultiModalProjector
from transformers.models.mllama.modeling_mllama import MllamaCrossAttentionDecoderLayer

from atb_modules.multimodal.gated_cross_attention import GateConfig, GatedCrossAttention, image_reach
from atb_modules.multimodal.placeholders import Span
from atb_modules.multimodal.projectors import (
    CAbstractor,
    PerceiverResampler,
    PixelShuffleProjector,
    QFormer,
    pixel_shuffle,
)
from atb_modules.norm import NormConfig


def draw(module, std=0.3):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)
    return module.eval()


def copy(ours, theirs, names):
    """Loads their weights into ours, whose state dict has ``names`` of theirs; every weight of theirs must be taken."""
    weights = dict(theirs.named_parameters())
    state = {mine: weights.pop(name).detach().clone() for mine, name in names.items()}
    assert not weights, sorted(weights)
    ours.load_state_dict(state)
    return ours.eval()


def compare(ours, theirs, *inputs, atol=1e-5):
    found, expected = ours(*inputs), theirs(*inputs)
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)
    weight = torch.randn_like(expected)
    leaves = [x for x in inputs if x.requires_grad]
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def renamed(module, *pairs):
    """Names of our state dict with parts of them in the words of theirs."""
    names = {}
    for mine in module.state_dict():
        name = mine
        for ours, theirs in pairs:
            name = name.replace(ours, theirs)
        names[mine] = name
    return names


def test_pixel_shuffle_of_idefics_3_and_internvl():
    x = torch.randn(2, 36, 10, requires_grad=True)
    config = types.SimpleNamespace(
        scale_factor=3,
        vision_config=types.SimpleNamespace(hidden_size=10),
        text_config=types.SimpleNamespace(hidden_size=24),
    )
    theirs = draw(Idefics3Connector(config))
    ours = PixelShuffleProjector(10, 24, 3, depth=1, bias=False)
    compare(copy(ours, theirs, {"mlp.layers.0.weight": "modality_projection.proj.weight"}), theirs, x)
    config = types.SimpleNamespace(
        downsample_ratio=0.5,
        projector_hidden_act="gelu",
        vision_config=types.SimpleNamespace(hidden_size=10),
        text_config=types.SimpleNamespace(hidden_size=24),
    )
    projector = draw(InternVLMultiModalProjector(config))

    def internvl(x):
        shuffled = InternVLModel.pixel_shuffle(None, x.unflatten(1, (6, 6)), 0.5)
        return projector(shuffled.flatten(1, 2))

    ours = PixelShuffleProjector(10, 24, 2, norm=True)
    names = renamed(ours, ("norm.", "layer_norm."), ("mlp.layers.0", "linear_1"), ("mlp.layers.1", "linear_2"))
    compare(copy(ours, projector, names), internvl, x)


def test_pixel_shuffle_keeps_what_is_where():
    grid = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij"), -1)
    out = pixel_shuffle(grid, 2)
    assert out.shape == (2, 3, 8)
    assert out[1, 2].tolist() == [2, 4, 2, 5, 3, 4, 3, 5]
    with pytest.raises(ValueError, match=r"x has shape \(4, 6, 2\); allowed: .* multiples of factor 4"):
        pixel_shuffle(grid, 4)
    with pytest.raises(ValueError, match="x has 10 patches, no square"):
        PixelShuffleProjector(2, 3)(torch.zeros(1, 10, 2))
    assert PixelShuffleProjector(2, 3)(torch.zeros(0, 8, 2), (2, 4)).shape == (0, 2, 3)


def test_perceiver_of_idefics_2():
    config = Idefics2PerceiverConfig(
        hidden_size=32,
        resampler_n_latents=5,
        resampler_depth=2,
        resampler_n_heads=4,
        resampler_head_dim=8,
        num_key_value_heads=2,
    )
    config._attn_implementation = "eager"
    theirs = draw(Idefics2PerceiverResampler(config))
    ours = PerceiverResampler(
        32, 5, 2, num_heads=4, head_dim=8, num_kv_heads=2, eps=config.rms_norm_eps, mlp_type="swiglu"
    )
    pairs = (
        ("blocks", "layers"),
        ("latents_norm", "input_latents_norm"),
        ("context_norm", "input_context_norm"),
        ("mlp_norm", "post_attention_layernorm"),
        ("attention.qkv", "self_attn"),
        ("attention.o_proj", "self_attn.o_proj"),
    )
    weights = dict(theirs.named_parameters())
    state = {}
    for mine in ours.state_dict():
        name = mine
        for a, b in pairs:
            name = name.replace(a, b)
        if "gate_up_proj" in name:
            gate, up = (weights.pop(name.replace("gate_up_proj", part)) for part in ("gate_proj", "up_proj"))
            state[mine] = torch.cat([gate, up]).detach()
        else:
            state[mine] = weights.pop(name).detach()
    assert not weights
    ours.load_state_dict(state)
    x = torch.randn(3, 11, 32, requires_grad=True)
    mask = torch.ones(3, 11, dtype=torch.int64)
    mask[1, 7:] = 0
    compare(lambda x: ours(x, mask), lambda x: theirs(x, mask).view(3, 5, 32), x)
    torch.testing.assert_close(ours(x[1:2, :7]), ours(x, mask)[1:2], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_perceiver_of_flamingo(qk_norm):
    config = tf.IdeficsConfig(vision_config={"embed_dim": 32}, perceiver_config={"qk_layer_norms_perceiver": qk_norm})
    theirs = draw(IdeficsPerceiverResampler(config, 32, 2, 4, 8, 5))
    ours = PerceiverResampler(
        32,
        5,
        2,
        num_heads=4,
        head_dim=8,
        layernorm_type="layernorm",
        mlp_type="relu",
        qk_norm="layernorm" if qk_norm else None,
        eps=1e-5,
    )
    pairs = (
        ("latents_norm", "0.latents_layer_norm"),
        ("context_norm", "0.context_layer_norm"),
        ("attention.qkv.", "0."),
        ("attention.o_proj", "0.output_proj"),
        ("attention.q_norm", "0.q_layer_norm"),
        ("attention.k_norm", "0.k_layer_norm"),
        ("mlp_norm", "1.ln"),
        ("mlp.up_proj", "1.fc"),
        ("mlp.down_proj", "1.c_proj"),
    )
    names = renamed(ours, *pairs)
    names |= {name: name.replace("norm.", "layer_norm.") for name in ("norm.weight", "norm.bias")}
    compare(copy(ours, theirs, names), theirs, torch.randn(2, 9, 32, requires_grad=True))


@pytest.mark.parametrize("width", [32, 20])
def test_q_former_of_blip_2(width):
    config = tf.Blip2QFormerConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        encoder_hidden_size=width,
        cross_attention_frequency=2,
        use_qformer_text_input=False,
        attn_implementation="eager",
    )
    inner = draw(Blip2QFormerModel(config))
    queries = torch.nn.Parameter(torch.randn(5, 32))

    def theirs(x):
        more = {"encoder_attention_mask": mask}
        return inner(query_embeds=queries.expand(x.shape[0], -1, -1), encoder_hidden_states=x, **more).last_hidden_state

    ours = QFormer(32, 5, 3, 4, 48, in_features=width)
    weights, state = dict(inner.named_parameters()), {"queries": queries.detach()}
    pairs = (
        ("norm.", "layernorm."),
        ("layers.", "encoder.layer."),
        ("cross_attention.qkv.q_proj", "crossattention.attention.query"),
        ("cross_attention.qkv.k_proj", "crossattention.attention.key"),
        ("cross_attention.qkv.v_proj", "crossattention.attention.value"),
        ("cross_attention.o_proj", "crossattention.output.dense"),
        ("cross_layernorm", "crossattention.output.LayerNorm"),
        ("attention_layernorm", "attention.output.LayerNorm"),
        ("mlp_layernorm", "output_query.LayerNorm"),
        ("mlp.up_proj", "intermediate_query.dense"),
        ("mlp.down_proj", "output_query.dense"),
        (".attention.o_proj", ".attention.output.dense"),
    )
    for mine in ours.state_dict():
        if mine == "queries":
            continue
        name = mine
        for a, b in pairs:
            name = name.replace(a, b)
        if "qkv_proj" in name:
            parts = [
                weights.pop(name.replace("qkv.qkv_proj", f"attention.{part}")) for part in ("query", "key", "value")
            ]
            state[mine] = torch.cat(parts).detach()
        else:
            state[mine] = weights.pop(name).detach()
    assert not weights, sorted(weights)
    ours.load_state_dict(state)
    ours.eval()
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    compare(lambda x: ours(x, mask), theirs, torch.randn(2, 7, width, requires_grad=True))


def test_c_abstractor_is_its_parts_one_after_the_other():
    torch.manual_seed(0)
    ours = CAbstractor(16, 24, 9, hidden_features=32, depth=2, num_patches=36).eval()
    with torch.no_grad():
        ours.positions.normal_()
    x = torch.randn(2, 36, 16, requires_grad=True)
    image = (x + ours.positions).transpose(1, 2).reshape(2, 16, 6, 6)
    pooled = torch.nn.functional.adaptive_avg_pool2d(ours.before(image), 3)
    tokens = ours.after(pooled).reshape(2, 32, 9).transpose(1, 2)
    first, second = ours.mlp.layers
    expected = second(torch.nn.functional.silu(first(tokens)))
    torch.testing.assert_close(ours(x), expected, atol=1e-6, rtol=1e-5)
    ours(x).sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())
    wide = CAbstractor(16, 24, 4, depth=1).double()
    assert wide(torch.randn(1, 3 * 5, 16, dtype=torch.float64), (3, 5)).shape == (1, 4, 24)
    with pytest.raises(ValueError, match="num_tokens is 10; allowed: a square number"):
        CAbstractor(16, 24, 10)


def gated(theirs_kind):
    torch.manual_seed(1)
    if theirs_kind == "mllama":
        config = tf.MllamaConfig(
            text_config={
                "hidden_size": 32,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "cross_attention_layers": [0],
            }
        ).text_config
        config._attn_implementation = "eager"
        theirs = draw(MllamaCrossAttentionDecoderLayer(config, 0))
        gate = GateConfig(mlp_needs_image=True)
        eps = config.rms_norm_eps
        ours = GatedCrossAttention(
            32, 4, None, 48, num_kv_heads=2, qk_norm="rmsnorm", gate=gate, norm=NormConfig(eps=eps)
        )
        gates = ("cross_attn_attn_gate", "cross_attn_mlp_gate")
    else:
        config = tf.IdeficsConfig(
            hidden_size=32,
            num_attention_heads=4,
            intermediate_size=48,
            qk_layer_norms=False,
            vision_config={"embed_dim": 20},
            alpha_type="vector",
        )
        config._attn_implementation = "eager"
        theirs = draw(IdeficsGatedCrossAttentionLayer(config))
        ours = GatedCrossAttention(
            32, 4, None, 48, kv_hidden_size=20, gate=GateConfig(vector=True), norm=NormConfig(eps=config.rms_norm_eps)
        )
        gates = ("alpha_cross_attn", "alpha_dense")
    pairs = (
        ("attention.qkv", "cross_attn"),
        ("attention.", "cross_attn."),
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        ("attention_gate", gates[0]),
        ("mlp_gate", gates[1]),
    )
    weights, state = dict(theirs.named_parameters()), {}
    for mine, have in ours.state_dict().items():
        name = mine
        for a, b in pairs:
            name = name.replace(a, b)
        if "gate_up_proj" in name:
            state[mine] = torch.cat(
                [weights.pop(name.replace("gate_up_proj", p)) for p in ("gate_proj", "up_proj")]
            ).detach()
        else:
            state[mine] = weights.pop(name).detach().reshape(have.shape)
    assert not weights
    ours.load_state_dict(state)
    return ours.eval(), theirs


SPANS = [Span(0, 1, 1, 0), Span(0, 4, 1, 1), Span(1, 2, 1, 2)]
DRAWN = {
    "immediate_previous": [[[], [0], [0], [0], [1], [1]], [[], [], [0], [0], [0], [0]]],
    "all_previous": [[[], [0], [0], [0], [0, 1], [0, 1]], [[], [], [0], [0], [0], [0]]],
}


@pytest.mark.parametrize("reach", DRAWN)
def test_reach_is_what_is_drawn(reach):
    found = image_reach(SPANS, 2, 6, reach)
    assert [[row.nonzero().flatten().tolist() for row in sample] for sample in found] == DRAWN[reach]


@pytest.mark.parametrize("kind", ["mllama", "flamingo"])
@pytest.mark.parametrize("reach", DRAWN)
def test_gated_cross_attention(kind, reach):
    ours, theirs = gated(kind)
    tokens, width = 3, 32 if kind == "mllama" else 20
    sees = image_reach(SPANS, 2, 6, reach)
    mask = sees.repeat_interleave(tokens, 2)
    reads = sees.any(-1)
    additive = torch.zeros(2, 1, 6, 2 * tokens).masked_fill(~mask[:, None], torch.finfo(torch.float32).min)
    x = torch.randn(2, 6, 32, requires_grad=True)
    images = torch.randn(2, 2 * tokens, width, requires_grad=True)

    def run(x, images):
        if kind == "mllama":
            row = reads[:, None, :, None].float()
            return theirs(x, images, additive * row, None, row)
        return theirs(x, image_hidden_states=images, image_attention_mask=additive, cross_attention_gate=reads.long())

    found, expected = ours(x, images, sees), run(x, images)
    # mllama lets a token without an image read all of them; see the next test for what is right there
    keep = reads if kind == "mllama" else torch.ones_like(reads)
    torch.testing.assert_close(found[keep], expected[keep], atol=1e-5, rtol=1e-4)
    weight = torch.randn_like(found) * keep[..., None]
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), (x, images)),
        torch.autograd.grad((expected * weight).sum(), (x, images)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    pair = ours.project_images(images)
    torch.testing.assert_close(ours(x, pair, sees), found)
    torch.testing.assert_close(ours(x[:, 3:], pair, sees[:, 3:]), found[:, 3:], atol=1e-5, rtol=1e-4)


def test_a_token_without_an_image_gets_exactly_nothing():
    ours, _ = gated("mllama")
    x, images = torch.randn(2, 6, 32), torch.randn(2, 6, 32)
    sees = image_reach(SPANS, 2, 6)
    out = ours(x, images, sees)
    nothing = ~sees.any(-1)
    assert nothing.any() and torch.equal(out[nothing], x[nothing])
    none = ours(x, torch.zeros(2, 0, 32), torch.zeros(2, 6, 0, dtype=torch.bool))
    assert torch.equal(none, x)
    assert torch.equal(ours(x, torch.zeros(2, 0, 32)), x)
    fresh = GatedCrossAttention(32, 4)
    assert torch.equal(fresh(x, images), x)
    with pytest.raises(ValueError, match="reach has 4 images; images has 6 tokens"):
        ours(x, images, torch.ones(2, 6, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"reach is torch.bool \(2, 5, 2\)"):
        ours(x, images, torch.ones(2, 5, 2, dtype=torch.bool))
