"""The ops ``atb_modules::ascend_*`` on the emulated NPU: torch_npu's own streams and queue, our kernels, emulated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from atb_modules.attention.merge import merge_attention
from atb_modules.kernels.reference.attention import attention_reference, paged_attention_reference
from atb_modules.kernels.reference.cache import rotary_append_reference
from atb_modules.kernels.reference.mlp import gated_activation_reference
from atb_modules.kernels.reference.norm import add_rms_norm_reference, rms_norm_reference
from atb_modules.spec import AttentionSpec
from atb_modules.testing import assert_parity, fresh_generator

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def ops(own_kernels):
    return own_kernels


def randn(generator, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=generator).to(dtype)


@all_dtypes
def test_norms_and_their_gradients(ops, npu, dtype):
    generator = fresh_generator()
    x, residual, grad_y, grad_sum = (randn(generator, 37, 1001, dtype=dtype) for _ in range(4))
    weight = randn(generator, 1001, dtype=dtype)
    leaves = [t.to("npu:0").requires_grad_() for t in (x, residual, weight)]
    y, total, _ = ops.ascend_add_rms_norm(*leaves, 1e-6)
    grads = torch.autograd.grad([y, total], leaves, [grad_y.to("npu:0"), grad_sum.to("npu:0")])
    assert torch.equal(total.cpu(), x + residual)
    rounded = (x + residual).double()
    assert_parity(y.detach().cpu(), rms_norm_reference(rounded, weight.double(), 1e-6), reduction=1001)
    golden = [t.double().requires_grad_() for t in (rounded, torch.zeros_like(rounded), weight)]
    truth = torch.autograd.grad(add_rms_norm_reference(*golden, 1e-6), golden, [grad_y.double(), grad_sum.double()])
    for gradient, one in zip(grads, truth, strict=True):
        assert_parity(gradient.cpu(), one, reduction=1001)
    leaves = [t.to("npu:0").requires_grad_() for t in (x, weight)]
    y, _ = ops.ascend_rms_norm(*leaves, 1e-6, 1.0)
    grads = torch.autograd.grad(y, leaves, grad_y.to("npu:0"))
    golden = [t.double().requires_grad_() for t in (x, weight)]
    wide = rms_norm_reference(*golden, 1e-6, 1.0)
    assert_parity(y.detach().cpu(), wide.detach(), reduction=1001)
    for gradient, one in zip(grads, torch.autograd.grad(wide, golden, grad_y.double()), strict=True):
        assert_parity(gradient.cpu(), one, reduction=1001)


@all_dtypes
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "quick_gelu"])
def test_gated_activation_and_its_gradients(ops, npu, dtype, kind):
    generator = fresh_generator()
    fused, grad = randn(generator, 5, 2 * 333, dtype=dtype), randn(generator, 5, 333, dtype=dtype)
    leaf = fused.to("npu:0").requires_grad_()
    out = ops.ascend_gated_activation(*leaf.split(333, dim=1), kind)
    golden = fused.double().requires_grad_()
    truth = gated_activation_reference(*golden.split(333, dim=1), kind)
    assert_parity(out.detach().cpu(), truth.detach())
    (gradient,) = torch.autograd.grad(out, leaf, grad.to("npu:0"))
    assert_parity(gradient.cpu(), torch.autograd.grad(truth, golden, grad.double())[0])


@all_dtypes
def test_rotary_append_and_merge(ops, npu, dtype):
    generator = fresh_generator()
    qkv = randn(generator, 7, 8, 80, dtype=dtype)
    angles = randn(generator, 7, 40)
    slots = torch.tensor([3, 17, -1, 0, 31, 16, 5])
    results = []
    for kind, device in ((dtype, "npu:0"), (torch.float64, "cpu")):
        q, k, v = qkv.to(kind, copy=True).to(device).split([4, 2, 2], dim=1)
        pages = [torch.zeros(2, 2, 16, 80, dtype=kind, device=device) for _ in range(2)]
        tables = angles.cos().to(device), angles.sin().to(device)
        if device == "cpu":
            rotary_append_reference(q, k, v, *tables, *pages, slots, False)
        else:
            ops.ascend_rotary_append(q, k, v, *tables, *pages, slots.to(device))
        results.append([q.cpu(), *(t.cpu() for t in pages)])
    for mine, truth in zip(*results, strict=True):
        assert_parity(mine, truth)
    outs, lses = randn(generator, 3, 50, 64, dtype=dtype), randn(generator, 3, 50)
    out, lse = ops.ascend_lse_merge(outs.to("npu:0"), lses.to("npu:0"))
    golden = merge_attention([t.unsqueeze(1) for t in outs.double()], [t.unsqueeze(0) for t in lses.double()])
    assert_parity(out.cpu(), golden[0][:, 0])
    assert_parity(lse.cpu(), golden[1][0])


@all_dtypes
def test_paged_decode(ops, npu, dtype):
    generator = fresh_generator()
    lengths = torch.tensor([77, 0, 259], dtype=torch.int32)
    table = torch.randperm(51, generator=generator).to(torch.int32).view(3, 17)
    q = randn(generator, 3, 4, 64, dtype=dtype)
    pages = [randn(generator, 51, 2, 16, 64, dtype=dtype) for _ in range(2)]
    spec = AttentionSpec(causal=True, window=(100, 0), scale=0.125)
    starts = torch.arange(4, dtype=torch.int32)
    golden, golden_lse = paged_attention_reference(
        q.double(), *(t.double() for t in pages), table, lengths, starts, spec
    )
    given = [t.to("npu:0") for t in (q, *pages, table, lengths)]
    out, lse = ops.ascend_paged_decode(*given, 0.125, left=100)
    assert_parity(out.cpu(), golden, reduction=101)
    torch.testing.assert_close(lse.cpu().double(), golden_lse, atol=3e-6, rtol=3e-6)
    with pytest.raises(ValueError, match="kv_lengths has shape"):
        ops.ascend_paged_decode(*given[:4], given[4][:2], 0.125)
    with pytest.raises(TypeError, match="block_table is Long"):
        ops.ascend_paged_decode(*given[:3], given[3].long(), given[4], 0.125)


@all_dtypes
def test_norm_and_product(ops, npu, dtype):
    generator = fresh_generator()
    x, weight, norm = (randn(generator, *shape, dtype=dtype) for shape in ((21, 200), (70, 200), (200,)))
    weight = weight / 16
    out = ops.ascend_norm_matmul(*(t.to("npu:0") for t in (x, norm, weight)), 1e-6)
    normed = rms_norm_reference(x.double(), norm.double(), 1e-6).to(dtype)
    assert_parity(out.cpu(), normed.double() @ weight.double().t(), reduction=200)
    with pytest.raises(ValueError, match="weight has shape"):
        ops.ascend_norm_matmul(x.to("npu:0"), None, weight[:, :100].contiguous().to("npu:0"), 1e-6)


@all_dtypes
def test_flash_attention(ops, npu, dtype):
    generator = fresh_generator()
    q = randn(generator, 2, 4, 33, 64, dtype=dtype)
    k, v = (randn(generator, 2, 2, 75, 64, dtype=dtype) for _ in range(2))
    spec = AttentionSpec(causal=True, window=(40, 0), scale=0.125)
    golden, golden_lse = attention_reference(*(t.double() for t in (q, k, v)), spec)
    out, lse = ops.ascend_flash_attention(*(t.to("npu:0") for t in (q, k, v)), 0.125, left=40, right=0)
    assert_parity(out.cpu(), golden, reduction=75)
    torch.testing.assert_close(lse.cpu().double(), golden_lse, atol=3e-6, rtol=3e-6)
    with pytest.raises(ValueError, match="multiples of 16"):
        ops.ascend_flash_attention(*(t[..., :40].contiguous().to("npu:0") for t in (q, k, v)), 0.125)


def test_shapes_are_known_without_a_launch(ops):
    with FakeTensorMode():
        x = torch.empty(37, 1001, device="npu:0", dtype=torch.float16)
        y, total, rstd = ops.ascend_add_rms_norm(x, x, None, 1e-6)
        assert y.shape == total.shape == x.shape and y.device == x.device
        assert rstd.shape == (37,) and rstd.dtype == torch.float32
        assert ops.ascend_rms_norm(x, None, 1e-6, keep_rstd=False)[1].shape == (0,)
        _, partial = ops.ascend_rms_norm_backward(x, x, rstd, x[0])
        assert partial.shape == (37, 1001) and partial.dtype == torch.float32
        assert ops.ascend_gated_activation(x, x, "silu").shape == x.shape
        out, lse = ops.ascend_lse_merge(x.unsqueeze(0), rstd.unsqueeze(0))
        assert out.shape == x.shape and lse.shape == (37,)


def test_empty_tensors_launch_nothing(ops, npu):
    empty = torch.empty(0, 64, device="npu:0")
    assert ops.ascend_rms_norm(empty, None, 1e-6)[0].shape == (0, 64)
    assert ops.ascend_gated_activation(empty, empty, "silu").shape == (0, 64)


def test_bad_input_names_the_argument(ops, npu):
    x = torch.ones(3, 8, device="npu:0")
    for error, text, call in (
        (ValueError, "weight has shape", lambda: ops.ascend_rms_norm(x, x[0, :5], 1e-6)),
        (ValueError, "x has shape", lambda: ops.ascend_rms_norm(x[0], None, 1e-6)),
        (TypeError, "x is Long", lambda: ops.ascend_rms_norm(x.long(), None, 1e-6)),
        (ValueError, "residual has shape", lambda: ops.ascend_add_rms_norm(x, x[:2], None, 1e-6)),
        (TypeError, "residual is Half", lambda: ops.ascend_add_rms_norm(x, x.half(), None, 1e-6)),
        (ValueError, "kind is relu", lambda: ops.ascend_gated_activation(x, x, "relu")),
        (ValueError, "number of parts is 1 to 512",
         lambda: ops.ascend_lse_merge(torch.ones(600, 1, 8, device="npu:0"), torch.ones(600, 1, device="npu:0"))),
        (ValueError, "keep_rstd is False",
         lambda: ops.ascend_rms_norm(x.clone().requires_grad_(), None, 1e-6, keep_rstd=False)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()


def test_kernels_of_another_generation():
    """torch_npu reads the chip once a process: the kernels of a 950 run in one of their own."""
    command = [sys.executable, "-m", "tests.emulated.own_kernels_on_950"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0 and "parity on Ascend950PR_9599" in done.stdout, done.stdout + done.stderr
