"""Whatever the records of products with int8 weights accept, the documented rules of the operators accept."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules.kernels.ascend.availability import assume_soc
from atb_modules.quantized_linear import quantized_linear, weight_only_linear
from atb_modules.testing.npu import EmulatedNPU

from .helpers import DEVICE

BIG = 65536
H, B, F = torch.float16, torch.bfloat16, torch.float32


@given(
    soc=st.sampled_from(["ascend910b1", "ascend910_93", "ascend310p", "ascend950"]),
    dtype=st.sampled_from([F, H, B]),
    rows=st.sampled_from([0, 1, 3]),
    inner=st.sampled_from([1, 32, 33, 96, 192]),
    outer=st.sampled_from([1, 8, BIG]),
    parts=st.sampled_from([None, 1, 2, 3, 6]),
    bias=st.sampled_from([None, F, H, B]),
)
@settings(max_examples=60, deadline=None)
def test_what_the_records_accept_the_operators_accept(soc, dtype, rows, inner, outer, parts, bias):
    group = inner // parts if parts and inner % parts == 0 else None
    with assume_soc(soc), EmulatedNPU(soc=soc):
        x, codes, scales = (
            torch.ones(rows, inner, dtype=dtype, device=DEVICE),
            torch.ones(outer, inner, dtype=torch.int8, device=DEVICE),
            torch.ones((outer,) if group is None else (outer, inner // group), device=DEVICE),
        )
        shift = None if bias is None else torch.ones(outer, dtype=bias, device=DEVICE)
        for op, given_scales in ((weight_only_linear, scales), (quantized_linear, torch.ones(outer, device=DEVICE))):
            try:
                out = op(x, codes, given_scales, shift, strategy="ascend")
            except ValueError as refusal:
                assert "cannot serve this" in str(refusal), refusal
            else:
                expected = float(inner + (bias is not None))
                torch.testing.assert_close(out.cpu().float(), torch.full((rows, outer), expected), atol=0.1, rtol=0)
