"""The registry: words and members, overrides, refusals, the log, and what compiles."""

from __future__ import annotations

import logging

import pytest
import torch

import atb_modules as atb
from atb_modules import ops
from atb_modules.kernels import registry
from atb_modules.strategies import OP_FAMILIES, AttentionStrategy, attention_strategy_of


def qkv(dtype=torch.float32):
    return tuple(torch.randn(1, 2, 5, 8, dtype=dtype) for _ in range(3))


def test_every_op_has_a_reference_or_a_long_road():
    for op in OP_FAMILIES:
        words = [kernel.strategy.value for kernel in registry.kernels(op)]
        assert "reference" in words or "modules" in words, op


def test_strings_and_members_are_interchangeable():
    for word in (AttentionStrategy.EAGER, "eager"):
        assert atb.explain("attention", *qkv(), strategy=word).chosen == "eager"
    assert attention_strategy_of("flash") is AttentionStrategy.AUTO


def test_unknown_words_are_refused_with_the_allowed_ones():
    with pytest.raises(
        ValueError, match=r"strategy is 'fast'; allowed: 'auto', 'reference', 'eager', 'sdpa', 'blocked', 'flex', 'cpu'"
    ):
        ops.attention(*qkv(), strategy="fast")
    with pytest.raises(ValueError, match="attention_type is 'flashy'; allowed: 'flash'"):
        attention_strategy_of("flashy")
    with pytest.raises(TypeError, match="use_strategy got 'attn'"), atb.use_strategy(attn="eager"):
        pass
    with pytest.raises(ValueError, match="norm is 'sdpa'"), atb.use_strategy(norm="sdpa"):
        pass


def test_an_explicit_strategy_that_cannot_says_why():
    with pytest.raises(ValueError, match="'sdpa', which cannot serve this attention call: .*softcap.*"):
        ops.attention(*qkv(), atb.AttentionSpec(softcap=3.0), strategy="sdpa")


def test_use_strategy_overrides_and_is_undone():
    with atb.use_strategy(attention="eager"):
        assert atb.explain("attention", *qkv(), strategy="sdpa").chosen == "eager"
        with atb.use_strategy(attention="reference"):
            assert atb.explain("attention", *qkv()).chosen == "reference"
        assert atb.explain("attention", *qkv()).chosen == "eager"
    assert atb.explain("attention", *qkv(), strategy="sdpa").chosen == "sdpa"


def test_auto_takes_the_cheapest_of_those_that_can():
    table = atb.explain("attention", *qkv(), atb.AttentionSpec(softcap=3.0), return_lse=True)
    possible = [row for row in table.rows if not row.reasons]
    assert table.chosen == min(possible, key=lambda row: row.predicted_seconds).strategy
    assert "sdpa" in str(table) and "softcap" in str(table)


def test_a_choice_is_logged_once(caplog):
    spec = atb.AttentionSpec(scale=0.123456)
    with caplog.at_level(logging.INFO, logger="atb_modules.kernels"):
        for _ in range(3):
            ops.attention(*qkv(), spec)
    lines = [record.message for record in caplog.records if "attention ->" in record.message]
    assert len(lines) == 1


def test_explain_of_a_module_tells_every_op():
    layer = atb.TransformerLayer(32, 2, mlp_type="swiglu")
    chosen = atb.explain(layer, torch.randn(1, 4, 32)).chosen()
    assert set(chosen) == {"rms_norm", "linear", "attention", "add_rms_norm", "gated_activation"}


def test_registering_twice_or_for_an_unknown_op_is_refused():
    kernel = registry.kernels("attention")[0]
    with pytest.raises(ValueError, match="registered already"):
        registry.register(kernel)
    with pytest.raises(ValueError, match="op is 'nothing'"):
        registry.kernels("nothing")


def test_kernel_of_another_device_gives_the_device_as_reason():
    import dataclasses

    kernel = dataclasses.replace(registry.kernels("rms_norm")[0], device_types=("npu",))
    x = torch.randn(2, 4)
    traits = atb.explain("rms_norm", x).traits
    assert kernel.reasons_against(None, traits) == ("runs on npu, the tensors are on cpu",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_a_whole_layer_compiles_without_a_graph_break(mode, dtype):
    torch._dynamo.reset()
    layer = atb.TransformerLayer(
        32, 4, num_kv_heads=2, rotary=atb.RotaryConfig(), qk_norm="before_rotary", mode=mode, dtype=dtype
    )
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=count)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for length in (7, 12, 40):
        x = torch.randn(2, length, 32, dtype=dtype)
        torch.testing.assert_close(compiled(x), layer(x), atol=tolerance, rtol=tolerance)
    assert len(graphs) <= 2


def test_a_choice_is_made_once_and_again_when_a_kernel_joins(monkeypatch):
    asked = []
    choose = registry._choose
    monkeypatch.setattr(registry, "_choose", lambda *call: asked.append(call) or choose(*call))
    monkeypatch.setattr(registry, "_CHOICES", {})
    spec = atb.AttentionSpec(softcap=7.0)
    for _ in range(3):
        ops.attention(*qkv(), spec)
    assert len(asked) == 1
    ops.attention(*qkv(), spec, strategy="eager")
    ops.attention(*qkv(torch.bfloat16), spec)
    with atb.use_strategy(attention="eager"):
        ops.attention(*qkv(), spec)
    assert len(asked) == 3
    kernels = registry._KERNELS["attention"]
    monkeypatch.setitem(registry._KERNELS, "attention", [k for k in kernels if k.strategy.value != "flex"])
    registry.register(next(k for k in kernels if k.strategy.value == "flex"))
    ops.attention(*qkv(), spec)
    assert len(asked) == 4
