"""Operators of PyTorch that torch_npu makes leaves of its autograd, so that the CPU has no kernel for them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from atb_modules.testing.npu.references.registry import reference


@reference("aten::matmul_backward")
def matmul_backward(
    grad: Tensor, self: Tensor, other: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``torch.matmul`` for both sides, vectors and broadcast batches included."""
    left = self[None] if self.dim() == 1 else self
    right = other[:, None] if other.dim() == 1 else other
    upstream = grad[..., None] if other.dim() == 1 else grad
    upstream = upstream[..., None, :] if self.dim() == 1 else upstream
    first = _shrink(upstream @ right.mT, left).reshape(self.shape) if mask[0] else None
    second = _shrink(left.mT @ upstream, right).reshape(other.shape) if mask[1] else None
    return first, second


def _shrink(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum over the axes along which ``like`` was broadcast."""
    extra = gradient.dim() - like.dim()
    if extra > 0:
        gradient = gradient.sum(tuple(range(extra)))
    axes = [i for i, size in enumerate(like.shape) if size == 1 and gradient.shape[i] != 1]
    return gradient.sum(axes, keepdim=True) if axes else gradient
