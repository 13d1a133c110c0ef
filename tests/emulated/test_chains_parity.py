"""Modulated norms, feed-forwards with their norm, and mixtures of experts on the emulated NPU."""

from __future__ import annotations

import pytest
import torch

from atb_modules.kernels.reference.moe import moe_reference
from atb_modules.mlp.experts import moe
from atb_modules.strategies import MLPStrategy
from atb_modules.testing import assert_parity, fresh_generator

from .borrowed import borrow, on_npu, parity_tests

_MODULE = borrow("kernels/test_norm_chains_parity.py", ())
globals().update(
    parity_tests(
        _MODULE,
        without=(
            "test_mlp_residual_norm",  # draws its dropout on the CPU; below without dropout
            "test_native_ops_pass_opcheck_and_compile",  # of the CPU
            "test_large_tensors_are_streamed_alike",
            "test_what_does_not_fit_is_refused",  # of the front, which is the same
        ),
    )
)


@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_chain(norm_type, kind, gated):
    _MODULE.test_mlp_residual_norm(MLPStrategy.ASCEND, norm_type, kind, gated, 0.0)


@pytest.fixture(autouse=True)
def emulated(npu):
    """Every test here computes on the emulated NPU."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gated,kind", [(True, "silu"), (True, "relu2"), (False, "gelu")])
@pytest.mark.parametrize("biased", [False, True])
def test_experts(npu, dtype, gated, kind, biased):
    generator = fresh_generator()
    for tokens, top_k, num_experts in ((0, 1, 3), (1, 2, 4), (37, 2, 5), (64, 4, 16)):
        x = torch.randn(tokens, 24, generator=generator).to(dtype)
        experts = torch.rand(tokens, num_experts, generator=generator).topk(top_k).indices
        weights = torch.rand(tokens, top_k, generator=generator)
        inner = 40
        up = (torch.randn(num_experts, (1 + gated) * inner, 24, generator=generator) / 5).to(dtype)
        down = (torch.randn(num_experts, 24, inner, generator=generator) / 6).to(dtype)
        biases = {}
        if biased:
            biases["up_bias"] = torch.randn(num_experts, (1 + gated) * inner, generator=generator).to(dtype)
            biases["down_bias"] = torch.randn(num_experts, 24, generator=generator).to(dtype)
        npu.log.clear()
        options = {"kind": kind, "gated": gated, "strategy": "ascend"}
        out = on_npu(moe)(x, experts, weights, up, down, **biases, **options)
        wide = [biases[n].double() if biased else None for n in ("up_bias", "down_bias")]
        tensors = (weights.double(), up.double(), down.double())
        golden = moe_reference(x.double(), experts, *tensors, *wide, kind, gated)
        if dtype == torch.float32:
            assert_parity(out, golden, reduction=2048)
        else:
            bound = 6 * torch.finfo(dtype).eps * max(1.0, float(golden.abs().max()) if tokens else 1.0)
            torch.testing.assert_close(out.double(), golden, atol=bound, rtol=0.0)
        if tokens:
            assert npu.log.counts()["npu::npu_grouped_matmul"] == 2


def test_experts_are_routed_without_a_wait(npu):
    x, up, down = (torch.randn(shape).bfloat16().to("npu:0") for shape in ((9, 16), (4, 48, 16), (4, 16, 24)))
    experts, weights = torch.randint(0, 4, (9, 1)).to("npu:0"), torch.rand(9, 1).to("npu:0")
    with torch.no_grad(), npu.forbid_host_sync():
        moe(x, experts, weights, up, down, strategy="ascend")
