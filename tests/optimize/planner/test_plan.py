"""The fusion planner: what it saves, what it rejects and why, and that a layer runs as planned."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules import RotaryConfig, TransformerLayer
from atb_modules.fusions import DEFAULT_FUSIONS, Fusion
from atb_modules.kernels.ascend import ops_ascendc
from atb_modules.kernels.ascend.socs import SOCS
from atb_modules.kernels.registry import record_choices
from atb_modules.optimize.planner import LayerShape, layer_steps, plan_layer, plan_steps, shape_of
from atb_modules.optimize.planner.plan import FusionPlan
from atb_modules.testing import fresh_generator

LLAMA = LayerShape(4096, 32, 8, 128, 14336, tokens=2048, kv_len=2048)
QWEN = LayerShape(3584, 28, 4, 128, 18944, tokens=16, kv_len=4096, batch=16, bias=True)


@pytest.mark.parametrize("soc", ["ascend910b1", "ascend910b4", "ascend910_93", "ascend950"])
@pytest.mark.parametrize("shape", [LLAMA, QWEN], ids=["llama prefill", "qwen decode"])
def test_a_plan_covers_the_layer_and_saves(shape, soc):
    plan = plan_layer(shape, soc)
    names = [name for group in plan.groups for name in group.steps]
    assert names == [step.name for step in layer_steps(shape, SOCS[soc])]
    assert {Fusion.ATTENTION, Fusion.GATE, Fusion.ROTARY_APPEND} <= plan.fusions
    assert plan.bytes < plan.bytes_apart
    for group in plan.groups:
        assert (group.bytes < group.bytes_apart) == (len(group.steps) > 1)
    assert all(one.reason and one.bytes_saved > 0 for one in plan.rejected)
    scores = 4 * shape.tokens * shape.num_heads * shape.kv_len
    attention = plan.fused_groups(Fusion.ATTENTION)[0]
    assert attention.bytes_apart - attention.bytes == pytest.approx(2 * scores + scores, rel=1e-9)


def test_what_would_spill_is_rejected_with_its_numbers():
    wide = dataclasses.replace(LLAMA, hidden_size=32768, num_heads=256, num_kv_heads=8)
    plan = plan_layer(wide, "ascend910b1")
    spilled = [one for one in plan.rejected if one.fusion == Fusion.ADD_NORM]
    assert spilled and "would spill: needs 345.0 KiB" in spilled[0].reason and "192.0 KiB" in spilled[0].reason
    assert Fusion.ADD_NORM not in plan.fusions


def test_a_change_of_layout_is_rejected():
    plan = plan_layer(dataclasses.replace(LLAMA, dtype=torch.float16), "ascend310p")
    reasons = {one.reason for one in plan.rejected if one.fusion == Fusion.NORM_MATMUL}
    assert reasons == {"a layout change from ND to NZ lies between them on Ascend310P3"}
    assert Fusion.ADD_NORM in plan.fusions


def test_a_workspace_that_leaves_the_cache_is_rejected():
    wide = dataclasses.replace(LLAMA, hidden_size=8192, num_heads=64, tokens=8192, kv_len=8192)
    plan = plan_layer(wide, "ascend910b4")
    assert any("does not stay in an L2 cache of 96.0 MiB" in one.reason for one in plan.rejected)


def test_vector_cores_that_reach_l1_need_no_workspace_and_no_whole_row():
    wide = dataclasses.replace(LLAMA, hidden_size=32768, num_heads=256, num_kv_heads=8, tokens=8192, kv_len=8192)
    assert Fusion.NORM_MATMUL in plan_layer(wide, "ascend950").fusions
    reasons = {one.reason for one in plan_layer(wide, "ascend910b1").rejected if one.fusion == Fusion.NORM_MATMUL}
    assert len(reasons) == 1 and "would spill" in reasons.pop()


def test_a_kernel_that_a_chip_has_not_is_rejected():
    shape = dataclasses.replace(LLAMA, dtype=torch.float16)
    norm, product = (step for step in layer_steps(shape, SOCS["ascend950"])[:2])
    plan = plan_steps([norm, product], shape, SOCS["ascend310p"])
    reasons = {one.reason for one in plan.rejected if one.fusion == Fusion.NORM_MATMUL}
    ours = "our norm and product kernel"
    apart = "is written for cube and vector cores that stand apart, not for Ascend310P3"
    assert reasons == {f"{ours} does not run on Ascend310P3; {ours} {apart}"}


def test_a_product_whose_kernel_has_no_room_for_a_row_keeps_its_norm_apart():
    wide = dataclasses.replace(LLAMA, hidden_size=16384, num_heads=128, tokens=512)
    plan = plan_layer(wide, "ascend910b1")
    assert Fusion.NORM_MATMUL not in plan.fusions
    reasons = {one.reason for one in plan.rejected if one.fusion == Fusion.NORM_MATMUL}
    assert reasons == {"a row and its norm take 196608 bytes, too many for the unified buffer of Ascend910B1"}
    assert Fusion.NORM_MATMUL in plan_layer(dataclasses.replace(wide, hidden_size=14336), "ascend910b1").fusions


@pytest.mark.parametrize(
    "fusion,reason",
    [
        (Fusion.ATTENTION, "which reads pages by one token a row, does not run on Ascend310P3"),
        (Fusion.ROTARY_APPEND, "atb::_npu_reshape_and_cache does not run on Ascend310P3"),
    ],
)
def test_what_no_kernel_serves_on_a_310p_is_not_planned_there(fusion, reason):
    plan = plan_layer(dataclasses.replace(QWEN, dtype=torch.float16), "ascend310p")
    assert fusion not in plan.fusions
    (rejection,) = (one for one in plan.rejected if one.fusion == fusion)
    assert reason in rejection.reason and rejection.bytes_saved > 0


def test_prompts_have_a_fused_attention_on_a_310p():
    prompt = dataclasses.replace(LLAMA, dtype=torch.float16)
    assert Fusion.ATTENTION in plan_layer(prompt, "ascend310p").fusions
    assert Fusion.ATTENTION in plan_layer(dataclasses.replace(prompt, cached=False), "ascend310p").fusions
    assert Fusion.ATTENTION not in plan_layer(dataclasses.replace(prompt, dtype=torch.float32), "ascend310p").fusions


@pytest.mark.parametrize("width", [14336, 14344, 14330, 1, 8, 15, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_that_a_310p_cannot_copy_leave_a_gate_apart(width, dtype):
    shape = dataclasses.replace(LLAMA, dtype=dtype, intermediate_size=width)
    plan = plan_layer(shape, "ascend310p")
    size = width * dtype.itemsize
    assert (Fusion.GATE in plan.fusions) == (size % 32 == 0)
    rejections = [(one.reason, one.bytes_saved) for one in plan.rejected if one.fusion == Fusion.GATE]
    saved = 2 * shape.tokens * size
    reason = f"npu_swiglu does not run on Ascend310P3; Ascend310P3 copies multiples of 32 bytes, a row has {size}"
    assert rejections == ([(reason, saved)] if size % 32 else [])
    assert Fusion.GATE in plan_layer(shape, "ascend910b1").fusions


def test_what_torch_npu_fuses_on_a_310p_needs_no_rows_of_whole_blocks():
    """npu_geglu and npu_add_rms_norm run there, whatever our kernels copy."""
    ragged = dataclasses.replace(LLAMA, dtype=torch.float16, hidden_size=4090, intermediate_size=14330)
    assert Fusion.ADD_NORM in plan_layer(ragged, "ascend310p").fusions
    for mlp_type in ("geglu", "geglu_tanh"):
        assert Fusion.GATE in plan_layer(dataclasses.replace(ragged, mlp_type=mlp_type), "ascend310p").fusions


def test_a_plan_asks_the_records_whether_kernels_are_built_or_not(monkeypatch):
    ragged = dataclasses.replace(LLAMA, dtype=torch.float16, intermediate_size=14330)
    plans = [plan_layer(ragged, "ascend310p")]
    for answer in ("", "they are not built"):
        monkeypatch.setattr(ops_ascendc, "unbuilt_reason", lambda answer=answer: answer)
        plans.append(plan_layer(ragged, "ascend310p"))
    assert plans[0] == plans[1] == plans[2]


def test_attention_without_a_fused_kernel_is_left_to_the_registry():
    layer = TransformerLayer(64, 4, mlp_type="swiglu")
    plan = plan_layer(shape_of(layer, tokens=8, kv_len=8), "ascend310p")
    assert Fusion.ATTENTION not in plan.fusions
    assert Fusion.ATTENTION in plan.apply(layer).fusions


def test_overlapping_fusions_name_the_rival():
    plan = plan_layer(LLAMA, "ascend910b1")
    lost = [one for one in plan.rejected if one.fusion == Fusion.ADD_NORM]
    assert lost[0].reason == "overlaps mlp norm + gate and up projection, which saves 32.0 MiB"


@settings(max_examples=60, deadline=None)
@given(
    soc=st.sampled_from(list(SOCS.values())),
    tokens=st.integers(1, 5000),
    kv_len=st.integers(1, 40000),
    heads=st.sampled_from([(4, 4), (14, 2), (32, 8), (71, 1)]),
    dim=st.sampled_from([64, 80, 128, 192]),
    hidden=st.integers(1, 40000),
    inner=st.integers(1, 60000),
    flags=st.tuples(*[st.booleans()] * 5),
)
def test_no_plan_is_worse_than_its_parts(soc, tokens, kv_len, heads, dim, hidden, inner, flags):
    gated, rotary, cached, qk_norm, bias = flags
    shape = LayerShape(
        hidden, *heads, dim, inner, tokens, max(kv_len, tokens), dtype=torch.float16,
        mlp_type="swiglu" if gated else "gelu", rotary=rotary, cached=cached, qk_norm=qk_norm, bias=bias,
    )  # fmt: skip
    plan = plan_layer(shape, soc)
    steps = layer_steps(shape, soc)
    apart = [plan_steps([step], shape, soc).groups[0] for step in steps]
    assert plan.seconds <= sum(group.seconds for group in apart) * (1 + 1e-12)
    assert [name for group in plan.groups for name in group.steps] == [step.name for step in steps]
    assert FusionPlan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan
    assert f"fusion plan on {soc.name}" in str(plan)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="soc is 'ascend1'"):
        plan_layer(LLAMA, "ascend1")
    with pytest.raises(ValueError, match="shape.dtype is torch.bfloat16; Ascend310P3 does not compute in it"):
        plan_layer(LLAMA, "ascend310p")
    with pytest.raises(ValueError, match="tokens is 3; 8 rows take at least one token each"):
        dataclasses.replace(QWEN, tokens=3, batch=8)
    with pytest.raises(ValueError, match="tokens is 4096; 1 rows of kv_len 2048 hold fewer"):
        dataclasses.replace(LLAMA, tokens=4096)
    with pytest.raises(ValueError, match="tokens is 0"):
        dataclasses.replace(LLAMA, tokens=0)
    with pytest.raises(ValueError, match="num_heads is 30; it must be a multiple of num_kv_heads 8"):
        dataclasses.replace(LLAMA, num_heads=30)
    with pytest.raises(ValueError, match="mlp_type is 'moe'; allowed: 'swiglu'"):
        dataclasses.replace(LLAMA, mlp_type="moe")
    with pytest.raises(TypeError, match="shape"):
        plan_layer({}, "ascend910b1")
    with pytest.raises(ValueError, match="the planner knows pre-norm layers"):
        shape_of(TransformerLayer(32, 4, norm_placement="post"), 1, 1)
    with pytest.raises(ValueError, match="fusions is 'everything'"):
        TransformerLayer(32, 4).use_fusions(["everything"])


def layer_of(mode="train", **options):
    torch.manual_seed(0)
    return TransformerLayer(64, 4, num_kv_heads=2, intermediate_size=96, rotary=RotaryConfig(), mode=mode, **options)


def test_the_shape_of_a_layer():
    layer = layer_of("inference", qk_norm="before_rotary", bias=True, mlp_type="gelu").bfloat16()
    shape = shape_of(layer, tokens=3, kv_len=40, batch=3)
    assert shape == LayerShape(64, 4, 2, 16, 96, 3, 40, 3, torch.bfloat16, "gelu", True, True, True, True)


EVERY = [frozenset(), *(frozenset({one}) for one in Fusion), DEFAULT_FUSIONS, frozenset(Fusion)]


@pytest.mark.parametrize("fusions", EVERY, ids=lambda fusions: ",".join(sorted(fusions)) or "none")
@pytest.mark.parametrize("options", [{}, {"qk_norm": "before_rotary"}, {"mlp_type": "gelu", "bias": True}], ids=str)
def test_a_layer_runs_as_planned_with_the_same_results(fusions, options):
    """Training, a prompt and a decode step: outputs and gradients are those of the layer without a plan."""
    generator = fresh_generator()
    x = torch.randn(2, 7, 64, generator=generator)
    for mode in ("train", "inference"):
        layer = layer_of(mode, **options)
        planned = copy.deepcopy(layer)
        planned.use_fusions(fusions)
        assert planned.state_dict().keys() == layer.state_dict().keys()
        if mode == "train":
            with record_choices() as choices:
                out = planned(x)
            expected = layer(x)
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
            out.square().sum().backward()
            expected.square().sum().backward()
            for (name, one), other in zip(planned.named_parameters(), layer.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, atol=1e-3, rtol=1e-4, msg=name)
            ops = {op for op, _ in choices}
            assert ("norm_linear" in ops) == (Fusion.NORM_MATMUL in fusions)
            assert ("add_rms_norm" in ops) == (fusions & {Fusion.ADD_NORM, Fusion.NORM_MATMUL} == {Fusion.ADD_NORM})
            if "mlp_type" not in options:
                assert ("gated_activation" in ops) == (Fusion.GATE in fusions)
            assert (("attention", "eager") in choices) == (Fusion.ATTENTION not in fusions)
            continue
        caches = [None, None]
        for tokens in (x, x[:, :1]):
            outs = []
            for index, one in enumerate((planned, layer)):
                with record_choices() as choices:
                    out, caches[index] = one(tokens, use_cache=True, cache=caches[index])
                outs.append(out)
                if one is planned:
                    assert ("rotary_append" in {op for op, _ in choices}) == (Fusion.ROTARY_APPEND in fusions)
            torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)


def test_a_plan_is_applied_and_taken_back():
    layer = layer_of("inference").bfloat16()
    plan = plan_layer(shape_of(layer, 3, 40, 3), "ascend910b1")
    assert plan.apply(layer) is layer and layer.fusions == plan.fusions
    layer.use_fusions(DEFAULT_FUSIONS)
    assert layer.fusions == DEFAULT_FUSIONS and not layer.attention.qkv.qkv_proj.input_norm


def test_a_norm_with_a_hook_is_called():
    layer = layer_of()
    calls = []
    layer.attention_norm.register_forward_hook(lambda *_: calls.append(1))
    layer.use_fusions(Fusion)
    layer(torch.randn(1, 3, 64))
    assert calls
