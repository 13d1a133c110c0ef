"""The registry's records of the native CPU kernels that write and read the pages of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.pages import Pages, parts
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import CacheAppendTraits, PagedAttentionTraits
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import AttentionStrategy, CacheStrategy

from .records import common_reasons, static_parts, visible_share

_OPS = torch.ops.atb_modules


def cache_append_cpu(k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, slots: Tensor) -> None:
    """Keys and values to their slots, converted on the way."""
    (k_memory, k_scales), (v_memory, v_scales) = parts(k_pages), parts(v_pages)
    _OPS.cache_append(k, v, k_memory, v_memory, slots, k_scales, v_scales)


def rotary_append_cpu(
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
    """Queries rotated in place, keys rotated on their way into the pages."""
    # Tables of a user may come in another dtype; ours are float32 and pass through.
    cos, sin = cos.float(), sin.float()
    (k_memory, k_scales), (v_memory, v_scales) = parts(k_pages), parts(v_pages)
    _OPS.rotary_append(q, k, v, cos, sin, k_memory, v_memory, slots, interleaved, k_scales, v_scales)


def paged_attention_cpu(
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
    """Reads the pages in place, only the tokens that some query sees."""
    (k_memory, k_scales), (v_memory, v_scales) = parts(k_pages), parts(v_pages)
    out, lse = _OPS.paged_attention(
        q,
        k_memory,
        v_memory,
        block_table,
        kv_lengths,
        cu_seqlens_q,
        sinks,
        alibi_slopes,
        spec.is_causal,
        *static_parts(spec, q.shape[-1]),
        k_scales,
        v_scales,
    )
    return out, lse if need_lse else None


def _page_reasons(traits: CacheAppendTraits | PagedAttentionTraits) -> list[str]:
    """Pages may hold int8 codes; anything else is as for all kernels."""
    pages = (traits.page_dtype,) if traits.page_dtype != torch.int8 else ()
    return common_reasons(traits.dtype, *pages)


def _append_reasons(spec: None, traits: CacheAppendTraits) -> tuple[str, ...]:
    return tuple(_page_reasons(traits))


def _paged_reasons(spec: AttentionSpec, traits: PagedAttentionTraits) -> tuple[str, ...]:
    reasons = _page_reasons(traits)
    if spec.has_overlays:
        reasons.append("the CPU kernel over pages knows causality and windows, not global tokens, a prefix or chunks")
    return tuple(reasons)


def _append_cost(spec: None, traits: CacheAppendTraits) -> Cost:
    elements = 2.0 * traits.tokens * traits.num_kv_heads * traits.head_dim
    return Cost(bytes=(traits.dtype.itemsize + traits.page_dtype.itemsize) * elements)


def _paged_cost(spec: AttentionSpec, traits: PagedAttentionTraits) -> Cost:
    kv_len = traits.max_blocks * traits.page_size
    q_len = max(traits.total // max(traits.batch, 1), 1)
    share = visible_share(spec, q_len, kv_len)
    read = 2.0 * traits.batch * traits.num_kv_heads * kv_len * traits.head_dim * traits.page_dtype.itemsize
    operations = 4.0 * traits.num_heads * traits.total * kv_len * traits.head_dim
    return Cost(operations=share * operations, bytes=share * read)


_CPU = ("cpu",)
register(
    Kernel(
        "cache_append", CacheStrategy.CPU, cache_append_cpu, _append_reasons, _append_cost, _CPU, transformable=False
    )
)
register(
    Kernel(
        "rotary_append", CacheStrategy.CPU, rotary_append_cpu, _append_reasons, _append_cost, _CPU, transformable=False
    )
)
register(
    Kernel(
        "paged_attention",
        AttentionStrategy.CPU,
        paged_attention_cpu,
        _paged_reasons,
        _paged_cost,
        _CPU,
        transformable=False,
    )
)
