"""The functional attention ops: validate once, build traits, resolve a kernel, call it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from atb_modules import kernels  # noqa: F401  (registers every kernel)
from atb_modules.attention.calls import (
    append_traits,
    attention_traits,
    autocast,
    check_layout,
    empty_attention,
    paged_traits,
)
from atb_modules.attention.tables import check_devices, check_rotated, check_tables
from atb_modules.checks import check_bool, check_int, check_type
from atb_modules.kernels.pages import Pages
from atb_modules.kernels.registry import resolve
from atb_modules.kernels.traits import overlaps_itself
from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec

_NO_STRUCTURE = AttentionSpec()
DENSE, PACKED = "(batch, heads, seq, head_dim)", "(total, heads, head_dim)"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec = _NO_STRUCTURE,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    image_ids: Tensor | None = None,
    block_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    strategy: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attention of queries over keys and values: returns ``(out, lse)``.

    Args:
        q: (batch, num_heads, q_len, head_dim).
        k: (batch, num_kv_heads, kv_len, head_dim); num_heads is a multiple of num_kv_heads, and query head h reads
            key head ``h // (num_heads / num_kv_heads)``.
        v: (batch, num_kv_heads, kv_len, value_dim).
        spec: the static structure: causality, window, global tokens, prefix, chunks, scale, softcap.
        mask: bool (True = may attend) or floating (added to the scores), broadcasting to
            (batch, num_heads, q_len, kv_len). Hide keys with -inf: where every key of a row has a huge finite number
            (``finfo.min``, -1e9) the row is not empty, and its gradients drown in its float32 LSE, as in torch's SDPA.
        sinks: (num_heads,) logits that join each softmax and take weight to nowhere (GPT-OSS).
        alibi_slopes: (num_heads,) slopes of ALiBi.
        cu_seqlens_q, cu_seqlens_k: int32 (segments + 1,), where each sequence of a packed batch begins; a query sees
            its own segment alone. q, k, v are then (total, heads, head_dim), out too, and lse is (num_heads, total);
            or (1, heads, total, head_dim) as above.
        image_ids: int (batch or 1, kv_len); equal numbers >= 0 side by side are one image, whose tokens see each other
            whatever causality and window say.
        block_mask: bool (batch or 1, num_heads or 1, q_blocks, kv_blocks) over blocks of
            ``spec.block_size``, True = live.
        dropout_p: probability of dropping an attention weight.
        return_lse: whether the log-sum-exp of each row is wanted.
        strategy: an ``AttentionStrategy`` or its word.

    Returns:
        out (batch, num_heads, q_len, value_dim) in q's dtype; lse (batch, num_heads, q_len), natural logarithm, or
        None where it was not asked for. A row that sees no key gives output 0, LSE -inf and gradients 0.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or devices, or a strategy that cannot serve the call.
    """
    check_type("spec", spec, AttentionSpec)
    check_bool("return_lse", return_lse)
    packed = cu_seqlens_q is not None and isinstance(q, Tensor) and q.dim() == 3
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_layout(name, tensor, 3 if packed else 4, PACKED if packed else DENSE)
    if packed:
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    q, k, v = autocast(q, k, v)
    overlays = None
    if cu_seqlens_q is not None or cu_seqlens_k is not None or image_ids is not None or block_mask is not None:
        overlays = Overlays(cu_seqlens_q, cu_seqlens_k, image_ids, block_mask)
    traits = attention_traits(q, k, v, spec, mask, sinks, alibi_slopes, overlays, dropout_p, return_lse)
    if traits.batch == 0 or traits.q_len == 0 or traits.kv_len == 0:
        out, lse = empty_attention(q, k, v, sinks, return_lse)
    else:
        kernel = resolve("attention", spec, traits, strategy)
        if kernel.needs_contiguous:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        options = {"mask": mask, "sinks": sinks, "alibi_slopes": alibi_slopes, "overlays": overlays}
        out, lse = kernel.function(q, k, v, spec, **options, dropout_p=dropout_p, need_lse=return_lse)
    if packed:
        return out[0].transpose(0, 1), None if lse is None else lse[0]
    return out, lse


def paged_attention(
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
    return_lse: bool = False,
    value_dim: int | None = None,
    strategy: str = "auto",
    trusted: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of packed queries over a paged cache: decode and (chunked) prefill in one call. Not differentiable.

    Args:
        q: (total, num_heads, head_dim), the new tokens of all rows one after the other.
        k_pages, v_pages: (num_pages, num_kv_heads, page_size, head_dim), or both as ``QuantizedPages``.
        block_table: int32 (batch, max_blocks), the page of each block of page_size tokens, -1 where freed or unused.
        kv_lengths: int32 (batch,), tokens in the cache, the new ones included.
        cu_seqlens_q: int32 (batch + 1,), where each row's queries begin.
        spec: causal (bottom-right) or not, window, scale, softcap.
        sinks, alibi_slopes: (num_heads,).
        value_dim: how many of the values' first channels are wanted; None for all. With k_pages given as v_pages, too,
            it is the size of the latent that a cache of latent attention holds beside its rotated keys.
        trusted: whether tables and lengths come from a cache's step and need no look at their values.

    Returns:
        out (total, num_heads, head_dim or value_dim); lse (num_heads, total) or None where it was not asked for.
    """
    traits = paged_traits(
        q, k_pages, v_pages, block_table, kv_lengths, cu_seqlens_q, spec, sinks, alibi_slopes, return_lse
    )
    channels = v_pages.shape[-1]
    if value_dim is not None:
        check_int("value_dim", value_dim, most=channels)
        channels = value_dim
        if k_pages is v_pages and isinstance(k_pages, Tensor):
            traits = dataclasses.replace(traits, latent_dim=value_dim)
    if not trusted:
        if k_pages.device != q.device or v_pages.device != q.device:
            raise ValueError(f"k_pages are on {k_pages.device}, v_pages on {v_pages.device}; q is on {q.device}")
        check_tables(block_table, kv_lengths, cu_seqlens_q, spec, traits.total, k_pages.shape[0], traits.page_size)
    if traits.total == 0:
        lse = torch.empty(traits.num_heads, 0, device=q.device) if return_lse else None
        return q.new_empty(0, traits.num_heads, channels), lse
    kernel = resolve("paged_attention", spec, traits, strategy)
    with torch.no_grad():
        out, lse = kernel.function(
            q.contiguous() if kernel.needs_contiguous else q,
            k_pages,
            v_pages,
            block_table,
            kv_lengths,
            cu_seqlens_q,
            spec,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            need_lse=return_lse,
        )
    return out[..., :channels], lse


def cache_append(
    k: Tensor,
    v: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    slots: Tensor,
    *,
    strategy: str = "auto",
    trusted: bool = False,
) -> None:
    """Write k, v (tokens, num_kv_heads, head_dim) to ``slots`` (tokens,) of the pages, rounding to their dtype.

    ``slots`` are page * page_size + offset, -1 for a token that is not written; ``trusted`` as in ``paged_attention``.
    """
    traits = append_traits(k, v, k_pages, v_pages, slots, rotary=False, trusted=trusted)
    kernel = resolve("cache_append", None, traits, strategy)
    with torch.no_grad():
        kernel.function(k, v, k_pages, v_pages, slots)


def rotary_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    slots: Tensor,
    *,
    interleaved: bool,
    strategy: str = "auto",
    trusted: bool = False,
) -> None:
    """Rotate q (tokens, num_heads, head_dim) in place, and write rotated k and plain v to the pages.

    cos, sin: (tokens, rotary_dim / 2) float32. slots and trusted: see ``cache_append``.
    """
    if not trusted:
        check_layout("q", q, 3, "(tokens, heads, head_dim)")
        check_layout("k", k, 3, "(tokens, kv_heads, head_dim)")
        check_rotated(q, k, cos, sin)
    check_devices("k", k.device, q=q, cos=cos, sin=sin)
    check_bool("interleaved", interleaved)
    if overlaps_itself(q):
        raise ValueError(f"q is expanded (strides {q.stride()}); it is rotated in place and needs memory of its own")
    traits = append_traits(k, v, k_pages, v_pages, slots, rotary=True, trusted=trusted)
    kernel = resolve("rotary_append", None, traits, strategy)
    with torch.no_grad():
        kernel.function(q, k, v, cos, sin, k_pages, v_pages, slots, interleaved)
