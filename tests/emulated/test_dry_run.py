"""The dry run: torch_npu's own host code on each SoC, the operators it would launch, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from atb_modules.testing.npu import BootError, DryCall, TensorSpec, dry_run, dry_run_on

SOCS = ["ascend910b1", "ascend910_93", "ascend310p", "ascend950"]
HALF, FULL, INT = torch.float16, torch.float32, torch.int32


def t(*shape, dtype=HALF, **more):
    return TensorSpec(shape, dtype, **more)


Q, KV, PACKED = t(2, 4, 5, 64), t(2, 2, 7, 64), t(9, 4, 64)
PAGES = t(8, 128, 2, 64)
LENGTHS = {"actual_seq_qlen": [4, 9], "actual_seq_kvlen": [4, 9]}
INFER = {"num_query_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "softmax_scale": 0.125}
CAUSAL = {"atten_mask": TensorSpec((2048, 2048), torch.bool), "sparse_mode": 3}
PAGED = {"block_table": t(2, 3, dtype=INT), "block_size": 128, "actual_seq_kvlen": [4, 5]}
STATISTICS = t(2, 4, 5, 8, dtype=FULL)
PROMPT = {"num_heads": 4, "next_tokens": 2147483647, "input_layout": "BNSD"}

#: call -> operators on 910B1, 910_93, 310P, 950; None where the host code refuses the chip
CALLS = {
    "rms_norm": (DryCall("npu::npu_rms_norm", [t(2, 8), t(8)]), "RmsNorm", "RmsNorm", "aclop:RmsNorm", "RmsNorm"),
    "add_rms_norm": (
        DryCall("npu::npu_add_rms_norm", [t(2, 8), t(2, 8), t(8)]),
        "AddRmsNorm", "AddRmsNorm", "aclop:AddRmsNorm", "AddRmsNorm",
    ),
    "gemma_rms_norm": (DryCall("npu::npu_gemma_rms_norm", [t(2, 8), t(8)]), *["GemmaRmsNorm"] * 4),
    "add_layer_norm": (
        DryCall("npu::npu_add_layer_norm", [t(2, 8), t(2, 8), t(8), t(8)]),
        "AddLayerNorm", "AddLayerNorm", "aclop:AddLayerNorm", "AddLayerNorm",
    ),
    "rotary_mul": (
        DryCall("npu::npu_rotary_mul", [t(2, 3, 4, 128), t(1, 3, 1, 128), t(1, 3, 1, 128)]),
        "RotaryPositionEmbeddingV2", "RotaryPositionEmbeddingV2", "aclop:RotaryMul", "RotaryPositionEmbeddingV2",
    ),
    "apply_rotary_pos_emb": (
        DryCall("npu::npu_apply_rotary_pos_emb", [t(2, 3, 4, 64), *[t(2, 3, 1, 64)] * 3]),
        *["ApplyRotaryPosEmbV2"] * 4,
    ),
    "mrope": (
        DryCall(
            "npu::npu_mrope", [t(3, 5, dtype=torch.int64), t(5, 128), t(5, 64), t(100, 64), 64],
            {"mrope_section": [8, 12, 12]},
        ),
        *["RopeWithSinCosCacheV2"] * 4,
    ),
    "swiglu": (DryCall("npu::npu_swiglu", [t(2, 8)]), *["SwiGlu"] * 4),
    "geglu": (DryCall("npu::npu_geglu", [t(2, 8)]), *["GeGluV3"] * 4),
    "fusion_attention": (
        DryCall("npu::npu_fusion_attention", [Q, KV, KV, 4, "BNSD"], CAUSAL),
        "FlashAttentionScore", "FlashAttentionScore", "FlashAttentionScore", "FlashAttentionScoreV4",
    ),
    "fusion_attention_packed": (
        DryCall("npu::npu_fusion_attention", [PACKED, PACKED, PACKED, 4, "TND"], LENGTHS),
        *["FlashAttentionVarLenScore"] * 3, "FlashAttentionScoreV4",
    ),
    "fusion_attention_packed_statistics": (
        DryCall("npu::npu_fusion_attention", [PACKED, PACKED, PACKED, 4, "TND"], {**LENGTHS, "softmax_layout": "TND"}),
        *["FlashAttentionVarLenScoreV4"] * 3, "FlashAttentionScoreV4",
    ),
    "fused_infer_attention": (
        DryCall("npu::npu_fused_infer_attention_score_v2", [Q, KV, KV], INFER),
        *["FusedInferAttentionScoreV4"] * 3, "FusedInferAttentionScoreV5",
    ),
    "fused_infer_attention_paged": (
        DryCall(
            "npu::npu_fused_infer_attention_score_v2", [t(2, 4, 1, 64), t(8, 128, 128), t(8, 128, 128)],
            {**INFER, **PAGED, "return_softmax_lse": True},
        ),
        *["FusedInferAttentionScoreV4"] * 3, "FusedInferAttentionScoreV5",
    ),
    "prompt_flash_attention": (
        DryCall(
            "npu::npu_prompt_flash_attention", [t(2, 4, 128, 64)] * 3,
            {**PROMPT, "atten_mask": TensorSpec((128, 128), torch.bool)},
        ),
        *["PromptFlashAttentionV3"] * 3, None,
    ),
    "fusion_attention_with_sinks": (
        DryCall("npu::npu_fusion_attention_v3", [Q, KV, KV, 4, "BNSD"], {**CAUSAL, "sink": t(4, dtype=FULL)}),
        *["FlashAttentionScoreV3"] * 3, None,
    ),
    "fusion_attention_grad": (
        DryCall(
            "npu::npu_fusion_attention_grad", [Q, KV, KV, Q, 4, "BNSD"],
            {**CAUSAL, "softmax_max": STATISTICS, "softmax_sum": STATISTICS, "attention_in": Q},
        ),
        *["FlashAttentionScoreGrad"] * 3, "FlashAttentionScoreGradV4",
    ),
    "rms_norm_backward": (
        DryCall("npu::npu_rms_norm_backward", [t(2, 8), t(2, 8), t(8), t(2, 1, dtype=FULL)]),
        "RmsNormGrad", "RmsNormGrad", "aclop:RmsNormGrad", "RmsNormGrad",
    ),
    "paged_attention_mla": (
        DryCall(
            "atb::_npu_paged_attention_mla",
            [t(2, 16, 576), t(4, 128, 1, 576), 1, 16, 0.1, t(2, 3, dtype=INT), t(2, dtype=INT, fill=1, host=True), 512,
             t(2, 16, 512)],
        ),
        *["atb:PagedAttention"] * 4,
    ),
    "paged_attention": (
        DryCall(
            "atb::_npu_paged_attention",
            [t(2, 4, 64), PAGES, PAGES, 2, 4, 0.1, t(2, 3, dtype=INT), t(2, dtype=INT, fill=1, host=True), t(2, 4, 64)],
        ),
        *["atb:PagedAttention"] * 4,
    ),
    "reshape_and_cache": (
        DryCall("atb::_npu_reshape_and_cache", [t(2, 2, 64), t(2, 2, 64), PAGES, PAGES, t(2, dtype=INT)]),
        *["atb:ReshapeAndCache"] * 4,
    ),
    "scatter_pa_kv_cache": (
        DryCall(
            "npu::npu_scatter_pa_kv_cache", [t(2, 2, 64), t(2, 2, 64), PAGES, PAGES, t(2, dtype=INT)],
            {"cache_mode": "Norm"},
        ),
        *["ScatterPaKvCache"] * 4,
    ),
    "dynamic_quant": (DryCall("npu::npu_dynamic_quant", [t(4, 8)]), *["DynamicQuantV2"] * 4),
    "quant_matmul": (
        DryCall(
            "npu::npu_quant_matmul",
            [t(4, 8, dtype=torch.int8), t(8, 16, dtype=torch.int8), t(16, dtype=FULL)],
            {"pertoken_scale": t(4, dtype=FULL), "output_dtype": 5},
        ),
        *["QuantMatmulV5"] * 4,
    ),
    "weight_quant_batchmatmul": (
        DryCall("npu::npu_weight_quant_batchmatmul", [t(4, 8), t(8, 16, dtype=torch.int8), t(16)]),
        *["WeightQuantBatchMatmulV2"] * 4,
    ),
    "grouped_matmul": (
        DryCall(
            "npu::npu_grouped_matmul", [[t(4, 8)], [t(2, 8, 16)]],
            {"group_list": t(2, dtype=torch.int64), "split_item": 2, "group_type": 0},
        ),
        *["GroupedMatmulV5"] * 4,
    ),
    "gating": (DryCall("npu::npu_moe_gating_top_k_softmax", [t(4, 8), None, 2]), *["MoeGatingTopKSoftmax"] * 4),
    "attention_update": (
        DryCall("npu::npu_attention_update", [[t(6, dtype=FULL)] * 2, [t(6, 32)] * 2, 1]),
        *["AttentionUpdate"] * 4,
    ),
    "prefetch": (DryCall("npu::npu_prefetch", [t(4, 8), None, 100]), *["aclrtCmoAsync"] * 4),
}  # fmt: skip

#: call -> what the host code says; it refuses these on every SoC
REFUSED = {
    "layout": (
        DryCall("npu::npu_fusion_attention", [Q, KV, KV, 4, "XYZ"]),
        "input_layout should be BSH/SBH/BNSD/BSND/TND",
    ),
    "keep_prob": (DryCall("npu::npu_fusion_attention", [Q, KV, KV, 4, "BNSD"], {"keep_prob": 1.5}), "keep_prob"),
    "dims": (DryCall("npu::npu_fusion_attention", [t(2, 4), KV, KV, 4, "BNSD"]), "dim"),
    "prefetch of nothing": (DryCall("npu::npu_prefetch", [t(4, 8), None, 0]), "max_size"),
}


#: Calls that the documentation forbids and the host code lets pass: our own rules must refuse them.
LET_PASS = {
    "padding mask": DryCall("npu::npu_fusion_attention", [Q, KV, KV, 4, "BNSD"], {"padding_mask": t(2, 7)}),
    "head count": DryCall("npu::npu_fusion_attention", [Q, KV, KV, 3, "BNSD"]),
    "float mask": DryCall("npu::npu_fusion_attention", [Q, KV, KV, 4, "BNSD"], {"atten_mask": t(5, 7)}),
    "small compressed mask": DryCall(
        "npu::npu_fused_infer_attention_score_v2",
        [Q, KV, KV],
        {**INFER, "sparse_mode": 3, "atten_mask": TensorSpec((5, 7), torch.bool)},
    ),
    "pages of 24": DryCall(
        "npu::npu_fused_infer_attention_score_v2",
        [t(2, 4, 1, 64), t(8, 24, 128), t(8, 24, 128)],
        {**INFER, **PAGED, "block_size": 24},
    ),
    "float16 scale": DryCall(
        "npu::npu_quant_matmul", [t(4, 8, dtype=torch.int8), t(8, 16, dtype=torch.int8), t(16)], {"output_dtype": 5}
    ),
    "gamma of another dtype": DryCall("npu::npu_rms_norm", [t(2, 8), t(8, dtype=torch.bfloat16)]),
}


@pytest.fixture(scope="module")
def results():
    """Every call on every SoC, one process a SoC."""
    calls = [case[0] for case in [*CALLS.values(), *REFUSED.values()]] + [*LET_PASS.values()]
    names = [*CALLS, *REFUSED, *LET_PASS]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda soc: dry_run_on(soc, calls), SOCS)
        return {soc: dict(zip(names, results, strict=True)) for soc, results in zip(SOCS, found, strict=True)}


def full_name(operator):
    return operator if ":" in operator or operator.startswith("aclrt") else f"aclnn{operator}"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("soc", SOCS)
def test_the_host_code_launches_one_operator_and_never_waits(results, soc, name):
    result, operator = results[soc][name], CALLS[name][1 + SOCS.index(soc)]
    if operator is None:
        assert not result.accepted and soc.title() in result.error
        return
    assert result.accepted, result.error
    assert result.names == (full_name(operator),)
    assert result.host_waits == ()


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("soc", SOCS)
def test_the_host_code_refuses(results, soc, name):
    result = results[soc][name]
    assert not result.accepted and REFUSED[name][1] in result.error
    assert result.launches == ()


@pytest.mark.parametrize("name", LET_PASS)
@pytest.mark.parametrize("soc", SOCS)
def test_the_host_code_does_not_know_every_rule(results, soc, name):
    assert results[soc][name].accepted, results[soc][name].error


def test_tensors_are_recorded_in_order(results):
    (launch,) = results["ascend910b1"]["fused_infer_attention_paged"].launches
    assert launch.tensors == (
        ("float16", (2, 4, 1, 64)), ("float16", (8, 128, 128)), ("float16", (8, 128, 128)), ("int32", (2, 3)),
        ("float16", (2, 4, 1, 64)), ("float32", (2, 4, 1, 1)),
    )  # fmt: skip


def test_a_block_records_what_runs_inside():
    x = torch.ones(2, 8).to("npu:0")
    with dry_run() as launches:
        x + x
        x.sum().item()
    names = [launch.name for launch in launches]
    assert names[:2] == ["aclnnAdd", "aclnnReduceSum"]
    assert any(name.startswith("host:") for name in names), "item() waits"
    with pytest.raises(RuntimeError, match="aclnnAdd"):
        x + x


def test_the_pair_of_rotary_tensors_is_written_in_place():
    q, k, table = (torch.zeros(2, 3, n, 64).to("npu:0") for n in (4, 1, 1))
    with dry_run():
        rotated, _ = torch.ops.npu.npu_apply_rotary_pos_emb(q, k, table, table)
    assert rotated.data_ptr() == q.data_ptr()


def test_an_unknown_soc_is_named():
    with pytest.raises(BootError, match="soc is 'ascend1'"):
        dry_run_on("ascend1", [])
