"""Attention over pages and writes to them by torch_npu; lengths come from the host, so a decode step never waits."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from atb_modules.kernels.ascend.derived import derived
from atb_modules.kernels.ascend.ops_attention import attention_ascend
from atb_modules.kernels.ascend.ops_codes import append_codes, first_blocks, scales_by_token, takes_codes, written_out
from atb_modules.kernels.ascend.ops_latent import LATENT, ROPE, latent_decode
from atb_modules.kernels.ascend.ops_rows import rotary_ascend
from atb_modules.kernels.ascend.rules import is_310p
from atb_modules.kernels.ascend.structure import UNLIMITED, triangle
from atb_modules.kernels.host_values import host_values, upload
from atb_modules.kernels.pages import Pages, QuantizedPages
from atb_modules.kernels.registry import note_detour
from atb_modules.kernels.torch.cache import cache_append_torch
from atb_modules.kernels.torch.paged import gather_pages
from atb_modules.spec import AttentionSpec

_NPU = torch.ops.npu
#: "per-token with per-head": scales float32 (B, KV_N, KV_S) of keys and values of int8
BY_TOKEN_AND_HEAD = 3


def paged_attention_ascend(
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
    """One token a row in one call of npu_fused_infer_attention_score_v2; several over pages of 128 tokens, too.

    Longer queries over other page sizes, which that operator does not take, are gathered a row at a time. Latent
    attention, whose pages are keys and values at once, has an operator for one token a row. int8 pages are read as they
    lie by one token a row; for longer queries, "page attention does not support pseudo-quantisation", and they are
    written out first.
    """
    starts, lengths = host_values(cu_seqlens_q), host_values(kv_lengths)
    queries = [b - a for a, b in itertools.pairwise(starts)]
    if is_310p():
        why = "the chip's attention of prompts reads no pages"
        return _gathered(q, k_pages, v_pages, block_table, starts, lengths, spec, need_lse, why)
    if isinstance(k_pages, QuantizedPages):
        assert isinstance(v_pages, QuantizedPages)
        block_table = first_blocks(block_table, max(lengths, default=0), k_pages.shape[2])
        if not (max(queries) == 1 and takes_codes(k_pages) and takes_codes(v_pages)):
            why = "codes are read as they lie by one token a row, in pages and heads of a multiple of 32"
            note_detour("paged_attention", "ascend", "pages written out", why)
            k_pages, v_pages, block_table = written_out(k_pages, v_pages, block_table, q.dtype)
    if q.shape[-1] == LATENT + ROPE:
        assert isinstance(k_pages, Tensor) and isinstance(v_pages, Tensor)
        if max(queries) == 1 and k_pages.is_contiguous():
            scale = spec.scale_for(q.shape[-1])
            return latent_decode(q, k_pages, block_table, kv_lengths, queries, lengths, scale), None
        return _gathered(q, k_pages, v_pages, block_table, starts, lengths, spec, need_lse)
    if all(count == 1 for count in queries):
        return _decode(q, k_pages, v_pages, block_table, kv_lengths, lengths, spec, need_lse)
    if max(queries) == 1:
        return _some_rows(q, k_pages, v_pages, block_table, kv_lengths, queries, spec, need_lse)
    assert isinstance(k_pages, Tensor) and isinstance(v_pages, Tensor)
    if k_pages.shape[2] % 128 == 0 and not _blocks_behind(spec, queries, lengths, k_pages.shape[2]):
        return _prefill(q, k_pages, v_pages, block_table, queries, lengths, spec, need_lse)
    return _gathered(q, k_pages, v_pages, block_table, starts, lengths, spec, need_lse)


def _some_rows(
    q: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    table: Tensor,
    kv_lengths: Tensor,
    queries: list[int],
    spec: AttentionSpec,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """One token of some of the rows, none of the others."""
    rows = [row for row, count in enumerate(queries) if count]
    lengths = tuple(host_values(kv_lengths)[row] for row in rows)
    where = upload(torch.tensor(rows), q.device)
    table, kv_lengths = table.index_select(0, where), kv_lengths.index_select(0, where)
    return _decode(q, k_pages, v_pages, table, kv_lengths, lengths, spec, need_lse)


def _blocks_behind(spec: AttentionSpec, queries: list[int], lengths: tuple[int, ...], size: int) -> bool:
    """Whether whole blocks lie behind every window of a row: they may be freed, and must not be looked up."""
    if spec.left is None:
        return False
    return any(length - count - spec.left >= size for count, length in zip(queries, lengths, strict=True))


def _fused(q: Tensor, k_pages: Pages, v_pages: Pages, table: Tensor, need_lse: bool, **said) -> tuple[Tensor, Tensor]:
    """One call over pages. Codes come with the scale of every token of a row and head, mode 3."""
    if isinstance(k_pages, QuantizedPages) and isinstance(v_pages, QuantizedPages):
        scales = [scales_by_token(pages, table) for pages in (k_pages, v_pages)]
        said |= {"dequant_scale_key": scales[0], "dequant_scale_value": scales[1]}
        said |= {"key_quant_mode": BY_TOKEN_AND_HEAD, "value_quant_mode": BY_TOKEN_AND_HEAD}
        k_pages, v_pages = k_pages.codes, v_pages.codes
    assert isinstance(k_pages, Tensor) and isinstance(v_pages, Tensor)
    return _NPU.npu_fused_infer_attention_score_v2(
        q,
        k_pages,
        v_pages,
        block_table=table,
        block_size=k_pages.shape[2],
        num_query_heads=q.shape[1],
        num_key_value_heads=k_pages.shape[1],
        input_layout="BNSD",
        return_softmax_lse=need_lse,
        **said,
    )


def _decode(
    q: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    table: Tensor,
    kv_lengths: Tensor,
    lengths: tuple[int, ...],
    spec: AttentionSpec,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    size, mask = k_pages.shape[2], None
    seen = list(lengths)
    if spec.left is not None and max(lengths, default=0) > spec.left + 1:
        left = spec.left
        firsts = [max(0, length - 1 - left) // size for length in lengths]
        seen = [length - first * size for length, first in zip(lengths, firsts, strict=True)]
        width = -(-max(seen) // size)
        of_lengths = ("window blocks", left, size, host_values(kv_lengths))
        table = derived(table, of_lengths, lambda: _moved(table, firsts, width))
        mask = derived(kv_lengths, ("window mask", left, size), lambda: _before(q.device, seen, left, width * size))
    out, lse = _fused(
        q.unsqueeze(2).contiguous(),
        k_pages,
        v_pages,
        table,
        need_lse,
        atten_mask=mask,
        actual_seq_kvlen=seen,
        softmax_scale=spec.scale_for(q.shape[-1]),
    )
    if not need_lse:
        return out.squeeze(2), None
    lse = lse[:, :, 0, 0].t()
    if not all(lengths):
        lse = lse.masked_fill((kv_lengths == 0).unsqueeze(0), float("-inf"))
    return out.squeeze(2), lse


def _moved(table: Tensor, firsts: list[int], width: int) -> Tensor:
    """Each row's blocks from the first that its window reaches: a freed block behind it is never looked up."""
    columns = upload(torch.tensor(firsts), table.device)[:, None] + torch.arange(width, device=table.device)
    inside = columns < table.shape[1]
    return table.gather(1, columns.clamp(max=table.shape[1] - 1)).masked_fill(~inside, 0).clamp(min=0)


def _before(device: torch.device, seen: list[int], left: int, columns: int) -> Tensor:
    """bool (batch, 1, 1, columns), True = hidden: what the first block holds from before the window."""
    first = upload(torch.tensor([max(0, length - 1 - left) for length in seen]), device)
    return (torch.arange(columns, device=device) < first[:, None])[:, None, None]


def _prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    queries: list[int],
    lengths: tuple[int, ...],
    spec: AttentionSpec,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rows of several queries, padded to the longest; bottom-right causality and windows count from each row's end."""
    longest, batch = max(queries), len(queries)
    row = torch.repeat_interleave(torch.arange(batch), torch.tensor(queries))
    place = torch.cat([torch.arange(count) for count in queries])
    where = upload(row * longest + place, q.device)
    padded = q.new_zeros(batch * longest, *q.shape[1:]).index_copy(0, where, q)
    mode, mask, before, after = 0, None, UNLIMITED, UNLIMITED
    if spec.masks_keys:
        mask, mode = triangle(q.device), 3
        if spec.window is not None:
            before, after = (UNLIMITED if side is None else side for side in (spec.left, spec.right))
            mode = 4
    out, lse = _fused(
        padded.view(batch, longest, *q.shape[1:]).transpose(1, 2).contiguous(),
        k_pages,
        v_pages,
        table,
        need_lse,
        atten_mask=mask,
        sparse_mode=mode,
        pre_tokens=before,
        next_tokens=after,
        actual_seq_qlen=queries,
        actual_seq_kvlen=list(lengths),
        softmax_scale=spec.scale_for(q.shape[-1]),
        inner_precise=2 if mask is not None else 0,
    )
    taken = out.transpose(1, 2).reshape(batch * longest, *q.shape[1:]).index_select(0, where)
    if not need_lse:
        return taken, None
    return taken, lse[..., 0].transpose(1, 2).reshape(batch * longest, -1).index_select(0, where).t()


def _gathered(
    q: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    table: Tensor,
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
    spec: AttentionSpec,
    need_lse: bool,
    why: str = "queries of several tokens need pages of a multiple of 128 tokens, none of them behind a window",
) -> tuple[Tensor, Tensor | None]:
    note_detour("paged_attention", "ascend", "gathered keys and values", why)
    outs, lses = [], []
    for row, length in enumerate(lengths):
        queries = q[starts[row] : starts[row + 1]].transpose(0, 1).unsqueeze(0)
        if not queries.shape[2]:
            continue
        if not length:
            outs.append(torch.zeros_like(queries[0]))
            lses.append(queries.new_full(queries.shape[1:3], float("-inf"), dtype=torch.float32))
            continue
        k, v = (gather_pages(pages, table[row], length).unsqueeze(0).to(q.dtype) for pages in (k_pages, v_pages))
        out, lse = attention_ascend(queries, k, v, spec, need_lse=need_lse)
        outs.append(out[0])
        if lse is not None:
            lses.append(lse[0])
    return torch.cat(outs, dim=1).transpose(0, 1), torch.cat(lses, dim=1) if need_lse else None


def cache_append_ascend(k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, slots: Tensor) -> None:
    """ATB's ReshapeAndCache, which wants pages of (size, heads, channels): it gets each head of a page as a page.

    It writes no codes: those are written by operators of PyTorch.
    """
    if isinstance(k_pages, QuantizedPages):
        assert isinstance(v_pages, QuantizedPages)
        append_codes(k, v, k_pages, v_pages, slots)
        return
    assert isinstance(k_pages, Tensor) and isinstance(v_pages, Tensor)
    if not (k_pages.is_contiguous() and v_pages.is_contiguous() and k_pages.shape == v_pages.shape):
        note_detour("cache_append", "ascend", "plain PyTorch", "the pages are not contiguous, or differ in shape")
        cache_append_torch(k, v, k_pages, v_pages, slots)
        return
    if not k.shape[0]:
        return
    k, v = k.to(k_pages.dtype), v.to(v_pages.dtype)
    pages, heads, size, channels = k_pages.shape
    per_head = derived(slots, ("slots of heads", heads, size), lambda: _slots_of_heads(slots, heads, size))
    flat = [t.reshape(-1, 1, channels) for t in (k, v)]
    as_pages = [t.view(pages * heads, size, 1, channels) for t in (k_pages, v_pages)]
    torch.ops.atb._npu_reshape_and_cache(*flat, *as_pages, per_head)


def _slots_of_heads(slots: Tensor, heads: int, size: int) -> Tensor:
    """int32 (tokens * heads,): the slot of every head of a token, in pages of one head; -1 stays -1."""
    page, offset = slots.div(size, rounding_mode="floor"), slots.remainder(size)
    spread = (page * heads).unsqueeze(1) + torch.arange(heads, device=slots.device)
    spread = spread * size + offset.unsqueeze(1)
    return torch.where(slots.unsqueeze(1) < 0, -1, spread).to(torch.int32).flatten()


def rotary_append_ascend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    slots: Tensor,
    interleaved: bool,
) -> None:
    """npu_rotary_mul for queries (in place) and keys, then the write."""
    q.copy_(rotary_ascend(q, cos, sin, interleaved))
    cache_append_ascend(rotary_ascend(k, cos, sin, interleaved), v, k_pages, v_pages, slots)
