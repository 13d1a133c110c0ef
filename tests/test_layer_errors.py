"""What a TransformerLayer refuses, and what it says of itself."""

from __future__ import annotations

import pytest
import torch

from atb_modules import (
    AttentionConfig,
    KVCacheManager,
    MLPConfig,
    NormConfig,
    ResidualConfig,
    RotaryConfig,
    TransformerLayer,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_placement": "before"}, "norm_placement is 'before'; allowed: 'pre', 'post', 'sandwich', 'parallel'"),
        ({"layernorm_type": "batchnorm"}, "layernorm_type is 'batchnorm'"),
        ({"attention_type": "flash_sparse"}, "attention_type is 'flash_sparse'"),
        ({"mlp_type": "moe"}, "mlp_type is 'moe'"),
        ({"mode": "eval"}, "mode is 'eval'; allowed: 'train', 'inference'"),
        ({"layer_type": "both"}, "layer_type is 'both'"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"layer_type": "cross_decoder", "norm_placement": "parallel"}, "norm_placement is 'parallel'"),
        ({"qk_norm": "before_rotary", "attention": AttentionConfig(qk_norm="after_rotary")}, "give one"),
        ({"layernorm_type": "layernorm", "norm": NormConfig(weight_offset=1.0)}, "weight_offset is 1.0"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerLayer(32, 4, **options)


@pytest.mark.parametrize("name", ["checkpoint_strategy", "sequence_parallel", "dropout"])
def test_names_of_later_features_do_not_exist(name):
    with pytest.raises(TypeError, match=name):
        TransformerLayer(32, 4, **{name: None})


def test_bad_inputs():
    layer = TransformerLayer(32, 4)
    with pytest.raises(ValueError, match="hidden_states has 16 channels; this layer takes 32"):
        layer(torch.randn(2, 3, 16))
    with pytest.raises(ValueError, match="which takes no encoder_hidden_states"):
        layer(torch.randn(2, 3, 32), encoder_hidden_states=torch.randn(2, 3, 32))
    with pytest.raises(ValueError, match="cache_step"):
        layer(torch.randn(3, 32), cache=KVCacheManager(16, 4, 1, 4, 8, torch.float32))


def test_separate_projections_of_the_wrong_sizes_are_refused():
    layer = TransformerLayer(64, 4, num_kv_heads=2)
    state = layer.state_dict()
    fused = state.pop("attention.qkv.qkv_proj.weight")
    for name, part in zip("qkv", fused.split([32, 64, 32]), strict=True):
        state[f"attention.qkv.{name}_proj.weight"] = part
    with pytest.raises(ValueError, match=r"\(32, 64, 32\) output channels; qkv_proj takes \(64, 32, 32\)"):
        layer.load_state_dict(state)


def test_repr_tells_what_was_built():
    text = repr(
        TransformerLayer(32, 4, num_kv_heads=2, rotary=RotaryConfig(), attention=AttentionConfig(window=(7, 0)))
    )
    for part in ("num_kv_heads=2", "rotary_dim=8", "window=(7, 0)", "mlp_type=swiglu", "norm=pre"):
        assert part in text


CONFIGS = {
    "attention": AttentionConfig,
    "norm": NormConfig,
    "mlp": MLPConfig,
    "residual": ResidualConfig,
    "rotary": RotaryConfig,
    "kv_cache_manager": KVCacheManager,
}


@pytest.mark.parametrize("value", [{"eps": 1e-5}, "rmsnorm", 1e-5, "class"], ids=repr)
@pytest.mark.parametrize("name", CONFIGS)
def test_options_of_another_kind(name, value):
    kind = CONFIGS[name]
    value = kind if value == "class" else value
    came = type(value).__name__
    with pytest.raises(TypeError, match=rf"^{name} is .*\({came}\); allowed: {kind.__name__} or None$"):
        TransformerLayer(32, 4, **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": "yes"}, r"bias is 'yes' \(str\); allowed: True, False"),
        ({"bias": None}, "bias is None"),
        ({"layer_idx": "3"}, r"layer_idx is '3' \(str\)"),
        ({"layer_idx": 1.0}, r"layer_idx is 1.0 \(float\)"),
        ({"dtype": "float32"}, r"dtype is 'float32' \(str\)"),
    ],
)
def test_plain_options_of_another_kind(options, message):
    with pytest.raises(TypeError, match=message):
        TransformerLayer(32, 4, **options)


def test_values_out_of_range():
    with pytest.raises(ValueError, match="layer_idx is -1"):
        TransformerLayer(32, 4, layer_idx=-1)
    with pytest.raises(ValueError, match="dtype is torch.int32"):
        TransformerLayer(32, 4, dtype=torch.int32)


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda layer, x: layer([1.0]), TypeError, r"hidden_states is list; allowed: a tensor \(batch, seq,"),
        (lambda layer, x: layer(x, use_cache="yes"), TypeError, r"use_cache is 'yes' \(str\); allowed: True, False"),
        (lambda layer, x: layer(x, cache={}), TypeError, r"cache is {} \(dict\); allowed: KVCacheManager or None"),
        (
            lambda layer, x: layer(x, cache=KVCacheManager),
            TypeError,
            r"cache is .*KVCacheManager.* \(ABCMeta\); allowed",
        ),
        (lambda layer, x: layer(x[0, 0]), ValueError, r"hidden_states has shape \(32,\); allowed: \(batch, seq, 32\)"),
        (lambda layer, x: layer(x[None]), ValueError, r"hidden_states has shape \(1, 2, 3, 32\); allowed"),
    ],
)
def test_calls_with_arguments_of_another_kind(call, error, message, mode):
    with pytest.raises(error, match=message):
        call(TransformerLayer(32, 4, mode=mode), torch.randn(2, 3, 32))


@pytest.mark.parametrize("shape", [(32,), (), (3, 32), (1, 2, 3, 32)], ids=str)
def test_shapes_that_a_cached_call_refuses(shape):
    layer = TransformerLayer(32, 4, mode="inference")
    with pytest.raises(ValueError, match="hidden_states "):
        layer(torch.randn(shape), use_cache=True)
    layer(torch.randn(2, 3, 32), use_cache=True)
    assert layer.kv_cache_manager.lengths == (3, 3)


@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
def test_layers_without_another_sequence_take_no_mask_of_one(layer_type):
    layer = TransformerLayer(32, 4, layer_type=layer_type)
    with pytest.raises(ValueError, match=f"layer_type is '{layer_type}', which takes no encoder_attention_mask"):
        layer(torch.randn(2, 3, 32), encoder_attention_mask=torch.ones(2, 3))


OTHER = torch.randn(2, 5, 32)


@pytest.mark.parametrize(
    ("states", "mask", "error", "message"),
    [
        ([1, 2, 3], None, TypeError, "encoder_hidden_states is list; allowed: a tensor"),
        (OTHER[0], None, ValueError, r"encoder_hidden_states has shape \(5, 32\); allowed: \(2, seq, 32\)"),
        (OTHER[:1], None, ValueError, r"encoder_hidden_states has shape \(1, 5, 32\)"),
        (OTHER[..., :7], None, ValueError, r"encoder_hidden_states has shape \(2, 5, 7\); allowed: \(2, seq, 32\)"),
        (OTHER.long(), None, TypeError, "encoder_hidden_states is torch.int64; allowed: a floating dtype"),
        (OTHER.to("meta"), None, ValueError, "encoder_hidden_states is on meta; hidden_states is on cpu"),
        ((OTHER, OTHER), None, ValueError, "encoder_hidden_states' keys have shape"),
        (
            (OTHER.view(2, 5, 4, 8), OTHER.view(2, 5, 4, 8)[:, :4]),
            None,
            ValueError,
            "encoder_hidden_states' keys have 5 tokens and values 4",
        ),
        (OTHER, [[1] * 5] * 2, TypeError, "encoder_attention_mask is list; allowed: a tensor or None"),
        (OTHER, torch.ones(2, 4), ValueError, r"encoder_attention_mask has shape \(2, 4\); allowed: .*\(2, 5\)"),
        (OTHER, torch.ones(5), ValueError, r"encoder_attention_mask has shape \(5,\)"),
        (OTHER, torch.ones(2, 5), TypeError, "encoder_attention_mask is torch.float32 with 2 axes"),
        (OTHER, torch.ones(2, 3, 4), ValueError, r"encoder_attention_mask has shape \(2, 3, 4\)"),
        (OTHER, torch.ones(2, 3, 3, 5), ValueError, r"encoder_attention_mask has shape \(2, 3, 3, 5\)"),
        (OTHER, torch.ones(2, 5).bool().to("meta"), ValueError, "encoder_attention_mask is on meta"),
    ],
)
def test_errors_of_the_other_sequence_name_the_argument_of_the_layer(states, mask, error, message):
    layer = TransformerLayer(32, 4, layer_type="cross_decoder", attention_type="sdpa")
    with pytest.raises(error, match=message):
        layer(torch.randn(2, 3, 32), encoder_hidden_states=states, encoder_attention_mask=mask)


@pytest.mark.parametrize("shape", [(2, 5), (1, 1, 5), (2, 3, 5), (2, 1, 1, 5), (1, 4, 3, 5)])
def test_masks_of_the_other_sequence(shape):
    layer = TransformerLayer(32, 4, layer_type="cross_decoder", attention_type="sdpa")
    mask = torch.ones(shape, dtype=torch.bool)
    mask[..., -1] = False
    x, changed = torch.randn(2, 3, 32), OTHER.clone()
    changed[:, -1] = 9.0
    out = layer(x, encoder_hidden_states=OTHER, encoder_attention_mask=mask)
    torch.testing.assert_close(layer(x, encoder_hidden_states=changed, encoder_attention_mask=mask), out)
