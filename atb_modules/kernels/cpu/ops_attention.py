"""torch.library ops of dense and paged attention; forward only, with the log-sum-exp."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import library, structs
from .library_ops import call, check_out, check_same, define, last_dense, pointer, threads


def _meta_none(*_: object, **__: object) -> None:
    return None


def _per_head(name: str, vector: Tensor | None, heads: int) -> Tensor | None:
    if vector is None:
        return None
    if tuple(vector.shape) != (heads,):
        raise ValueError(f"{name} must have shape ({heads},), one for each query head, got {tuple(vector.shape)}")
    return vector.detach().float().contiguous()


def _check_groups(heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"the heads of q must be a multiple of the kv heads, got {heads} and {kv_heads}")


def _check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (batch, heads, seq, head_dim), got {tuple(tensor.shape)}")
    check_same("v", v, "k", k.shape, k.dtype)
    check_same("k", k, "q (heads and length aside)", (q.shape[0], *k.shape[1:3], q.shape[3]), q.dtype)
    _check_groups(q.shape[1], k.shape[1])


def _expanded_mask(mask: Tensor | None, shape: tuple[int, int, int, int]) -> tuple[Tensor | None, int, tuple[int, ...]]:
    """The mask, its dtype code and its strides (0 along broadcast axes)."""
    if mask is None:
        return None, 0, (0, 0, 0, 0)
    code = structs.MASK_BOOL if mask.dtype == torch.bool else structs.DTYPES.get(mask.dtype)
    if code is None:
        raise TypeError(f"mask must be bool (True = attend), float32, bfloat16 or float16, got {mask.dtype}")
    if mask.dim() > 4 or any(
        have not in (1, want) for have, want in zip(reversed(mask.shape), reversed(shape), strict=False)
    ):
        raise ValueError(f"mask must broadcast to (batch, heads, q_len, kv_len) = {shape}, got {tuple(mask.shape)}")
    return mask, code, mask.expand(shape).stride()


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    causal: int,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    _check_dense(q, k, v)
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    dtype = library.dtype_code("q", q.dtype)
    sinks, slopes = _per_head("sinks", sinks, heads), _per_head("alibi_slopes", alibi_slopes, heads)
    mask, mask_code, mask_strides = _expanded_mask(mask, (batch, heads, q_len, kv_len))
    out, lse = _meta(q, k, v)
    if q.numel() == 0:
        return out, lse
    q, k, v = last_dense(q), last_dense(k), last_dense(v)
    strides = ctypes.c_int64 * 3
    args = structs.AttentionArgs(
        q.data_ptr(),
        pointer(k),
        pointer(v),
        pointer(mask),
        pointer(sinks),
        pointer(slopes),
        out.data_ptr(),
        lse.data_ptr(),
        batch,
        heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        strides(*q.stride()[:3]),
        strides(*k.stride()[:3]),
        strides(*v.stride()[:3]),
        (ctypes.c_int64 * 4)(*mask_strides),
        left,
        right,
        scale,
        softcap,
        dtype,
        mask_code,
        causal,
        threads(),
    )
    call("atb_attention", args)
    return out, lse


def _meta(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    # A token's heads lie side by side, so that the output projection reads them without a copy.
    batch, heads, q_len, head_dim = q.shape
    out = torch.empty((batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor? alibi_slopes, int causal, int left,"
    " int right, float scale, float softcap) -> (Tensor, Tensor)",
    _attention,
    _meta,
)


def _check_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, kv_lengths: Tensor) -> None:
    if q.dim() != 3 or k_pages.dim() != 4 or k_pages.shape[3] != q.shape[2]:
        raise ValueError(
            "q must be (total, heads, head_dim) and k_pages (num_pages, kv_heads, page_size, head_dim),"
            f" got {tuple(q.shape)} and {tuple(k_pages.shape)}"
        )
    check_same("v_pages", v_pages, "k_pages", k_pages.shape, k_pages.dtype)
    _check_groups(q.shape[1], k_pages.shape[1])
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError(f"k_pages and v_pages must be contiguous, got {k_pages.stride()} and {v_pages.stride()}")
    if block_table.dim() != 2 or block_table.dtype != torch.int32:
        raise ValueError(
            f"block_table must be int32 (batch, max_blocks), got {block_table.dtype} {tuple(block_table.shape)}"
        )
    check_same("kv_lengths", kv_lengths, "the rows of block_table", (block_table.shape[0],), torch.int32)


def paged_attention_out(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    cu_seqlens_q: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    causal: bool,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    *,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attention of packed queries over pages into `out` (total, heads, head_dim) and `lse` (heads, total) float32.

    Only tokens below kv_lengths are read, and of those only the ones some query may see: pages that slid out of a
    window need not exist (block_table -1), and unwritten slots may hold anything.
    """
    _check_pages(q, k_pages, v_pages, block_table, kv_lengths)
    total, heads, head_dim = q.shape
    batch = block_table.shape[0]
    check_same("cu_seqlens_q", cu_seqlens_q, "the rows of block_table", (batch + 1,), torch.int32)
    dtype, page_dtype = library.dtype_code("q", q.dtype), library.dtype_code("k_pages", k_pages.dtype)
    check_out(out, q.shape, q.dtype)
    check_same("lse", lse, "q", (heads, total), torch.float32)
    sinks, slopes = _per_head("sinks", sinks, heads), _per_head("alibi_slopes", alibi_slopes, heads)
    if q.numel() == 0:
        return
    q = last_dense(q)
    block_table, kv_lengths = block_table.contiguous(), kv_lengths.contiguous()
    cu_seqlens_q = cu_seqlens_q.contiguous()
    args = structs.PagedArgs(
        q.data_ptr(),
        pointer(k_pages),
        pointer(v_pages),
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
        left,
        right,
        scale,
        softcap,
        dtype,
        page_dtype,
        causal,
        threads(),
    )
    call("atb_paged_attention", args)


def _meta_paged(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)


def _paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    cu_seqlens_q: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    causal: bool,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    out, lse = _meta_paged(q)
    paged_attention_out(
        q,
        k_pages,
        v_pages,
        block_table,
        kv_lengths,
        cu_seqlens_q,
        sinks,
        alibi_slopes,
        causal,
        left,
        right,
        scale,
        softcap,
        out=out,
        lse=lse,
    )
    return out, lse


_PAGED = (
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor kv_lengths, Tensor cu_seqlens_q,"
    " Tensor? sinks, Tensor? alibi_slopes, bool causal, int left, int right, float scale, float softcap"
)
define(f"paged_attention({_PAGED}) -> (Tensor, Tensor)", _paged_attention, _meta_paged)
define(
    f"paged_attention.out({_PAGED}, *, Tensor(a!) out, Tensor(b!) lse) -> ()",
    paged_attention_out,
    _meta_none,
)
