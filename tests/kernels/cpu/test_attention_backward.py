"""Gradients of the CPU attention kernel, a run for each instruction set: shapes, splits, repeatability, refusals."""

import pytest
import torch

from atb_modules import AttentionSpec
from atb_modules.kernels.reference.attention import attention_reference
from atb_modules.reach import reach

OPS = torch.ops.atb_modules
#: batch, heads, kv_heads, q_len, kv_len, head_dim
SHAPES = [
    (2, 4, 2, 70, 70, 16),
    (1, 3, 1, 1, 33, 24),
    (1, 2, 2, 130, 257, 72),
    (3, 2, 1, 9, 4, 7),
    (1, 1, 1, 300, 300, 64),
]


def draw(shape, dtype=torch.float32):
    batch, heads, kv_heads, q_len, kv_len, dim = shape
    sizes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return [torch.randn(batch, h, n, dim).to(dtype).requires_grad_() for h, n in sizes]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_through_output_and_lse(isa, shape, causal, softcap):
    q, k, v = draw(shape)
    sinks = torch.randn(shape[1], requires_grad=True)
    spec = AttentionSpec(causal=causal, window=(40, None), softcap=softcap)
    out, lse = OPS.attention(
        q, k, v, None, sinks, None, None, None, 0, int(causal), 40, -1, shape[-1] ** -0.5, softcap or 0.0
    )
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    golden, golden_lse = attention_reference(*wide[:3], spec, sinks=wide[3])
    weights = torch.randn(out.shape), torch.randn(lse.shape)
    mine = torch.autograd.grad((out * weights[0]).sum() + (lse * weights[1]).sum(), (q, k, v, sinks))
    truth = torch.autograd.grad((golden * weights[0].double()).sum() + (golden_lse * weights[1].double()).sum(), wide)
    for got, want in zip(mine, truth, strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_inputs_give_half_gradients(isa, dtype):
    q, k, v = draw((1, 4, 2, 33, 50, 24), dtype)
    out, _ = OPS.attention(q, k, v, None, None, None, None, None, 0, 1, -1, -1, 0.2, 0.0)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    golden, _ = attention_reference(*wide, AttentionSpec(causal=True, scale=0.2))
    weights = torch.randn(out.shape).to(dtype)
    mine = torch.autograd.grad((out * weights).sum(), (q, k, v))
    truth = torch.autograd.grad((golden * weights.double()).sum(), wide)
    for got, want in zip(mine, truth, strict=True):
        assert got.dtype == dtype
        step = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), want, atol=step * float(want.abs().max()), rtol=step)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_bits_every_time_for_any_number_of_threads(isa, threads):
    """One unit is shared by all threads, three are not: both ways add in a fixed order."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in ((1, 2, 1, 400, 400, 16), (3, 1, 1, 200, 200, 16)):
            q, k, v = draw(shape)
            weights = torch.randn(q.shape)
            runs = []
            for _ in range(3):
                out, _ = OPS.attention(q, k, v, None, None, None, None, None, 0, 1, -1, -1, 0.2, 0.0)
                runs.append(torch.autograd.grad((out * weights).sum(), (q, k, v)))
            for other in runs[1:]:
                assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    finally:
        torch.set_num_threads(before)


def test_opcheck(isa):
    q, k, v = draw((1, 4, 2, 7, 7, 8))
    sinks = torch.randn(4, requires_grad=True)
    torch.library.opcheck(OPS.attention.default, (q, k, v, None, sinks, None, None, None, 0, 1, -1, -1, 0.25, 0.0))
    ranges = reach(AttentionSpec(causal=True, global_tokens=2, window=(2, None)), 7, 7)
    live = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    torch.library.opcheck(OPS.attention.default, (q, k, v, None, None, None, ranges, live, 2, 0, -1, -1, 0.25, 3.0))
    q, k, v = (t.detach() for t in (q, k, v))
    options = (None, None, None, None, None, 0, 1, -1, -1, 0.25, 0.0)
    out, lse = OPS.attention(q, k, v, *options)
    torch.library.opcheck(OPS.attention_backward.default, (torch.randn(out.shape), None, out, lse, q, k, v, *options))


def test_what_has_no_gradient_says_so():
    q, k, v = draw((1, 2, 2, 5, 5, 8))
    slopes = torch.rand(2, requires_grad=True)
    out, _ = OPS.attention(q, k, v, None, None, slopes, None, None, 0, 1, -1, -1, 0.25, 0.0)
    with pytest.raises(RuntimeError, match="no gradient of a mask or of ALiBi slopes"):
        out.sum().backward()
    out, _ = OPS.attention(q, k, v, None, None, None, None, None, 0, 1, -1, -1, 0.25, 0.0)
    with pytest.raises(RuntimeError, match="no second derivative; strategy='eager' has"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize(
    ("ranges", "live", "size", "message"),
    [
        (torch.zeros(1, 5, 4, dtype=torch.int32), None, 0, "reach must be int32"),
        (torch.zeros(1, 5, 5), None, 0, "reach must be int32"),
        (None, torch.ones(1, 1, 2, 2, dtype=torch.bool), 2, "blocks must be bool"),
        (None, torch.ones(1, 1, 3, 3), 2, "blocks must be bool"),
        (None, torch.ones(1, 1, 3, 3, dtype=torch.bool), 0, "block_size must be at least 1"),
    ],
)
def test_ranges_and_blocks_of_other_shapes_are_refused(ranges, live, size, message):
    q, k, v = (t.detach() for t in draw((1, 2, 2, 5, 5, 8)))
    with pytest.raises(ValueError, match=message):
        OPS.attention(q, k, v, None, None, None, ranges, live, size, 0, -1, -1, 0.25, 0.0)
