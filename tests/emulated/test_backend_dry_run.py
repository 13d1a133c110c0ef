"""Every kind of call that strategy ASCEND makes, through torch_npu's own host code on four SoCs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .backend_dry_run import CASES

SOCS = ["ascend910b1", "ascend910_93", "ascend310p", "ascend950"]
INFER = ("aclnnFusedInferAttentionScoreV4", "aclnnFusedInferAttentionScoreV5")
PROMPT = ("aclnnPromptFlashAttentionV3",)
TRAIN = ("aclnnFlashAttentionScore", "aclnnFlashAttentionScoreV4")
BACKWARD = ("aclnnFlashAttentionScoreGrad", "aclnnFlashAttentionScoreGradV4", "aclnnFlashAttentionScoreGradV5")
PACKED = ("aclnnFlashAttentionVarLenScoreV4", "aclnnFlashAttentionScoreV4")
PACKED_BACKWARD = ("aclnnFlashAttentionUnpaddingScoreGradV4", "aclnnFlashAttentionUnpaddingScoreGradV5", *BACKWARD)
CODES = ("aclnnIndexPutImpl", "aclop:IndexPutV2")

#: case -> for each fused operator that it must launch, the names that it has on the SoCs
FUSED = {
    "attention": [INFER],
    "attention of one query": [INFER],
    "attention in a window": [INFER],
    "attention with a mask": [INFER],
    "attention in bfloat16": [INFER],
    "attention in float32": [TRAIN],
    "attention, differentiated": [TRAIN, BACKWARD],
    "attention in a window, differentiated": [TRAIN, BACKWARD],
    "attention with dropout, differentiated": [TRAIN, BACKWARD],
    "attention with dropout and sinks": [("aclnnFlashAttentionScoreV3", *TRAIN)],
    "attention, packed": [PACKED],
    "attention, packed, differentiated": [PACKED, PACKED_BACKWARD],
    "decode over pages": [INFER],
    "decode in a window": [INFER],
    "prefill over pages": [INFER],
    "decode over int8 pages": [INFER],
    "decode over int8 pages in a window": [INFER],
    "decode over small int8 pages": [INFER],
    "prefill over int8 pages": [INFER],
    "append to int8 pages": [CODES],
    "rotary append to int8 pages": [CODES, ("aclnnRotaryPositionEmbeddingV2",)],
    "a step over int8 pages": [CODES, INFER],
    "cache append": [("atb:ReshapeAndCache",)],
    "rotary append": [("atb:ReshapeAndCache",), ("aclnnRotaryPositionEmbeddingV2",)],
    "rotary half": [("aclnnRotaryPositionEmbeddingV2", "aclop:RotaryMul")],
    "rotary interleaved": [("aclnnRotaryPositionEmbeddingV2",)],
    "RMSNorm": [("aclnnRmsNorm", "aclop:RmsNorm")],
    "RMSNorm, differentiated": [("aclnnRmsNorm", "aclop:RmsNorm"), ("aclnnRmsNormGrad", "aclop:RmsNormGrad")],
    "add and RMSNorm": [("aclnnAddRmsNorm", "aclop:AddRmsNorm")],
    "LayerNorm": [("aclnnLayerNorm", "aclnnFastLayerNorm", "aclop:LayerNorm", "aclop:LayerNormV3")],
    "add and LayerNorm": [("aclnnAddLayerNorm", "aclop:AddLayerNorm")],
    "SwiGLU": [("aclnnSwiGlu",)],
    "SwiGLU, differentiated": [("aclnnSwiGlu",), ("aclnnSwiGluGrad",)],
    "GeGLU": [("aclnnGeGluV3",)],
    "weight-only product": [("aclnnWeightQuantBatchMatmulV2",)],
    "weight-only product in groups": [("aclnnWeightQuantBatchMatmulV2",)],
    "weight-only product, differentiated": [("aclnnWeightQuantBatchMatmulV2",), ("aclnnMatmul", "aclop:MatMul")],
    "quantised product": [("aclnnDynamicQuantV2",), ("aclnnQuantMatmulV5",)],
    "decode of latent attention": [("atb:PagedAttention",)],
    "prefetch": [("aclrtCmoAsync",)],
    "attention with sinks": [("aclnnFlashAttentionScoreV3", *TRAIN)],
    "Gemma's norm": [("aclnnGemmaRmsNorm", "aclnnRmsNorm", "aclop:RmsNorm")],
    "experts": [("aclnnGroupedMatmulV4", "aclnnGroupedMatmulV5", "aclnnGroupedMatmulWeightNzV5")],
    "experts with biases": [("aclnnGroupedMatmulV4", "aclnnGroupedMatmulV5", "aclnnGroupedMatmulWeightNzV5")],
    "feed-forward with its norm": [("aclnnSwiGlu",), ("aclnnAddRmsNorm", "aclop:AddRmsNorm")],
}
#: What 310P has no operator for; everything else runs there.
REFUSED_ON_310P = {name for name in CASES if name.startswith(("attention", "decode", "SwiGLU"))}
PROMPTS_ON_310P = {"attention", "attention of one query", "attention in a window", "attention with a mask"}
PROMPTS_ON_310P |= {"attention, packed", "prefill over pages", "prefill over int8 pages"}
REFUSED_ON_310P -= PROMPTS_ON_310P
REFUSED_ON_310P |= {"a step over int8 pages"}
REFUSED_ON_310P |= {"cache append", "rotary append", "rotary append to int8 pages", "rotary interleaved"}
REFUSED_ON_310P |= {"weight-only product in groups", "quantised product"}
REFUSED_ON_310P |= {"experts", "experts with biases", "feed-forward with its norm"}


@pytest.fixture(scope="module")
def outcomes():
    def run(soc):
        command = [sys.executable, "-m", "tests.emulated.backend_dry_run", soc]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ, timeout=240)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(SOCS, pool.map(run, SOCS), strict=True))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("soc", SOCS)
def test_the_host_code_takes_what_the_records_accept(outcomes, soc, name):
    outcome = outcomes[soc][name]
    if soc == "ascend310p" and name == "attention, packed":  # its mask is made of numbers, which a dry run has not
        assert "must match the size" in outcome["error"]
        return
    assert "error" not in outcome, outcome["error"]
    if soc == "ascend310p" and name in REFUSED_ON_310P:
        assert "Ascend310P3" in outcome["refused"] or "npu_prompt_flash_attention" in outcome["refused"]
        return
    if soc == "ascend950" and name.startswith("attention with") and name.endswith("sinks"):
        assert "does not run on Ascend950" in outcome["refused"]
        return
    assert "refused" not in outcome, outcome
    if soc == "ascend310p" and name == "prefetch":  # a hint: it is left out there
        assert "aclrtCmoAsync" not in outcome["launches"]
        return
    if "dropout" in name and soc != "ascend950":  # which draws inside its attention
        directions = 2 if "differentiated" in name else 1
        assert outcome["launches"].count("aclnnDropoutGenMaskV2") == directions
    on_310p = soc == "ascend310p" and name in PROMPTS_ON_310P
    for names in [PROMPT] if on_310p else FUSED[name]:
        assert set(names) & set(outcome["launches"]), outcome["launches"]


@pytest.mark.parametrize("soc", [soc for soc in SOCS if soc != "ascend310p"])
def test_torch_npus_host_code_waits_nowhere_in_a_step_over_int8_pages(outcomes, soc):
    launches = outcomes[soc]["a step over int8 pages"]["launches"]
    assert len(launches) > 100 and not [name for name in launches if name.startswith("host:")]
    assert any(name.startswith("host:") for name in outcomes[soc]["decode over int8 pages"]["launches"]), "they show"
