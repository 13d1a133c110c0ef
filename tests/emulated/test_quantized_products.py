"""Products with int8 weights on the emulated NPU: parity, what is launched, what is refused on which chip."""

from __future__ import annotations

import pytest
import torch

from atb_modules import quantized_linear as front
from atb_modules.kernels.ascend.availability import assume_soc
from atb_modules.kernels.registry import explain_call
from atb_modules.quantized_linear import quantize_weight, quantized_linear, weight_only_linear

from .borrowed import borrow, on_npu, parity_tests
from .helpers import DEVICE

_MODULE = borrow("test_quantized_linear.py", ())
for _name in ("weight_only_linear", "quantized_linear"):
    setattr(_MODULE, _name, on_npu(getattr(front, _name)))
_OF_THE_HOST = (
    "test_it_compiles_into_one_graph",
    "test_forward_mode_and_vmap",
    "test_refusals",
    "test_codes_are_half_a_step_from_the_weight",
    "test_autocast_rounds_x_and_no_sum",
)
globals().update(parity_tests(_MODULE, without=(*_OF_THE_HOST, "test_the_quantised_product_is_near_the_product")))

BIG = 65536
H, B, F = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def emulated(npu):
    """Every test here computes on the emulated NPU."""


def made(rows, inner, outer, group, dtype, device=DEVICE):
    """Arguments of the two ops, with group None for one scale an output channel."""
    shape = (outer,) if group is None else (outer, inner // group)
    x = torch.ones(rows, inner, dtype=dtype, device=device)
    return x, torch.ones(outer, inner, dtype=torch.int8, device=device), torch.ones(shape, device=device)


@pytest.mark.parametrize("dtype", [H, B], ids=str)
def test_what_is_launched(npu, dtype):
    x, codes, scales = made(3, 128, 8, None, dtype)
    npu.log.clear()
    quantized_linear(x, codes, scales)
    weight_only_linear(x, codes, scales)
    fused = [name for name in npu.log.names if name.startswith("npu::")]
    assert fused == ["npu::npu_dynamic_quant", "npu::npu_quant_matmul", "npu::npu_weight_quant_batchmatmul"]
    npu.log.clear()
    weight_only_linear(x, codes, scales)
    assert not [name for name in npu.log.names if "_to_copy" in name], "scales are converted once"


@pytest.mark.parametrize(
    "op,soc,call,reason",
    [
        (weight_only_linear, "ascend910b1", (2, 64, 8, None, F), "takes float16, bfloat16, the call is float32"),
        (weight_only_linear, "ascend310p", (2, 64, 8, None, B), "Ascend310P3 does not compute in bfloat16"),
        (weight_only_linear, "ascend310p", (2, 64, 8, 32, H), "one scale an output channel on Ascend310P3"),
        (weight_only_linear, "ascend910b1", (2, 64, 8, 16, H), "groups of 32 to 63 channels in steps of 32"),
        (weight_only_linear, "ascend950", (2, 96, 8, 48, H), "groups of 32 to 95 channels in steps of 32"),
        (weight_only_linear, "ascend910_93", (1, BIG, 1, None, H), "takes in_features up to 65535, the call has 65536"),
        (weight_only_linear, "ascend910b1", (1, 1, BIG, None, H), "takes out_features up to 65535"),
        (quantized_linear, "ascend910b1", (2, 64, 8, None, F), "takes float16, bfloat16, the call is float32"),
        (quantized_linear, "ascend310p", (2, 64, 8, None, H), "npu_dynamic_quant does not run on Ascend310P3"),
        (quantized_linear, "ascend310p", (2, 64, 8, None, H), "npu_quant_matmul takes no scale a row on Ascend310P3"),
        (quantized_linear, "ascend310p", (2, 64, 8, None, B), "Ascend310P3 does not compute in bfloat16"),
        (quantized_linear, "ascend910_93", (1, BIG, 1, None, B), "takes in_features up to 65535, the call has 65536"),
        (quantized_linear, "ascend950", (1, 1, BIG, None, H), "takes out_features up to 65535"),
    ],
)
def test_refused_with_the_documented_rule(op, soc, call, reason):
    with assume_soc(soc):
        arguments = made(*call)
        with pytest.raises(ValueError, match=f"ascend: .*{reason}"):
            op(*arguments, strategy="ascend")
        assert explain_call(op, *arguments).chosen == "torch"


def test_the_codes_of_a_weight_on_the_npu_are_those_of_the_host():
    weight = torch.randn(6, 64)
    for one, other in zip(quantize_weight(weight.to(DEVICE), 32), quantize_weight(weight, 32), strict=True):
        torch.testing.assert_close(one.cpu(), other)
