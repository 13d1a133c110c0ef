"""BLOCKED over many blocks: masks shared between blocks, live blocks alone, gradients added where they belong."""

from __future__ import annotations

import pytest
import torch

from atb_modules.kernels.reference.attention import attention_reference
from atb_modules.kernels.torch.query_blocks import query_blocks
from atb_modules.ops import attention
from atb_modules.overlays import Overlays
from atb_modules.reach import reach
from atb_modules.spec import AttentionSpec
from atb_modules.testing import fresh_generator

SPECS = {
    "window": AttentionSpec(causal=True, window=(130, None)),
    "two_sided": AttentionSpec(window=(70, 33)),
    "global": AttentionSpec(causal=True, window=(130, None), global_tokens=5),
    "prefix": AttentionSpec(causal=True, window=(200, None), prefix=37),
    "chunk": AttentionSpec(causal=True, chunk=150, softcap=9.0),
    "causal": AttentionSpec(causal=True),
}


def check_gradients(leaves, run, golden_run):
    """Outputs and gradients of ``run(*leaves)`` against those of ``golden_run`` in float64."""
    wide = [None if t is None else t.double().requires_grad_() for t in leaves]
    mine = [None if t is None else t.clone().requires_grad_() for t in leaves]
    out, golden = run(*mine), golden_run(*wide)
    torch.testing.assert_close(out.double(), golden, atol=1e-5, rtol=1e-5)
    weights = torch.randn(golden.shape, dtype=torch.float64)
    got = torch.autograd.grad(out, [t for t in mine if t is not None], weights.float())
    want = torch.autograd.grad(golden, [t for t in wide if t is not None], weights)
    for one, truth in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), truth, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("bias", ["none", "mask", "row_mask", "slopes", "sinks"])
@pytest.mark.parametrize("name", SPECS)
def test_gradients_over_many_blocks(name, bias):
    """Of everything that can be trained, masks that broadcast included, with fewer queries than keys."""
    generator, spec = fresh_generator(), SPECS[name]
    q = torch.randn(2, 4, 601, 16, generator=generator)
    k, v = (torch.randn(2, 2, 617, 16, generator=generator) for _ in range(2))
    shapes = {"mask": (2, 1, 601, 617), "row_mask": (4, 1, 617), "slopes": (4,), "sinks": (4,)}
    extra = torch.rand(shapes[bias], generator=generator) if bias in shapes else None
    argument = {"mask": "mask", "row_mask": "mask", "slopes": "alibi_slopes", "sinks": "sinks"}.get(bias)

    def run(q, k, v, extra):
        options = {} if argument is None else {argument: extra}
        return attention(q, k, v, spec, strategy="blocked", **options)[0]

    def golden(q, k, v, extra):
        options = {} if argument is None else {argument: extra}
        return attention_reference(q, k, v, spec, **options)[0]

    check_gradients([q, k, v, extra], run, golden)


@pytest.mark.parametrize("heads", [1, 4])
def test_live_blocks_over_many_blocks(heads):
    generator = fresh_generator()
    q = torch.randn(1, 4, 500, 16, generator=generator)
    k, v = (torch.randn(1, 2, 500, 16, generator=generator) for _ in range(2))
    live = torch.rand(1, heads, 16, 16, generator=generator) > 0.8
    live[:, :, 3] = False
    spec = AttentionSpec(causal=True, block_size=32)
    check_gradients(
        [q, k, v],
        lambda *qkv: attention(*qkv, spec, block_mask=live, strategy="blocked")[0],
        lambda *qkv: attention_reference(*qkv, spec, overlays=Overlays(block_mask=live))[0],
    )


def test_live_blocks_alone_are_read():
    live = torch.rand(1, 1, 32, 32, generator=fresh_generator()) > 0.9
    spec, overlays = AttentionSpec(block_size=16), Overlays(block_mask=live)
    blocks = query_blocks(spec, overlays, reach(spec, 512, 512, overlays), 512)
    read = sum((block.end - block.begin) * (last - first) for block in blocks for first, last in block.keys)
    assert read == 16 * 16 * int(live.sum())


def test_a_window_reads_no_more_than_its_blocks_reach():
    spec = AttentionSpec(causal=True, window=(255, None), global_tokens=8)
    blocks = query_blocks(spec, None, reach(spec, 8192, 8192), 8192)
    assert max(sum(last - first for first, last in block.keys) for block in blocks[2:]) <= 255 + 256 + 8


def test_second_backward_and_checkpoint():
    """The graph can be walked twice, and recomputed."""
    spec = AttentionSpec(causal=True, window=(40, None))
    q, k, v = (torch.randn(1, 2, 300, 8, requires_grad=True) for _ in range(3))

    def run(q, k, v):
        return attention(q, k, v, spec, strategy="blocked")[0].square().sum()

    loss = run(q, k, v)
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    for again in (
        torch.autograd.grad(loss, (q, k, v)),
        torch.autograd.grad(torch.utils.checkpoint.checkpoint(run, q, k, v, use_reentrant=False), (q, k, v)),
    ):
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one, other)
