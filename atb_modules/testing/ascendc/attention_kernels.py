"""Our Ascend C kernels of attention on the emulation, called like functions: tensors in, tensors and a report out."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from atb_modules.kernels.ascend.socs import Soc
from atb_modules.testing.ascendc.kernels import DTYPES, cube_of, host_number, run, tile
from atb_modules.testing.ascendc.run import In, Out, Report, Work

__all__ = ["PagedDecodeShape", "flash_attention", "paged_decode"]


class PagedDecodeShape(ctypes.Structure):
    """A call of the paged kernel, as ``tiling/paged_decode.h`` has it."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "batch", "heads", "kv_heads", "head_dim", "value_dim", "page_size", "pages", "max_blocks", "q_step",
            "max_length", "left",
        )
    ]  # fmt: skip


def _workspace(op: str, tiling: ctypes.Array, *given: int) -> Tensor:
    return torch.empty(host_number(f"atb_{op}_workspace", tiling, *given), dtype=torch.uint8).view(torch.float32)


def paged_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    left: int = -1,
    max_length: int | None = None,
    soc: str | Soc = "ascend910b1",
    trace: bool = True,
) -> tuple[Tensor, Tensor, Report]:
    """Attention of one token a sequence, q (batch, heads, head_dim), over pages (pages, kv_heads, page_size, dim).

    Args:
        block_table: int32 (batch, max_blocks), -1 where a sequence has no page.
        kv_lengths: int32 (batch,), the written tokens; the query is the last of them.
        left: the window, keys to the left of the token; negative for all.
        max_length: no sequence is longer; default what the block table has room for.

    Returns:
        (out (batch, heads, value_dim), lse (heads, batch) in float32, report).
    """
    batch, heads, dim = q.shape
    pages, kv_heads, page_size, value_dim = v_pages.shape
    max_blocks = block_table.shape[1]
    shape = PagedDecodeShape(
        batch=batch, heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=value_dim, page_size=page_size,
        pages=pages, max_blocks=max_blocks, q_step=q.stride(0),
        max_length=max_blocks * page_size if max_length is None else max_length, left=left,
    )  # fmt: skip
    tiling = tile(
        "paged_decode", "PagedDecodeTiling", soc, dtype=q.dtype, shape=shape,
        scale=dim**-0.5 if scale is None else scale, softcap=softcap,
    )  # fmt: skip
    out = torch.empty(batch, heads, value_dim, dtype=q.dtype)
    lse = torch.empty(heads, batch)
    arguments = [
        In(q), In(k_pages), In(v_pages), In(block_table), In(kv_lengths), Out(out), Out(lse),
        Work(_workspace("paged_decode", tiling)),
    ]  # fmt: skip
    return out, lse, run("paged_decode", q.dtype, arguments, tiling, soc, trace)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    left: int = -1,
    right: int = -1,
    soc: str | Soc = "ascend910b1",
    trace: bool = True,
) -> tuple[Tensor, Tensor, Report]:
    """Attention of q (batch, heads, q_len, head_dim) over k and v (batch, kv_heads, kv_len, dim), bottom-right aligned.

    Args:
        left, right: keys on each side of its own position that a query sees; negative for all. Causal is right 0.

    Returns:
        (out (batch, heads, q_len, value_dim), lse (batch, heads, q_len) in float32, report).
    """
    batch, heads, q_len, dim = q.shape
    _, kv_heads, kv_len, value_dim = v.shape
    tiling = tile(
        "flash_attention", "FlashAttentionTiling", soc, cube=cube_of(soc), dtype=q.dtype, batch=batch, heads=heads,
        kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=dim, value_dim=value_dim, left=left, right=right,
        scale=dim**-0.5 if scale is None else scale, softcap=softcap,
    )  # fmt: skip
    out, lse = torch.empty(batch, heads, q_len, value_dim, dtype=q.dtype), torch.empty(batch, heads, q_len)
    work = _workspace("flash_attention", tiling, DTYPES[q.dtype][0])
    arguments = [In(q), In(k), In(v), Out(out), Out(lse), Work(work)]
    return out, lse, run("flash_attention", q.dtype, arguments, tiling, soc, trace)
