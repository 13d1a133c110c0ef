"""The plain PyTorch implementation in the inputs' own dtype: the yardstick of rule 1, not a kernel.

What it errs by depends on the order in which its sums are taken, and that is BLAS's choice, not its meaning. So it can
be evaluated in several: ``order`` shuffles the features of q . k and the keys of the softmax and of its product with v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from atb_modules.kernels.torch.attention import bias_and_visible
from atb_modules.kernels.torch.paged import gather_pages
from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec


def summation_orders(plain: Callable[..., Tensor], *, seed: int = 0, count: int = 64) -> Iterator[Tensor]:
    """``plain()``, then ``plain(order=generator)`` for ``count`` shuffled orders; lazy, as ``compare`` reads it."""
    yield plain()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield plain(order=generator)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    overlays: Overlays | None = None,
    order: torch.Generator | None = None,
) -> Tensor:
    """Attention with every product rounded to the inputs' dtype, as one would write it first; rows without a key 0."""
    group = q.shape[1] // k.shape[1]
    if order is not None:
        features = torch.randperm(q.shape[-1], generator=order)
        q, k = q[..., features], k[..., features]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * spec.scale_for(q.shape[-1])
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    bias, visible = bias_and_visible(spec, q, k.shape[2], mask, alibi_slopes, overlays)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if order is not None:
        keys = torch.randperm(k.shape[2], generator=order)
        scores, v = scores[..., keys], v[..., keys, :]
    if sinks is not None:
        sink = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    probabilities = torch.softmax(scores.float(), dim=-1).nan_to_num(0.0).to(q.dtype)
    return torch.matmul(probabilities[..., : k.shape[2]], v)


def plain_paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    cu_seqlens_q: Tensor,
    spec: AttentionSpec,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    order: torch.Generator | None = None,
) -> Tensor:
    """``plain_attention`` a row over the tokens gathered from its pages; packed (total, heads, head_dim)."""
    rows = []
    starts = cu_seqlens_q.tolist()
    for row, length in enumerate(kv_lengths.tolist()):
        k, v = (gather_pages(pages, block_table[row], length).to(q.dtype) for pages in (k_pages, v_pages))
        row_q = q[starts[row] : starts[row + 1]].transpose(0, 1).unsqueeze(0)
        out = plain_attention(
            row_q, k.unsqueeze(0), v.unsqueeze(0), spec, sinks=sinks, alibi_slopes=alibi_slopes, order=order
        )
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)
