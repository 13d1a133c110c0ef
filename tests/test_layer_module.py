"""A TransformerLayer as a module: dtypes, copies, exports, hooks, derivatives, what it starts with."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import atb_modules as atb
from atb_modules import (
    KVCacheManager,
    NormConfig,
    ResidualConfig,
    RotaryConfig,
    TransformerLayer,
)

PLACEMENTS = ["pre", "post", "sandwich", "parallel"]


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


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (3, 0)},
        {"softcap": 3.0},
        {"alibi": True},
        {"sparse": {"mode": "sliding_window", "window_size": 3, "global_tokens": 2}},
        {"sparse": {"mode": "prefix_lm", "prefix_length": 3}},
    ],
    ids=str,
)
def test_export_of_masked_attention_leaves_the_length_open(options, strict):
    layer = TransformerLayer(32, 4, attention=atb.AttentionConfig(**options)).eval()
    lengths = ({1: torch.export.Dim("seq", min=2, max=64)},)
    program = torch.export.export(layer, (torch.randn(2, 6, 32),), dynamic_shapes=lengths, strict=strict)
    x = torch.randn(2, 17, 32)
    torch.testing.assert_close(program.module()(x), layer(x), atol=1e-5, rtol=1e-5)


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
    x, v, layer = x.double(), v.double(), layer.double()
    expected = (layer(x + 1e-4 * v) - layer(x - 1e-4 * v)) / 2e-4
    torch.testing.assert_close(tangent.double(), expected, atol=1e-3, rtol=1e-3)
    gradient = torch.func.grad(lambda y: layer(y).square().sum())(x)
    assert gradient.abs().sum() > 0


def test_meta_tensors_run_through():
    layer = TransformerLayer(32, 4, rotary=RotaryConfig(), device="meta")
    assert layer(torch.empty(2, 5, 32, device="meta")).shape == (2, 5, 32)


def test_a_half_precision_input_with_layer_scale():
    layer = TransformerLayer(32, 4, residual=ResidualConfig(layer_scale=0.1))
    assert layer(torch.randn(1, 3, 32).bfloat16()).dtype == torch.bfloat16


def clone(value):
    return tuple(clone(v) for v in value) if isinstance(value, tuple) else value.clone()


def same(a, b):
    return all(map(same, a, b)) if isinstance(a, tuple) else torch.equal(a, b)
