"""Calls that the documentation of an operator or a kernel's tiling forbids are refused by our records, with the rule.

No NPU and no torch_npu are needed: records are asked for a chip that is assumed.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from atb_modules.kernels.ascend import availability, ops_ascendc, rules
from atb_modules.kernels.ascend.availability import assume_soc
from atb_modules.kernels.ascend.socs import SOCS
from atb_modules.kernels.registry import kernels, note_detour
from atb_modules.kernels.traits import (
    ActivationTraits,
    AttentionTraits,
    CacheAppendTraits,
    LinearTraits,
    NormTraits,
    PagedAttentionTraits,
    RotaryTraits,
)
from atb_modules.spec import AttentionSpec

HALF, BF16, FP32, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
CAUSAL = AttentionSpec(causal=True)
TRAITS = {
    "attention": AttentionTraits("npu", HALF, 2, 8, 2, 64, 64, 128, 128),
    "paged_attention": PagedAttentionTraits("npu", HALF, HALF, 4, 4, 8, 2, 128, 128, 8),
    "rms_norm": NormTraits("npu", HALF, 16, 4096),
    "add_rms_norm": NormTraits("npu", HALF, 16, 4096, fused_add=True),
    "add_layer_norm": NormTraits("npu", HALF, 16, 4096, fused_add=True),
    "gated_activation": ActivationTraits("npu", HALF, "silu", 16, 4096),
    "rotary": RotaryTraits("npu", HALF, 16, 8, 128, 128),
    "cache_append": CacheAppendTraits("npu", HALF, HALF, 16, 2, 128),
    "rotary_append": CacheAppendTraits("npu", HALF, HALF, 16, 2, 128, rotary=True),
    "norm_linear": LinearTraits("npu", HALF, HALF, 16, 4096, 1024),
}

#: op, strategy, chip, changes of the traits, spec, what the reason says
FORBIDDEN = [
    ("attention", "ascend", "910b1", {"dtype": torch.float64}, CAUSAL, "takes float16, bfloat16, float32, the call is"),
    ("attention", "ascend", "310p", {"requires_grad": True}, CAUSAL, "fusion_attention does not run on Ascend310P3"),
    ("attention", "ascend", "310p", {"dtype": BF16}, CAUSAL, "takes float16, the call is bfloat16"),
    ("attention", "ascend", "310p", {"dtype": FP32}, CAUSAL, "takes float16, the call is float32"),
    ("attention", "ascend", "310p", {"dropout": True}, CAUSAL, "npu_prompt_flash_attention drops nothing"),
    ("attention", "ascend", "310p", {"need_lse": True}, CAUSAL, "npu_prompt_flash_attention returns no LSE"),
    ("attention", "ascend", "310p", {"has_sinks": True}, CAUSAL, "npu_prompt_flash_attention takes no sinks"),
    ("attention", "ascend", "310p", {"has_alibi": True}, CAUSAL, "adds nothing to the scores on Ascend310P3"),
    ("attention", "ascend", "310p", {"mask": "float"}, CAUSAL, "adds nothing to the scores on Ascend310P3"),
    ("attention", "ascend", "310p", {}, AttentionSpec(softcap=3.0), "npu_prompt_flash_attention has no softcap"),
    ("attention", "ascend", "310p", {"head_dim": 520}, CAUSAL, "head sizes up to 512, the call has 520"),
    ("attention", "ascend", "310p", {"num_heads": 258}, CAUSAL, "up to 256 heads, the call has 258"),
    ("attention", "ascend", "310p", {"kv_len": 70000}, AttentionSpec(), "up to 65535 tokens on Ascend310P3"),
    (
        "attention",
        "ascend",
        "310p",
        {"q_len": 4352, "kv_len": 4352, "mask": "bool", "mask_elements": 8 * 4352},
        AttentionSpec(),
        "needs a full mask of",
    ),
    ("attention", "ascend", "310p", {"q_len": 17000, "kv_len": 17000}, CAUSAL, "needs a full mask of 289816576"),
    ("attention", "ascend", "910b1", {}, AttentionSpec(softcap=30.0), "has no softcap"),
    ("attention", "ascend", "950", {"has_sinks": True}, CAUSAL, "which takes sinks, does not run on Ascend950PR_9599"),
    ("attention", "ascend", "910b1", {"bias_requires_grad": True}, CAUSAL, "returns no gradient of a bias"),
    (
        "attention",
        "ascend",
        "950",
        {"head_dim": 784, "value_dim": 784},
        CAUSAL,
        "head sizes up to 768, the call has 784",
    ),
    ("attention", "ascend", "910b1", {"value_dim": 192}, CAUSAL, "value sizes up to the head size 128"),
    (
        "attention",
        "ascend",
        "910b1",
        {"num_heads": 264, "num_kv_heads": 8},
        CAUSAL,
        "up to 256 heads, the call has 264",
    ),
    ("attention", "ascend", "910b1", {"mask": "float"}, CAUSAL, "rounds what is added to the scores"),
    ("attention", "ascend", "910b1", {"has_alibi": True}, CAUSAL, "rounds what is added to the scores"),
    ("attention", "ascend", "910b1", {"segments": 3000}, CAUSAL, "up to 2048 packed sequences, the call has 3000"),
    ("attention", "ascend", "910b1", {"segments": 3, "dtype": FP32, "mask": "float"}, CAUSAL, "no bias in its packed"),
    ("attention", "ascend", "910b1", {"segments": 3, "has_images": True}, CAUSAL, "knows causality and windows alone"),
    (
        "attention",
        "ascend",
        "910b1",
        {"segments": 3},
        AttentionSpec(causal=True, prefix=4),
        "knows causality and windows",
    ),
    ("attention", "ascend", "910b1", {"segments": 3}, AttentionSpec(causal="top_left"), "causality at the lower right"),
    (
        "attention",
        "ascend",
        "910b1",
        {"q_len": 20000, "kv_len": 20000},
        AttentionSpec(global_tokens=4),
        "a full mask of",
    ),
    ("paged_attention", "ascend", "910b1", {"dtype": FP32, "page_dtype": FP32}, CAUSAL, "takes float16, bfloat16"),
    ("paged_attention", "ascend", "310p", {}, CAUSAL, "does not run on Ascend310P3"),
    ("paged_attention", "ascend", "310p", {"total": 9, "dtype": BF16}, CAUSAL, "takes float16, the call is bfloat16"),
    ("paged_attention", "ascend", "310p", {"total": 9, "page_dtype": FP32}, CAUSAL, "pages are float32"),
    ("paged_attention", "ascend", "310p", {"total": 9, "need_lse": True}, CAUSAL, "returns no LSE"),
    ("paged_attention", "ascend", "310p", {"total": 9, "head_dim": 528}, CAUSAL, "head sizes up to 512"),
    ("paged_attention", "ascend", "310p", {"total": 9, "num_heads": 258}, CAUSAL, "up to 256 heads"),
    ("rms_norm", "ascend", "310p", {"width": 15}, None, "rows of 32 bytes and more on Ascend310P3, the call has 30"),
    ("add_rms_norm", "ascend", "310p", {"width": 15}, None, "rows of 32 bytes and more on Ascend310P3"),
    ("add_layer_norm", "ascend", "310p", {"width": 15}, None, "rows of 32 bytes and more on Ascend310P3"),
    ("paged_attention", "ascend", "310p", {"total": 9, "max_blocks": 300}, CAUSAL, "may hold more than 16384 tokens"),
    (
        "paged_attention",
        "ascend",
        "910b1",
        {"page_dtype": FP32},
        CAUSAL,
        "pages of the queries' float16 or int8, these are float32",
    ),
    ("paged_attention", "ascend", "910b1", {}, AttentionSpec(causal=True, softcap=5.0), "has no softcap"),
    ("paged_attention", "ascend", "910b1", {"has_sinks": True}, CAUSAL, "takes sinks in its packed layouts alone"),
    ("paged_attention", "ascend", "910b1", {"has_alibi": True}, CAUSAL, "takes no slopes"),
    (
        "paged_attention",
        "ascend",
        "910b1",
        {},
        AttentionSpec(causal=True, global_tokens=2),
        "causality and windows alone",
    ),
    ("paged_attention", "ascend", "910b1", {"head_dim": 528}, CAUSAL, "up to 512 in steps of 16, the call has 528"),
    ("paged_attention", "ascend", "910b1", {"head_dim": 72}, CAUSAL, "up to 512 in steps of 16, the call has 72"),
    ("paged_attention", "ascend", "910b1", {"num_heads": 130, "num_kv_heads": 2}, CAUSAL, "64 heads on a key head"),
    (
        "paged_attention",
        "ascend",
        "910b1",
        {"num_heads": 260, "num_kv_heads": 20},
        CAUSAL,
        "256 heads, the call has 260",
    ),
    ("paged_attention", "ascend", "910b1", {"page_size": 8}, CAUSAL, "pages of 16 to 512 tokens in steps of 16"),
    ("paged_attention", "ascend", "910b1", {"page_size": 100}, CAUSAL, "pages of 16 to 512 tokens in steps of 16"),
    ("paged_attention", "ascend", "910b1", {"page_size": 1024}, CAUSAL, "pages of 16 to 512 tokens in steps of 16"),
    ("rms_norm", "ascend", "310p", {"dtype": BF16}, None, "Ascend310P3 does not compute in bfloat16"),
    ("rms_norm", "ascend", "910b1", {"dtype": torch.float64}, None, "the call is float64"),
    ("add_rms_norm", "ascend", "310p", {"dtype": BF16}, None, "does not compute in bfloat16"),
    ("gated_activation", "ascend", "310p", {}, None, "npu_swiglu does not run on Ascend310P3"),
    ("gated_activation", "ascend", "910b1", {"kind": "relu2"}, None, "no gated operator of kind 'relu2'"),
    ("rotary", "ascend", "910b1", {"head_dim": 896, "rotary_dim": 896}, None, "fewer than 896 channels"),
    ("rotary", "ascend", "910b1", {"interleaved": True, "num_heads": 1000}, None, "fewer than 1000 heads"),
    ("cache_append", "ascend", "310p", {}, None, "does not run on Ascend310P3"),
    ("paged_attention", "ascend", "910b1", {"dtype": FP32, "page_dtype": INT8}, CAUSAL, "takes float16, bfloat16"),
    ("paged_attention", "ascend", "310p", {"page_dtype": INT8}, CAUSAL, "does not run on Ascend310P3"),
    ("paged_attention", "ascend", "910b1", {"page_dtype": INT8, "page_size": 8}, CAUSAL, "pages of 16 to 512 tokens"),
    ("cache_append", "ascend", "910b1", {"page_dtype": torch.int16}, None, "writes no int16"),
    ("cache_append", "ascend", "910b1", {"dtype": torch.float64, "page_dtype": INT8}, None, "the call is float64"),
    ("rotary_append", "ascend", "310p", {"page_dtype": INT8}, None, "does not run on Ascend310P3"),
    ("rotary_append", "ascend", "910b1", {"head_dim": 896}, None, "fewer than 896 channels"),
    ("attention", "ascend_c", "310p", {}, CAUSAL, "cores that stand apart, not for Ascend310P3"),
    ("attention", "ascend_c", "910b1", {"requires_grad": True}, CAUSAL, "our flash kernel has no backward"),
    ("attention", "ascend_c", "910b1", {"has_sinks": True}, CAUSAL, "knows causality and windows alone"),
    (
        "attention",
        "ascend_c",
        "910b1",
        {"head_dim": 24},
        CAUSAL,
        "head sizes up to 256 in steps of 16, the call has 24",
    ),
    ("paged_attention", "ascend_c", "910b1", {"total": 9}, CAUSAL, "one token a row, the call has 9 for 4 rows"),
    ("paged_attention", "ascend_c", "310p", {}, CAUSAL, "does not run on Ascend310P3"),
    ("norm_linear", "ascend_c", "310p", {}, None, "cores that stand apart"),
    ("norm_linear", "ascend_c", "910b1", {"requires_grad": True}, None, "has no backward"),
    ("norm_linear", "ascend_c", "910b1", {"in_features": 70000}, None, "rows of 65535 elements, the call has 70000"),
    (
        "norm_linear",
        "ascend_c",
        "910b1",
        {"in_features": 40000},
        None,
        "too many for the unified buffer of Ascend910B1",
    ),
    ("rms_norm", "ascend_c", "310p", {"width": 1001}, None, "copies multiples of 32 bytes, a row has 2002"),
    ("gated_activation", "ascend_c", "910b1", {"kind": "gelu"}, None, "silu or gelu_tanh, the call asks for gelu"),
]


def reasons(op, strategy, chip, changes, spec, monkeypatch):
    monkeypatch.setattr(ops_ascendc, "unbuilt_reason", lambda: "")  # as where they are built
    kernel = next(k for k in kernels(op) if k.strategy.value == strategy)
    with assume_soc(f"ascend{chip}"):
        return kernel.reasons_against(spec, dataclasses.replace(TRAITS[op], **changes))


@pytest.mark.parametrize("op,strategy,chip,changes,spec,rule", FORBIDDEN)
def test_forbidden_calls_are_refused_with_their_rule(monkeypatch, op, strategy, chip, changes, spec, rule):
    found = reasons(op, strategy, chip, changes, spec, monkeypatch)
    assert any(rule in reason for reason in found), found


@pytest.mark.parametrize("op", TRAITS)
@pytest.mark.parametrize("strategy", ["ascend", "ascend_c"])
def test_the_same_calls_without_the_change_are_served(monkeypatch, op, strategy):
    if strategy not in [k.strategy.value for k in kernels(op)]:
        assert strategy == "ascend_c" and op in ("rotary", "cache_append", "add_layer_norm")
        return
    spec = CAUSAL if "attention" in op else None
    assert reasons(op, strategy, "910b1", {}, spec, monkeypatch) == ()


@pytest.mark.parametrize("op", ["cache_append", "rotary_append", "paged_attention"])
@pytest.mark.parametrize("chip", ["910b1", "910_93", "950"])
def test_int8_pages_are_served(monkeypatch, op, chip):
    spec = CAUSAL if op == "paged_attention" else None
    assert reasons(op, "ascend", chip, {"page_dtype": INT8}, spec, monkeypatch) == ()


@pytest.mark.parametrize("changes", [{}, {"mask": "bool", "mask_elements": 4096}, {"segments": 3}, {"head_dim": 72}])
def test_prompts_are_served_on_the_inference_chip(monkeypatch, changes):
    assert reasons("attention", "ascend", "310p", changes, CAUSAL, monkeypatch) == ()
    assert reasons("paged_attention", "ascend", "310p", {"total": 40}, CAUSAL, monkeypatch) == ()


@pytest.mark.parametrize("changes", [{}, {"requires_grad": True}, {"segments": 3}, {"has_sinks": True}])
def test_dropout_is_served_but_for_traced_calls(monkeypatch, changes):
    changes = {"dropout": True, **changes}
    assert reasons("attention", "ascend", "910b1", changes, CAUSAL, monkeypatch) == ()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(availability, "current_soc", lambda: SOCS["ascend910b1"])
    monkeypatch.setattr(rules, "current_soc", lambda: SOCS["ascend910b1"])
    found = reasons("attention", "ascend", "910b1", changes, CAUSAL, monkeypatch)
    assert any("which a traced graph would keep for ever" in reason for reason in found), found


def test_codes_are_written_on_every_chip(monkeypatch):
    assert reasons("cache_append", "ascend", "310p", {"page_dtype": INT8}, None, monkeypatch) == ()


def test_a_kernel_that_is_not_built_says_so():
    with assume_soc("ascend910b1"):
        for op in ("rms_norm", "attention", "norm_linear"):
            kernel = next(k for k in kernels(op) if k.strategy.value == "ascend_c")
            spec = CAUSAL if op == "attention" else None
            assert any("are not built here" in reason for reason in kernel.reasons_against(spec, TRAITS[op]))


def test_without_a_chip_the_reason_is_that():
    kernel = next(k for k in kernels("rms_norm") if k.strategy.value == "ascend")
    assert kernel.reasons_against(None, TRAITS["rms_norm"]) == ("no Ascend chip is known: torch_npu is not imported",)


def test_a_chip_that_comes_later_is_found(monkeypatch):
    """That torch_npu was not imported yet is not kept; what was found is."""
    monkeypatch.setattr(availability, "_FOUND", [])
    monkeypatch.delattr(torch, "npu", raising=False)
    assert availability.current_soc() is None and availability.missing_soc() == "torch_npu is not imported"
    asked = []
    npu = type("npu", (), {"get_device_name": staticmethod(lambda index: asked.append(index) or "Ascend910B3")})
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    assert availability.current_soc().name == availability.current_soc().name == "ascend910b3"
    assert asked == [0] and availability.missing_soc() == ""


def test_detours_are_logged_once(caplog):
    with caplog.at_level("INFO", logger="atb_modules.kernels"):
        for _ in range(2):
            note_detour("attention", "ascend", "a full mask", "a reason of this test")
    assert [record.message for record in caplog.records] == [
        "attention -> ascend goes by a full mask: a reason of this test"
    ]
