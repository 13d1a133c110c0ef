"""Paged attention in plain PyTorch: the written tokens of each row are gathered, then dense attention a row."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.host_values import host_values
from atb_modules.kernels.pages import Pages, QuantizedPages, take_pages
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.torch.attention import attention_eager, attention_sdpa
from atb_modules.kernels.traits import PagedAttentionTraits
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import AttentionStrategy


def gather_pages(pages: Pages, blocks: Tensor, length: int) -> Tensor:
    """The first ``length`` tokens behind one row of a block table: (kv_heads, length, head_dim).

    Slots that were never written stay behind (they may hold NaN). Freed blocks (-1) read as zeros.
    """
    page_size = pages.shape[2]
    blocks = blocks[: (length + page_size - 1) // page_size].long()
    taken = take_pages(pages, blocks.clamp(min=0))
    taken = taken.masked_fill((blocks < 0)[:, None, None, None], 0.0)
    return taken.transpose(0, 1).reshape(pages.shape[1], -1, pages.shape[3])[:, :length]


def _rows(dense, q, k_pages, v_pages, block_table, kv_lengths, cu_seqlens_q, spec, need_lse, **tensors):
    out = q.new_empty(q.shape[0], q.shape[1], v_pages.shape[-1])
    lse = torch.empty(q.shape[1], q.shape[0], device=q.device) if need_lse else None
    starts = host_values(cu_seqlens_q)
    for row, length in enumerate(host_values(kv_lengths)):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        k = gather_pages(k_pages, block_table[row], length)
        v = gather_pages(v_pages, block_table[row], length)
        row_q = q[begin:end].transpose(0, 1).unsqueeze(0)
        if dense is attention_sdpa:  # the eager kernel widens what it reads; SDPA wants one dtype
            dtype = torch.promote_types(q.dtype, k.dtype) if isinstance(k_pages, QuantizedPages) else q.dtype
            row_q, k, v = row_q.to(dtype), k.to(dtype), v.to(dtype)
        row_out, row_lse = dense(row_q, k.unsqueeze(0), v.unsqueeze(0), spec, need_lse=need_lse, **tensors)
        out[begin:end] = row_out[0].transpose(0, 1)
        if lse is not None:
            lse[:, begin:end] = row_lse[0]
    return out, lse


def paged_attention_eager(
    q: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    block_table: Tensor,
    kv_lengths: Tensor,
    cu_seqlens_q: Tensor,
    spec: AttentionSpec,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gather, then ``attention_eager`` a row."""
    return _rows(
        attention_eager,
        q,
        k_pages,
        v_pages,
        block_table,
        kv_lengths,
        cu_seqlens_q,
        spec,
        need_lse,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )


def paged_attention_sdpa(
    q: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    block_table: Tensor,
    kv_lengths: Tensor,
    cu_seqlens_q: Tensor,
    spec: AttentionSpec,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gather, then ``attention_sdpa`` a row."""
    return _rows(
        attention_sdpa,
        q,
        k_pages,
        v_pages,
        block_table,
        kv_lengths,
        cu_seqlens_q,
        spec,
        need_lse,
        alibi_slopes=alibi_slopes,
    )


def _eager_reasons(spec: AttentionSpec, traits: PagedAttentionTraits) -> tuple[str, ...]:
    return ()


def _sdpa_reasons(spec: AttentionSpec, traits: PagedAttentionTraits) -> tuple[str, ...]:
    reasons = []
    if traits.need_lse:
        reasons.append("scaled_dot_product_attention does not return the LSE")
    if spec.softcap is not None:
        reasons.append("scaled_dot_product_attention has no softcap")
    if traits.has_sinks:
        reasons.append("scaled_dot_product_attention has no sinks")
    return tuple(reasons)


def _cost(spec: AttentionSpec, traits: PagedAttentionTraits, score_bytes: float) -> Cost:
    kv_len = traits.max_blocks * traits.page_size
    scores = 1.0 * traits.num_heads * traits.total * kv_len
    gathered = 2.0 * traits.batch * traits.num_kv_heads * kv_len * traits.head_dim * traits.dtype.itemsize
    return Cost(
        operations=4.0 * scores * traits.head_dim,
        bytes=3.0 * gathered + score_bytes * scores,
        calls=15.0 * traits.batch,
    )


def _eager_cost(spec: AttentionSpec, traits: PagedAttentionTraits) -> Cost:
    return _cost(spec, traits, score_bytes=32.0)


def _sdpa_cost(spec: AttentionSpec, traits: PagedAttentionTraits) -> Cost:
    return _cost(spec, traits, score_bytes=1.0)


register(Kernel("paged_attention", AttentionStrategy.SDPA, paged_attention_sdpa, _sdpa_reasons, _sdpa_cost))
register(Kernel("paged_attention", AttentionStrategy.EAGER, paged_attention_eager, _eager_reasons, _eager_cost))
