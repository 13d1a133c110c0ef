"""TransformerLayer: every placement and kind against a plain composition, modes, caches, copies, exports, errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import atb_modules as atb
from atb_modules import (
    AttentionConfig,
    KVCacheManager,
    MLPConfig,
    NormConfig,
    ResidualConfig,
    RotaryConfig,
    TransformerLayer,
)

PLACEMENTS = ["pre", "post", "sandwich", "parallel"]


def plain(layer, x, other=None):
    """The formulas at the top of layer.py, written out."""
    attn = lambda y: layer.attention(y)  # noqa: E731
    cross = lambda y: layer.cross_attention(y, key_value_states=other)  # noqa: E731
    if layer.placement == "parallel":
        return x + attn(layer.attention_norm(x)) + layer.mlp(layer.attention_norm(x))
    if layer.placement == "post":
        x = layer.attention_norm(x + attn(x))
        if other is not None:
            x = layer.cross_norm(x + cross(x))
        return layer.mlp_norm(x + layer.mlp(x))
    sandwich = layer.placement == "sandwich"
    y = attn(layer.attention_norm(x))
    x = x + (layer.attention_post_norm(y) if sandwich else y)
    if other is not None:
        y = cross(layer.cross_norm(x))
        x = x + (layer.cross_post_norm(y) if sandwich else y)
    y = layer.mlp(layer.mlp_norm(x))
    return x + (layer.mlp_post_norm(y) if sandwich else y)


def randomised(layer):
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return layer


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("mlp_type", ["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "silu", "relu2"])
@pytest.mark.parametrize("layernorm_type", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_layer_is_its_formula(placement, layernorm_type, mlp_type, mode):
    layer = randomised(
        TransformerLayer(
            32, 4, num_kv_heads=2, layernorm_type=layernorm_type, mlp_type=mlp_type, norm_placement=placement,
            rotary=RotaryConfig(), mode=mode,
        )
    )  # fmt: skip
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(layer(x), plain(layer, x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("placement", PLACEMENTS[:3])
def test_cross_decoder(placement):
    layer = randomised(TransformerLayer(32, 4, layer_type="cross_decoder", norm_placement=placement))
    x, other = torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    torch.testing.assert_close(layer(x, encoder_hidden_states=other), plain(layer, x, other), atol=1e-4, rtol=1e-4)
    pair = layer.cross_attention.project_keys_values(other)
    torch.testing.assert_close(layer(x, encoder_hidden_states=pair), plain(layer, x, other), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="which needs encoder_hidden_states"):
        layer(x)


@pytest.mark.parametrize("attention", [None, AttentionConfig(window=(1, 0))], ids=["plain", "window"])
def test_equals_the_decoder_layer_of_torch(attention):
    """Self attention causal, cross attention open: what hides keys by position does not reach the other sequence."""
    theirs = torch.nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, activation="gelu", batch_first=True)
    mine = TransformerLayer(
        32, 4, intermediate_size=48, layernorm_type="layernorm", mlp_type="gelu", norm_placement="post",
        layer_type="cross_decoder", bias=True, norm=NormConfig(eps=1e-5), attention=attention,
    )  # fmt: skip
    state = theirs.state_dict()
    names = {
        "attention.qkv.qkv_proj": "self_attn.in_proj_",
        "attention.o_proj": "self_attn.out_proj.",
        "cross_attention.o_proj": "multihead_attn.out_proj.",
        "mlp.up_proj": "linear1.",
        "mlp.down_proj": "linear2.",
        "attention_norm": "norm1.",
        "cross_norm": "norm2.",
        "mlp_norm": "norm3.",
    }
    ours = {f"{a}.{kind}": state[f"{b}{kind}"] for a, b in names.items() for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        for name, part in zip("qkv", state[f"multihead_attn.in_proj_{kind}"].chunk(3), strict=True):
            ours[f"cross_attention.qkv.{name}_proj.{kind}"] = part
    mine.load_state_dict(ours)
    x, other = torch.randn(2, 6, 32), torch.randn(2, 5, 32)
    hidden = ~mine.attention.spec.dense_mask(6, 6)
    torch.testing.assert_close(
        mine(x, encoder_hidden_states=other), theirs(x, other, tgt_mask=hidden), atol=1e-5, rtol=1e-5
    )


def test_equals_the_encoder_layer_of_torch():
    theirs = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, activation="gelu", batch_first=True).train()
    mine = TransformerLayer(
        32, 4, intermediate_size=48, layernorm_type="layernorm", mlp_type="gelu", norm_placement="post",
        layer_type="encoder", bias=True, norm=NormConfig(eps=1e-5),
    )  # fmt: skip
    names = {
        "attention.qkv.qkv_proj": "self_attn.in_proj_",
        "attention.o_proj": "self_attn.out_proj.",
        "mlp.up_proj": "linear1.",
        "mlp.down_proj": "linear2.",
        "attention_norm": "norm1.",
        "mlp_norm": "norm2.",
    }
    state = theirs.state_dict()
    mine.load_state_dict({f"{a}.{kind}": state[f"{b}{kind}"] for a, b in names.items() for kind in ("weight", "bias")})
    x = torch.randn(2, 6, 32)
    padding = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    expected = theirs(x, src_key_padding_mask=padding == 0)
    out = mine(x, padding)
    torch.testing.assert_close(out[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[1, :4], expected[1, :4], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_reach_every_parameter(placement):
    layer = TransformerLayer(
        32, 4, norm_placement=placement, rotary=RotaryConfig(), qk_norm="before_rotary", bias=True,
        residual=ResidualConfig(layer_scale=0.5),
    )  # fmt: skip
    x = torch.randn(2, 5, 32, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad is not None
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name


@pytest.mark.parametrize("strategies", [{"attention": "eager", "norm": "torch", "mlp": "torch", "rotary": "torch"}, {}])
def test_gradients_equal_those_of_the_reference(strategies):
    layer = randomised(TransformerLayer(32, 4, num_kv_heads=2, rotary=RotaryConfig(), qk_norm="before_rotary"))
    x = torch.randn(2, 9, 32)
    mask = torch.tensor([[1] * 9, [0] * 2 + [1] * 7])
    with atb.use_strategy(attention="reference", norm="reference", mlp="reference", rotary="reference"):
        wide = copy.deepcopy(layer).double()
        (wide(x.double(), mask)[:, 2:].square().sum()).backward()
    with atb.use_strategy(**strategies):
        (layer(x, mask)[:, 2:].square().sum()).backward()
    for (name, mine), truth in zip(layer.named_parameters(), wide.parameters(), strict=True):
        scale = truth.grad.abs().max()
        assert (mine.grad.double() - truth.grad).abs().max() < 1e-4 * scale, name


def test_inference_mode_manages_its_cache():
    layer = TransformerLayer(32, 4, num_kv_heads=2, rotary=RotaryConfig(), mode="inference")
    x = torch.randn(2, 12, 32)
    full = layer(x)
    pieces = []
    for start, end in ((0, 6), (6, 7), (7, 8), (8, 12)):
        out, cache = layer(x[:, start:end], use_cache=True)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, atol=1e-5, rtol=1e-5)
    assert cache is layer.kv_cache_manager and cache.lengths == (12, 12)
    cache.reset()
    again, _ = layer(x, use_cache=True)
    torch.testing.assert_close(again, full, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="batch"):
        layer(x[:1], use_cache=True)


def test_layers_share_one_manager():
    cache = KVCacheManager(32, 4, 3, 4, 8, torch.float32, num_pages=30)
    layers = [
        TransformerLayer(32, 4, rotary=RotaryConfig(), mode="inference", kv_cache_manager=cache) for _ in range(3)
    ]
    assert [layer.layer_idx for layer in layers] == [0, 1, 2]
    x = torch.randn(2, 9, 32)
    expected = x
    for layer in layers:
        expected = layer(expected)
    cache.begin(2)
    pieces = []
    for start, end in ((0, 5), (5, 6), (6, 9)):
        y = x[:, start:end]
        for layer in layers:
            y, returned = layer(y, use_cache=True)
        pieces.append(y)
    assert returned is cache
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-5, rtol=1e-5)
    assert copy.deepcopy(layers[2]).layer_idx == 2


def test_a_cached_call_never_differentiates_half_the_graph():
    layer = TransformerLayer(32, 4)
    cache = KVCacheManager(32, 4, 1, 4, 8, torch.float32)
    out = layer(torch.randn(1, 3, 32, requires_grad=True), cache=cache, use_cache=True)
    assert not out[0].requires_grad
    with pytest.raises(ValueError, match="use_cache is True; allowed with mode='inference'"):
        layer(torch.randn(1, 3, 32), use_cache=True)


def test_dropout_drop_path_and_layer_scale():
    torch.manual_seed(0)
    x = torch.randn(64, 3, 16)
    layer = TransformerLayer(16, 2, residual=ResidualConfig(drop_path=0.5))
    dropped = (layer(x) == x).all(dim=(1, 2)).float().mean()
    assert 0.1 < dropped < 0.4  # both branches dropped: a quarter of the samples
    layer.eval()
    torch.testing.assert_close(layer(x), plain(layer, x), atol=1e-5, rtol=1e-5)
    scaled = TransformerLayer(16, 2, residual=ResidualConfig(layer_scale=1e-6))
    assert (scaled(x) - x).abs().max() < 1e-4
    noisy = TransformerLayer(16, 2, residual=ResidualConfig(dropout=0.3), mlp=MLPConfig(dropout=0.3))
    assert not torch.equal(noisy(x), noisy(x))
    noisy.eval()
    assert torch.equal(noisy(x), noisy(x))


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_autocast(mode):
    layer = TransformerLayer(32, 4, rotary=RotaryConfig(), qk_norm="before_rotary", mode=mode)
    x = torch.randn(2, 8, 32)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        if mode == "inference":
            first, cache = layer(x[:, :5], use_cache=True)
            second, _ = layer(x[:, 5:], use_cache=True)
            torch.testing.assert_close(torch.cat([first, second], 1).float(), expected, atol=5e-2, rtol=5e-2)
    torch.testing.assert_close(out.float(), expected, atol=5e-2, rtol=5e-2)
    if mode == "train":
        out.float().square().sum().backward()
        assert all(p.grad.dtype == p.dtype for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_layers(dtype):
    layer = TransformerLayer(64, 4, num_kv_heads=2, rotary=RotaryConfig())
    x = torch.randn(2, 9, 64)
    out = copy.deepcopy(layer).to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), layer(x), atol=6e-2, rtol=6e-2)


def test_float64_and_an_empty_batch():
    layer = TransformerLayer(32, 4, rotary=RotaryConfig()).double()
    assert layer(torch.randn(2, 5, 32, dtype=torch.float64)).dtype == torch.float64
    assert TransformerLayer(32, 4, rotary=RotaryConfig())(torch.randn(0, 5, 32)).shape == (0, 5, 32)


def test_meta_construction_equals_normal_construction():
    source = TransformerLayer(32, 4, rotary=RotaryConfig(), qk_norm="after_rotary", bias=True)
    with torch.device("meta"):
        empty = TransformerLayer(32, 4, rotary=RotaryConfig(), qk_norm="after_rotary", bias=True)
    assert all(p.is_meta for p in empty.parameters())
    built = empty.to_empty(device="cpu")
    built.load_state_dict(source.state_dict())
    x = torch.randn(2, 6, 32)
    assert torch.equal(built(x), source(x))
    assert set(source.state_dict()) == {name for name, _ in source.named_parameters()}


def test_deepcopy_pickle_and_tables_made_in_inference_mode():
    layer = TransformerLayer(32, 4, rotary=RotaryConfig())
    x = torch.randn(2, 8, 32)
    fresh = copy.deepcopy(layer)
    with torch.inference_mode():
        layer(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(x)
    for length in (8, 16):
        y = torch.randn(2, length, 32)
        for _ in range(2):
            layer(y).sum().backward()
            fresh(y).sum().backward()
    for mine, theirs in zip(layer.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
    checkpointed = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(checkpointed, layer(x))


def test_export():
    layer = TransformerLayer(32, 4, num_kv_heads=2, rotary=RotaryConfig(), mode="inference")
    x = torch.randn(2, 8, 32)
    program = torch.export.export(layer, (x,), dynamic_shapes=({1: torch.export.Dim("seq", min=2, max=64)},))
    for length in (8, 19):
        y = torch.randn(2, length, 32)
        torch.testing.assert_close(program.module()(y), layer(y), atol=1e-5, rtol=1e-5)


def test_compiled_with_the_default_backend():
    layer = TransformerLayer(32, 4, num_kv_heads=2, rotary=RotaryConfig())
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True)
    x = torch.randn(2, 8, 32)
    out, expected = compiled(x), layer(x)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    out.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(compiled.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4)


def test_default_initialisation_is_the_documented_one():
    layer = TransformerLayer(256, 4, bias=True)
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        else:
            assert abs(parameter.std().item() - 0.02) < 2e-3, name
    gemma = TransformerLayer(32, 4, norm=NormConfig(weight_offset=1.0))
    assert torch.equal(gemma.attention_norm.weight, torch.zeros(32))


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


@pytest.mark.parametrize("name", ["checkpoint_strategy", "sparse_config", "sequence_parallel", "dropout"])
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


def test_repr_tells_what_was_built():
    text = repr(
        TransformerLayer(32, 4, num_kv_heads=2, rotary=RotaryConfig(), attention=AttentionConfig(window=(7, 0)))
    )
    for part in ("num_kv_heads=2", "rotary_dim=8", "window=(7, 0)", "mlp_type=swiglu", "norm=pre"):
        assert part in text


def test_feed_forward_is_swiglu_of_the_paper():
    mlp = atb.FeedForward(16, 24)
    gate, up = torch.randn(24, 16), torch.randn(24, 16)
    mlp.load_state_dict({"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": torch.ones(16, 24)})
    x = torch.randn(3, 16)
    torch.testing.assert_close(mlp(x), (F.silu(x @ gate.t()) * (x @ up.t())) @ torch.ones(24, 16))


def test_inference_overwrites_nothing_that_a_hook_may_have_kept():
    layer = TransformerLayer(32, 4, rotary=RotaryConfig(), mode="inference")
    x = torch.randn(2, 5, 32)
    before, expected = x.clone(), layer(x)
    kept = {}
    for name, module in layer.named_modules():
        if name:
            module.register_forward_hook(lambda m, a, out, name=name: kept.update({name: (out, clone(out))}))
    assert torch.equal(layer(x), expected) and torch.equal(x, before)
    for name, (out, copied) in kept.items():
        assert same(out, copied), name


def test_hooks_of_every_kind_keep_what_they_saw():
    """Pre-hooks, global hooks and cached calls: nothing that was handed out is written again."""
    for placement in PLACEMENTS:
        for order in (None, "before_rotary", "after_rotary"):
            layer = TransformerLayer(
                32, 4, rotary=RotaryConfig(), norm_placement=placement, qk_norm=order, mode="inference"
            )
            x = torch.randn(2, 5, 32)
            kept = []

            def keep(module, inputs, out=None, kept=kept):
                tensors = tuple(t for t in inputs if isinstance(t, torch.Tensor))
                kept.append((tensors, clone(tensors)))
                if out is not None and not isinstance(out[-1], KVCacheManager):
                    kept.append((out, clone(out)))

            handle = torch.nn.modules.module.register_module_forward_hook(keep)
            try:
                layer(x)
                layer(x, use_cache=True)
            finally:
                handle.remove()
            for name, module in layer.named_modules():
                if name:
                    module.register_forward_pre_hook(keep)
            layer(x)
            assert kept and all(same(seen, copied) for seen, copied in kept)


@pytest.mark.parametrize("strategy", ["auto", "torch"])
def test_forward_mode_derivatives(strategy):
    layer = TransformerLayer(32, 4, rotary=RotaryConfig())
    x, v = torch.randn(2, 1, 4, 32)
    with atb.use_strategy(norm=strategy, attention="eager" if strategy == "torch" else "auto"):
        _, tangent = torch.func.jvp(layer, (x,), (v,))
    expected = (layer.double()((x + 1e-4 * v).double()) - layer((x - 1e-4 * v).double())) / 2e-4
    torch.testing.assert_close(tangent.double(), expected, atol=1e-3, rtol=1e-3)
    gradient = torch.func.grad(lambda y: layer(y).square().sum())(x.double())
    assert gradient.abs().sum() > 0


def test_meta_tensors_run_through():
    layer = TransformerLayer(32, 4, rotary=RotaryConfig(), device="meta")
    assert layer(torch.empty(2, 5, 32, device="meta")).shape == (2, 5, 32)


def test_a_half_precision_input_with_layer_scale():
    layer = TransformerLayer(32, 4, residual=ResidualConfig(layer_scale=0.1))
    assert layer(torch.randn(1, 3, 32).bfloat16()).dtype == torch.bfloat16


def test_separate_projections_of_the_wrong_sizes_are_refused():
    layer = TransformerLayer(64, 4, num_kv_heads=2)
    state = layer.state_dict()
    fused = state.pop("attention.qkv.qkv_proj.weight")
    for name, part in zip("qkv", fused.split([32, 64, 32]), strict=True):
        state[f"attention.qkv.{name}_proj.weight"] = part
    with pytest.raises(ValueError, match=r"\(32, 64, 32\) output channels; qkv_proj takes \(64, 32, 32\)"):
        layer.load_state_dict(state)


def clone(value):
    return tuple(clone(v) for v in value) if isinstance(value, tuple) else value.clone()


def same(a, b):
    return all(map(same, a, b)) if isinstance(a, tuple) else torch.equal(a, b)
