"""Outputs larger than the caches are written past them: the results are those of small calls, bit for bit."""

import pytest
import torch

OPS = torch.ops.atb_modules
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGE = 9 << 20  # bytes of one output; streaming starts at 8 MiB


def same(function, *tensors):
    """function(tensors) equals function on three parts of the rows, none large enough to stream."""
    whole = function(*tensors)
    parts = [function(*part) for part in zip(*(t.tensor_split(3) for t in tensors), strict=True)]
    if isinstance(whole, torch.Tensor):
        assert torch.equal(whole, torch.cat(parts))
    else:
        for one, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(one, torch.cat(pieces))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2048, 2051])
def test_norms(isa, dtype, width):
    """Widths of whole vectors stream; others (unaligned rows) do not."""
    rows = LARGE // (width * dtype.itemsize) + 1
    x, y = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
    w, b = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    same(lambda x: OPS.rms_norm(x, w, 1e-5, 0.0, True), x)
    same(lambda x: OPS.layer_norm(x, w, b, 1e-5), x)
    same(lambda x, y: OPS.add_rms_norm(x, y, w, 1e-5, 1.0, False), x, y)
    same(lambda x, y: OPS.add_layer_norm(x, y, w, b, 1e-5), x, y)
    same(lambda x: OPS.rms_norm(x, w, 1e-5, 0.0, True), x.t().contiguous().t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_activation(isa, dtype):
    rows = LARGE // (1024 * dtype.itemsize) + 1
    fused = torch.randn(rows, 2048).to(dtype)
    same(lambda fused: OPS.gated_activation(*fused.chunk(2, -1), "silu"), fused)
    odd = torch.randn(rows, 2 * 1031).to(dtype)
    same(lambda odd: OPS.gated_activation(*odd.chunk(2, -1), "gelu_tanh"), odd)
    # an output whose rows start at odd addresses, and one that is its own input
    target = torch.full((rows, 1025), float("nan"), dtype=dtype)
    gate, up = fused.chunk(2, -1)
    want = OPS.gated_activation(gate, up, "silu")
    OPS.gated_activation.out(gate, up, "silu", out=target[:, 1:])
    assert torch.equal(target[:, 1:], want) and target[:, 0].isnan().all()
    own = gate.contiguous()
    OPS.gated_activation.out(own, up, "silu", out=own)
    assert torch.equal(own, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (96, 32), (80, 40), (72, 33)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(isa, dtype, head_dim, half, interleaved):
    tokens = LARGE // (8 * head_dim * dtype.itemsize) + 1
    x, angles = torch.randn(tokens, 8, head_dim).to(dtype), torch.rand(tokens, half) * 6
    same(lambda x, cos, sin: OPS.rotary(x, cos, sin, interleaved), x, angles.cos(), angles.sin())
