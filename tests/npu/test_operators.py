"""torch_npu's operators on a device against the references: whether our reading of the documentation is right."""

from __future__ import annotations

import pytest
import torch

from atb_modules.testing import assert_parity, fresh_generator
from atb_modules.testing.npu.references import find_reference

DTYPES = [torch.float16, torch.bfloat16]


def draw(generator, *shape, dtype):
    return torch.randn(shape, generator=generator).to(dtype)


def triangle():
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def norm(g, d):
    return (draw(g, 33, 256, dtype=d), draw(g, 256, dtype=d)), {}


def add_norm(g, d):
    return (draw(g, 33, 256, dtype=d), draw(g, 33, 256, dtype=d), draw(g, 256, dtype=d)), {}


def rotary(mode):
    def case(g, d):
        angles = torch.rand(1, 17, 1, 64, generator=g) * 6.28
        spread = torch.cat((angles, angles), -1) if mode == "half" else angles.repeat_interleave(2, -1)
        return (draw(g, 2, 17, 4, 128, dtype=d), spread.cos().to(d), spread.sin().to(d), mode), {}

    return case


def training(mode, **tokens):
    def case(g, d):
        tensors = draw(g, 2, 8, 100, 64, dtype=d), *(draw(g, 2, 2, 130, 64, dtype=d) for _ in range(2))
        return (*tensors, 8, "BNSD"), {"scale": 0.125, "sparse_mode": mode, "atten_mask": triangle(), **tokens}

    return case


def inference(mode, rows, **more):
    def case(g, d):
        tensors = draw(g, 2, 8, rows, 64, dtype=d), *(draw(g, 2, 2, 130, 64, dtype=d) for _ in range(2))
        call = {"num_query_heads": 8, "num_key_value_heads": 2, "input_layout": "BNSD", "softmax_scale": 0.125}
        mask = {"sparse_mode": mode, "atten_mask": triangle()} if mode else {}
        return tensors, {**call, **mask, "actual_seq_kvlen": [130, 77], "return_softmax_lse": True, **more}

    return case


def quantised(g, d):
    codes = [torch.randint(-128, 128, s, generator=g).to(torch.int8) for s in ((16, 256), (256, 64))]
    return (*codes, torch.rand(64, generator=g) * 1e-4), {
        "pertoken_scale": torch.rand(16, generator=g),
        "output_dtype": 5 if d == torch.float16 else 15,
    }


def weight_only(g, d):
    codes = torch.randint(-128, 128, (256, 64), generator=g).to(torch.int8)
    return (draw(g, 16, 256, dtype=d), codes, (torch.rand(64, generator=g) * 0.01).to(d)), {}


def merge(g, d):
    return ([torch.randn(24, generator=g) for _ in range(3)], [draw(g, 24, 64, dtype=d) for _ in range(3)], 1), {}


#: name -> operator, arguments, outputs that are compared
CASES = {
    "rms_norm": ("npu_rms_norm", norm, (0, 1)),
    "gemma_rms_norm": ("npu_gemma_rms_norm", norm, (0,)),
    "add_rms_norm": ("npu_add_rms_norm", add_norm, (0, 1, 2)),
    "swiglu": ("npu_swiglu", lambda g, d: ((draw(g, 33, 256, dtype=d),), {}), (0,)),
    "geglu": ("npu_geglu", lambda g, d: ((draw(g, 33, 256, dtype=d),), {}), (0, 1)),
    "rotary half": ("npu_rotary_mul", rotary("half"), (0,)),
    "rotary interleave": ("npu_rotary_mul", rotary("interleave"), (0,)),
    "training causal": ("npu_fusion_attention", training(3), (0, 1, 2)),
    "training left-up": ("npu_fusion_attention", training(2), (0, 1, 2)),
    "training window": ("npu_fusion_attention", training(4, pre_tockens=20, next_tockens=0), (0, 1, 2)),
    "inference causal": ("npu_fused_infer_attention_score_v2", inference(3, 50), (0, 1)),
    "inference window": (
        "npu_fused_infer_attention_score_v2",
        inference(4, 50, pre_tokens=20, next_tokens=0),
        (0, 1),
    ),
    "inference one query": ("npu_fused_infer_attention_score_v2", inference(0, 1), (0, 1)),
    "quant_matmul": ("npu_quant_matmul", quantised, (0,)),
    "weight only": ("npu_weight_quant_batchmatmul", weight_only, (0,)),
    "merge": ("npu_attention_update", merge, (0, 1)),
}


def move(value):
    if isinstance(value, list):
        return [move(one) for one in value]
    return value.to("npu:0") if isinstance(value, torch.Tensor) else value


def as_tuple(value):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_an_operator_does_what_its_reference_does(name, dtype):
    operator, arguments, compared = CASES[name]
    args, kwargs = arguments(fresh_generator(), dtype)
    names = [argument.name for argument in getattr(torch.ops.npu, operator).default._schema.arguments]
    want = as_tuple(find_reference(f"npu::{operator}")(**dict(zip(names, args, strict=False)), **kwargs))
    got = as_tuple(getattr(torch.ops.npu, operator)(*map(move, args), **{k: move(v) for k, v in kwargs.items()}))
    for place in compared:
        seen = want[place].isfinite()
        assert_parity(got[place].cpu()[seen], want[place][seen], dtype=dtype, what=f"{name}, output {place}")
