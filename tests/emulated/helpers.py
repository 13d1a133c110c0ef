"""Shared by the tests of the emulated NPU: leaves on both sides, and comparison with float64."""

from __future__ import annotations

import torch

DEVICE = "npu:0"


def draw(generator, *shape, dtype=torch.float32):
    """Normal numbers on the host, rounded to ``dtype``."""
    return torch.randn(shape, generator=generator).to(dtype)


def on_device(*tensors):
    """Copies on the emulated device that ask for gradients where they are floating."""
    moved = [t.to(DEVICE).requires_grad_(t.is_floating_point()) for t in tensors]
    return moved[0] if len(moved) == 1 else moved


def in_float64(*tensors):
    """Copies in float64 on the host that ask for gradients."""
    wide = [t.double().requires_grad_() for t in tensors]
    return wide[0] if len(wide) == 1 else wide


TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_near(mine, truth, dtype=None, scale=1.0):
    """One rounding of ``dtype`` away from ``truth``, relative to its largest element."""
    dtype = dtype or mine.dtype
    bound = TOLERANCE[dtype] * scale * max(1.0, float(truth.detach().abs().max()) if truth.numel() else 1.0)
    torch.testing.assert_close(mine.detach().cpu().double(), truth.detach().double(), atol=bound, rtol=0.0)


def check_gradients(outputs, truths, leaves, wide_leaves, generator, scale=1.0):
    """The same random upstream gradients through both sides."""
    upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in truths]
    loss = sum((o * u.to(o.dtype).to(DEVICE)).sum() for o, u in zip(outputs, upstream, strict=True))
    loss.backward()
    sum((t * u).sum() for t, u in zip(truths, upstream, strict=True)).backward()
    for leaf, wide in zip(leaves, wide_leaves, strict=True):
        assert_near(leaf.grad, wide.grad, leaf.dtype, scale)
