"""ATB's attention of a decode step over pages, with separate keys and values or with the latent of MLA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.errors import NoReferenceError
from atb_modules.testing.npu.references.attention_math import attend
from atb_modules.testing.npu.references.pages import gather_pages
from atb_modules.testing.npu.references.registry import reference
from atb_modules.testing.npu.references.rules import (
    HALVES,
    is_310p,
    require_contiguous,
    require_dtype,
    require_not_310p,
    require_same_dtype,
)


def _decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    table: Tensor,
    lengths: Sequence[int],
    kv_heads: int,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one query token a sequence: query (tokens, heads, D), pages (blocks, block_size, kv heads, D)."""
    require(table.dtype == torch.int32, f"block_table is {table.dtype}; int32")
    require(table.dim() == 2 and table.shape[0] == query.shape[0], "block_table must be (tokens, max_blocks)")
    require(len(lengths) == query.shape[0], f"{len(lengths)} context lengths for {query.shape[0]} tokens")
    block_size = keys.shape[1]
    require(max(lengths, default=0) <= table.shape[1] * block_size, "block_table has too few columns for a context")
    require(min(lengths, default=0) >= 0, "a context length is negative")
    parts = []
    for place, length in enumerate(lengths):
        k, v = (gather_pages(p.transpose(1, 2), table[place], length, block_size, kv_heads) for p in (keys, values))
        out, top, total = attend(query[place][:, None], k, v, None, scale)
        parts.append((out[:, 0], (top + total.log())[:, 0]))
    if not parts:
        return query.new_empty(query.shape), query.new_empty(*query.shape[:2], 1)
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def _check_pages(query: Tensor, keys: Tensor, values: Tensor, heads: int, kv_heads: int) -> None:
    require_dtype("query", query, HALVES)
    require_same_dtype(query=query, key_cache=keys, value_cache=values)
    require_contiguous(query=query, key_cache=keys, value_cache=values)
    require(query.dim() == 3 and query.shape[1] == heads, f"query must be (tokens, num_heads {heads}, D)")
    require(keys.dim() == values.dim() == 4, "the caches must be (blocks, block_size, kv heads, D)")
    require(keys.shape[2] == values.shape[2] == kv_heads, f"the caches must have num_kv_heads {kv_heads} in axis 2")
    require(keys.shape[:2] == values.shape[:2], "the caches must agree in blocks and block_size")
    require(heads % kv_heads == 0, f"num_heads {heads} is no multiple of num_kv_heads {kv_heads}")
    block_size, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    require(key_dim == query.shape[2], f"query has D {query.shape[2]}, key_cache {key_dim}")
    require(block_size % 16 == 0 and block_size <= 256, f"block_size is {block_size}; a multiple of 16 up to 256")
    if is_310p():
        require(query.dtype == torch.float16, "310P takes float16 only")
        require(key_dim == value_dim <= 256, "310P takes equal D of key and value up to 256")
        small = block_size * key_dim <= 128 * 128
        require(small, f"block_size * D is {block_size * key_dim}; at most 16384 on 310P")
    require(max(key_dim, value_dim) <= 576, f"D is {max(key_dim, value_dim)}; at most 576")
    small = block_size <= 128 or max(key_dim, value_dim) <= 256
    require(small, "where D exceeds 256, block_size must not exceed 128")


@reference("atb::_npu_paged_attention")
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    workspace: Tensor | None = None,
) -> None:
    """Docs (of the second version): "the attention score over a paged kvcache"; "block_table: the elements must lie
    in [0, num_blocks)"; "context_lens: tokens of key and value of each query", int32; "block_size % 16 == 0,
    recommended 128"; "head_size (0, 576], block_size at most 128 where it exceeds 256"; "on 310P head_size at most
    256 and block_size * head_size at most 128 * 128, float16 only". A context of 0 gives 0.
    """
    _check_pages(query, key_cache, value_cache, num_heads, num_kv_heads)
    require(context_lens.dtype == torch.int32, f"context_lens is {context_lens.dtype}; int32")
    lengths = [int(length) for length in context_lens.tolist()]
    result, _ = _decode(query, key_cache, value_cache, scale_value, block_table, lengths, num_kv_heads)
    _put(result, out, query)


@reference("atb::_npu_paged_attention_v2.out")
def paged_attention_v2(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    context_lens: Sequence[int],
    value_cache: Tensor | None = None,
    num_kv_heads: int = 0,
    num_heads: int = 0,
    scale_value: float = 1.0,
    mask_type: int = 0,
    workspace: Tensor | None = None,
    *,
    out: Tensor,
) -> Tensor:
    """The same with lengths as numbers of the host. "num_heads: the default cannot be used"."""
    require(value_cache is not None, "value_cache is needed")
    require(num_heads > 0, "num_heads must be given")
    assert value_cache is not None
    _check_pages(query, key_cache, value_cache, num_heads, num_kv_heads)
    lengths = [int(length) for length in context_lens]
    result, _ = _decode(query, key_cache, value_cache, scale_value, block_table, lengths, num_kv_heads)
    _put(result, out, query)
    return out


@reference("atb::_npu_paged_attention_mla")
def paged_attention_mla(
    query: Tensor,
    key_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    mla_vheadsize: int,
    out: Tensor,
) -> None:
    """PagedAttention with one cache for latent and rotary channels: the values are the first ``mla_vheadsize``
    channels of the keys ("the cache's D up to 576, block_size at most 128 there").
    """
    require_not_310p()
    channels = key_cache.shape[3]
    require(mla_vheadsize <= channels, f"mla_vheadsize is {mla_vheadsize}, the cache holds {channels} channels")
    values = key_cache[..., :mla_vheadsize]
    _check_pages(query, key_cache, key_cache, num_heads, num_kv_heads)
    lengths = [int(length) for length in context_lens.tolist()]
    result, _ = _decode(query, key_cache, values, scale_value, block_table, lengths, num_kv_heads)
    _put(result, out, query)


@reference("atb::npu_multi_head_latent_attention")
def multi_head_latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    ctkv: Tensor,
    k_rope: Tensor,
    block_tables: Tensor,
    context_lens: Sequence[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    mask_type: str | None = None,
    calc_type: str | None = None,
    cache_mode: str | None = None,
) -> Tensor:
    """Docs: "q_nope (tokens, heads, 512), q_rope (tokens, heads, 64), ctkv (blocks, block_size, kv_heads, 512), k_rope
    (blocks, block_size, kv_heads, 64)"; "cache_mode 'krope_ctkv' by default"; "block_size <= 128, batch <= 8192". The
    values are the latent itself.
    """
    return _latent(q_nope, q_rope, ctkv, k_rope, block_tables, context_lens, q_headnum, qk_scale, kv_headnum,
                   mask_type, calc_type, cache_mode)[0]  # fmt: skip


@reference("atb::npu_multi_head_latent_attention.lse")
def multi_head_latent_attention_lse(
    q_nope: Tensor,
    q_rope: Tensor,
    ctkv: Tensor,
    k_rope: Tensor,
    block_tables: Tensor,
    context_lens: Sequence[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    return_lse: bool,
    mask_type: str | None = None,
    calc_type: str | None = None,
    cache_mode: str | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same with the LSE (tokens, heads, 1), in the query's dtype."""
    out, lse = _latent(q_nope, q_rope, ctkv, k_rope, block_tables, context_lens, q_headnum, qk_scale, kv_headnum,
                       mask_type, calc_type, cache_mode)  # fmt: skip
    return out, lse.to(q_nope.dtype) if return_lse else q_nope.new_empty(0)


def _latent(
    q_nope: Tensor,
    q_rope: Tensor,
    ctkv: Tensor,
    k_rope: Tensor,
    table: Tensor,
    lengths: Sequence[int],
    heads: int,
    scale: float,
    kv_heads: int,
    mask_type: str | None,
    calc_type: str | None,
    cache_mode: str | None,
) -> tuple[Tensor, Tensor]:
    require_not_310p()
    require(cache_mode in (None, "krope_ctkv"), f"cache_mode is {cache_mode!r}; only 'krope_ctkv' is emulated")
    require(mask_type in (None, "undefined"), f"mask_type is {mask_type!r}; 'undefined'")
    require(calc_type in (None, "calc_type_undefined"), f"calc_type is {calc_type!r}; 'calc_type_undefined'")
    require_dtype("q_nope", q_nope, HALVES)
    require_same_dtype(q_nope=q_nope, q_rope=q_rope, ctkv=ctkv, k_rope=k_rope)
    shapes = q_nope.shape[1:] == (heads, 512) and q_rope.shape[1:] == (heads, 64)
    require(shapes, f"q_nope must be (tokens, {heads}, 512) and q_rope (tokens, {heads}, 64)")
    caches = ctkv.shape[2:] == (kv_heads, 512) and k_rope.shape[2:] == (kv_heads, 64)
    require(caches, f"ctkv must be (blocks, block_size, {kv_heads}, 512) and k_rope (..., 64)")
    require(ctkv.shape[1] <= 128, f"block_size is {ctkv.shape[1]}; at most 128")
    require(q_nope.shape[0] <= 8192, f"batch is {q_nope.shape[0]}; at most 8192")
    query, keys = torch.cat((q_nope, q_rope), -1), torch.cat((ctkv, k_rope), -1)
    out, lse = _decode(query, keys, ctkv, scale, table, [int(length) for length in lengths], kv_heads)
    return out.to(q_nope.dtype), lse


@reference("atb::_npu_flash_attention_qlens")
def flash_attention_qlens(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    context_lens: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: Tensor,
) -> None:
    """Prefill over pages. Pages of 16, 32 and 64 give wrong output in silence on A3 (reported and measured in public:
    sglang issue 38196), 128 is right; refused here so that it shows.
    """
    require(key_cache.shape[1] >= 128, f"block_size is {key_cache.shape[1]}; below 128 the output is silently wrong")
    raise NoReferenceError("atb::_npu_flash_attention_qlens: only its rule of block sizes is emulated")


def _put(result: Tensor, out: Tensor, query: Tensor) -> None:
    require(out.shape == result.shape, f"out has shape {tuple(out.shape)}, the result {tuple(result.shape)}")
    require_same_dtype(query=query, out=out)
    out.copy_(result)
