"""The torch.library op of attention over pages; forward only, with the log-sum-exp."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import library, structs
from .library_ops import call, check_out, check_same, define, last_dense, pointer, threads
from .ops_attention import check_groups, per_head


def _meta_none(*_: object, **__: object) -> None:
    return None


def check_scales(pages: Tensor, **scales: Tensor | None) -> None:
    """Raises unless int8 pages have scales, and each of them is contiguous float32 (num_pages, kv_heads)."""
    for name, given in scales.items():
        if (given is None) == (pages.dtype == torch.int8):
            raise ValueError(f"{name} is {'None' if given is None else 'given'}; the pages are {pages.dtype}")
        if given is not None:
            check_same(name, given, "the pages", pages.shape[:2], torch.float32)
            if not given.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got {given.stride()}")


def _check_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    if q.dim() != 3 or k_pages.dim() != 4 or k_pages.shape[3] != q.shape[2]:
        raise ValueError(
            "q must be (total, heads, head_dim) and k_pages (num_pages, kv_heads, page_size, head_dim),"
            f" got {tuple(q.shape)} and {tuple(k_pages.shape)}"
        )
    check_same("v_pages", v_pages, "k_pages", k_pages.shape, k_pages.dtype)
    check_groups(q.shape[1], k_pages.shape[1])
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError(f"k_pages and v_pages must be contiguous, got {k_pages.stride()} and {v_pages.stride()}")
    if block_table.dim() != 2 or block_table.dtype != torch.int32:
        raise ValueError(
            f"block_table must be int32 (batch, max_blocks), got {block_table.dtype} {tuple(block_table.shape)}"
        )
    check_scales(k_pages, k_scales=k_scales, v_scales=v_scales)
    check_same("kv_lengths", kv_lengths, "the rows of block_table", (block_table.shape[0],), torch.int32)


class _Options(NamedTuple):
    """What the op takes after cu_seqlens_q, in the order of its schema."""

    sinks: Tensor | None
    alibi_slopes: Tensor | None
    causal: bool
    left: int
    right: int
    scale: float
    softcap: float
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None


def paged_attention_out(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    cu_seqlens_q: Tensor,
    *options: Any,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attention of packed queries over pages into `out` (total, heads, head_dim) and `lse` (heads, total) float32.

    Only tokens below kv_lengths are read, and of those only the ones some query may see: pages that slid out of a
    window need not exist (block_table -1), and unwritten slots may hold anything. int8 pages come with scales, float32
    (num_pages, kv_heads).
    """
    given = _Options(*options)
    k_scales, v_scales = given.k_scales, given.v_scales
    _check_pages(q, k_pages, v_pages, block_table, kv_lengths, k_scales, v_scales)
    total, heads, head_dim = q.shape
    batch = block_table.shape[0]
    check_same("cu_seqlens_q", cu_seqlens_q, "the rows of block_table", (batch + 1,), torch.int32)
    dtype, page_dtype = library.dtype_code("q", q.dtype), library.page_dtype_code("k_pages", k_pages.dtype)
    check_out(out, q.shape, q.dtype)
    check_same("lse", lse, "q", (heads, total), torch.float32)
    sinks, slopes = per_head("sinks", given.sinks, heads), per_head("alibi_slopes", given.alibi_slopes, heads)
    if q.numel() == 0:
        return
    q = last_dense(q)
    block_table, kv_lengths = block_table.contiguous(), kv_lengths.contiguous()
    cu_seqlens_q = cu_seqlens_q.contiguous()
    args = structs.PagedArgs(
        q.data_ptr(),
        pointer(k_pages),
        pointer(v_pages),
        pointer(k_scales),
        pointer(v_scales),
        pointer(block_table),
        kv_lengths.data_ptr(),
        cu_seqlens_q.data_ptr(),
        pointer(sinks),
        pointer(slopes),
        out.data_ptr(),
        lse.data_ptr(),
        batch,
        heads,
        k_pages.shape[1],
        head_dim,
        k_pages.shape[2],
        block_table.shape[1],
        total,
        q.stride(0),
        q.stride(1),
        given.left,
        given.right,
        given.scale,
        given.softcap,
        dtype,
        page_dtype,
        given.causal,
        threads(),
    )
    call("atb_paged_attention", args)


def _meta_paged(q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)


def _paged_attention(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, lse = _meta_paged(q)
    paged_attention_out(q, *rest, out=out, lse=lse)
    return out, lse


_PAGED = (
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor kv_lengths, Tensor cu_seqlens_q,"
    " Tensor? sinks, Tensor? alibi_slopes, bool causal, int left, int right, float scale, float softcap,"
    " Tensor? k_scales=None, Tensor? v_scales=None"
)
define(f"paged_attention({_PAGED}) -> (Tensor, Tensor)", _paged_attention, _meta_paged)
define(
    f"paged_attention.out({_PAGED}, *, Tensor(a!) out, Tensor(b!) lse) -> ()",
    paged_attention_out,
    _meta_none,
)
