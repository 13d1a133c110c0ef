"""The functional attention ops: validate once, build traits, resolve a kernel, call it."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules import kernels  # noqa: F401  (registers every kernel)
from atb_modules.attention.tables import check_rotated, check_slots, check_tables
from atb_modules.checks import check_probability, check_tensor, check_type
from atb_modules.kernels.registry import resolve
from atb_modules.kernels.traits import (
    AttentionTraits,
    CacheAppendTraits,
    PagedAttentionTraits,
    overlaps_itself,
    under_autocast,
)
from atb_modules.spec import AttentionSpec, Causal

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DENSE = AttentionSpec()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec = _DENSE,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
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
        spec: the static structure: causality, window, scale, softcap.
        mask: bool (True = may attend) or floating (added to the scores), broadcasting to
            (batch, num_heads, q_len, kv_len).
        sinks: (num_heads,) logits that join each softmax and take weight to nowhere (GPT-OSS).
        alibi_slopes: (num_heads,) slopes of ALiBi.
        dropout_p: probability of dropping an attention weight.
        return_lse: whether the log-sum-exp of each row is wanted.
        strategy: an ``AttentionStrategy`` or its word.

    Returns:
        out (batch, num_heads, q_len, value_dim) in q's dtype; lse (batch, num_heads, q_len), natural logarithm, or
        None where it was not asked for. A row that sees no key gives output 0, LSE -inf and gradients 0.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or devices, or a strategy that cannot serve the call.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, 4, "(batch, heads, seq, head_dim)")
    check_type("spec", spec, AttentionSpec)
    q, k, v = _autocast(q, k, v)
    traits = _attention_traits(q, k, v, mask, sinks, alibi_slopes, dropout_p, return_lse)
    if traits.batch == 0 or traits.q_len == 0 or traits.kv_len == 0:
        return _empty_attention(q, k, v, sinks, return_lse)
    kernel = resolve("attention", spec, traits, strategy)
    if kernel.needs_contiguous:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return kernel.function(
        q,
        k,
        v,
        spec,
        mask=mask,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        need_lse=return_lse,
    )


def paged_attention(
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
    return_lse: bool = False,
    strategy: str = "auto",
    trusted: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of packed queries over a paged cache: decode and (chunked) prefill in one call. Not differentiable.

    Args:
        q: (total, num_heads, head_dim), the new tokens of all rows one after the other.
        k_pages, v_pages: (num_pages, num_kv_heads, page_size, head_dim).
        block_table: int32 (batch, max_blocks), the page of each block of page_size tokens, -1 where freed or unused.
        kv_lengths: int32 (batch,), tokens in the cache, the new ones included.
        cu_seqlens_q: int32 (batch + 1,), where each row's queries begin.
        spec: causal (bottom-right) or not, window, scale, softcap.
        sinks, alibi_slopes: (num_heads,).
        trusted: whether tables and lengths come from a cache's step and need no look at their values.

    Returns:
        out (total, num_heads, head_dim); lse (num_heads, total) or None where it was not asked for.
    """
    traits = _paged_traits(
        q, k_pages, v_pages, block_table, kv_lengths, cu_seqlens_q, spec, sinks, alibi_slopes, return_lse
    )
    if not trusted:
        if k_pages.device != q.device or v_pages.device != q.device:
            raise ValueError(f"k_pages are on {k_pages.device}, v_pages on {v_pages.device}; q is on {q.device}")
        check_tables(block_table, kv_lengths, cu_seqlens_q, spec, traits.total, k_pages.shape[0], traits.page_size)
    if traits.total == 0:
        lse = torch.empty(traits.num_heads, 0, device=q.device) if return_lse else None
        return q.new_empty(0, traits.num_heads, v_pages.shape[-1]), lse
    kernel = resolve("paged_attention", spec, traits, strategy)
    with torch.no_grad():
        return kernel.function(
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


def cache_append(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    strategy: str = "auto",
    trusted: bool = False,
) -> None:
    """Write k, v (tokens, num_kv_heads, head_dim) to ``slots`` (tokens,) of the pages, rounding to their dtype.

    ``slots`` are page * page_size + offset, -1 for a token that is not written; ``trusted`` as in ``paged_attention``.
    """
    traits = _append_traits(k, v, k_pages, v_pages, slots, rotary=False, trusted=trusted)
    kernel = resolve("cache_append", None, traits, strategy)
    with torch.no_grad():
        kernel.function(k, v, k_pages, v_pages, slots)


def rotary_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
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
        _check_tensor("q", q, 3, "(tokens, heads, head_dim)")
        _check_tensor("k", k, 3, "(tokens, kv_heads, head_dim)")
        check_rotated(q, k, cos, sin)
    if overlaps_itself(q):
        raise ValueError(f"q is expanded (strides {q.stride()}); it is rotated in place and needs memory of its own")
    traits = _append_traits(k, v, k_pages, v_pages, slots, rotary=True, trusted=trusted)
    kernel = resolve("rotary_append", None, traits, strategy)
    with torch.no_grad():
        kernel.function(q, k, v, cos, sin, k_pages, v_pages, slots, interleaved)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast q and k often come as float32 (normed, rotated) and v as bfloat16: one dtype for all."""
    device_type = q.device.type
    if under_autocast(device_type) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _attention_traits(q, k, v, mask, sinks, alibi_slopes, dropout_p, need_lse) -> AttentionTraits:
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len = k.shape[1], k.shape[2]
    if k.shape[0] != batch or v.shape[0] != batch:
        raise ValueError(f"k and v have batch {k.shape[0]} and {v.shape[0]}; q has {batch}, they must be equal")
    if not head_dim:
        raise ValueError("q has head_dim 0; allowed: at least 1")
    if k.shape[3] != head_dim:
        raise ValueError(f"k has head_dim {k.shape[3]}; q has {head_dim}, they must be equal")
    if v.shape[2] != kv_len:
        raise ValueError(f"v has {v.shape[2]} tokens; k has {kv_len}, they must be equal")
    if v.shape[1] != num_kv_heads:
        raise ValueError(f"v has {v.shape[1]} heads; k has {num_kv_heads}, they must be equal")
    _check_groups(num_heads, num_kv_heads)
    _check_same(q, k=k, v=v)
    if type(dropout_p) is not float or not 0.0 <= dropout_p < 1.0:
        check_probability("dropout_p", dropout_p)
    _check_mask(mask, q, (batch, num_heads, q_len, kv_len))
    for name, tensor in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        _check_per_head(name, tensor, num_heads, q.device)
    tensors = [t for t in (q, k, v, mask, sinks, alibi_slopes) if t is not None]
    return AttentionTraits(
        device_type=q.device.type,
        dtype=q.dtype,
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=v.shape[3],
        mask="none" if mask is None else "bool" if mask.dtype == torch.bool else "float",
        mask_elements=0 if mask is None else mask.numel(),
        has_sinks=sinks is not None,
        has_alibi=alibi_slopes is not None,
        dropout=dropout_p > 0.0,
        need_lse=need_lse,
        requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        contiguous=q.is_contiguous() and k.is_contiguous() and v.is_contiguous(),
    )


def _paged_traits(
    q, k_pages, v_pages, block_table, kv_lengths, cu_seqlens_q, spec, sinks, alibi_slopes, need_lse
) -> PagedAttentionTraits:
    _check_tensor("q", q, 3, "(total, heads, head_dim)")
    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        _check_tensor(name, tensor, 4, "(num_pages, kv_heads, page_size, head_dim)")
    total, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1], k_pages.shape[2]
    if k_pages.shape[3] != head_dim or v_pages.shape[:3] != k_pages.shape[:3]:
        raise ValueError(
            f"k_pages is {tuple(k_pages.shape)} and v_pages {tuple(v_pages.shape)}; they must agree with each "
            f"other and with q's head_dim {head_dim}"
        )
    _check_groups(num_heads, num_kv_heads)
    for name, tensor in (("block_table", block_table), ("kv_lengths", kv_lengths), ("cu_seqlens_q", cu_seqlens_q)):
        if not isinstance(tensor, Tensor):
            check_tensor(name, tensor, "a tensor of torch.int32")
    if not isinstance(spec, AttentionSpec):
        check_type("spec", spec, AttentionSpec)
    if spec.causal is Causal.TOP_LEFT:
        raise ValueError("causal is 'top_left'; a paged cache allows 'bottom_right' or 'none'")
    if block_table.dim() != 2:
        raise ValueError(f"block_table has shape {tuple(block_table.shape)}; allowed: (batch, max_blocks)")
    batch = kv_lengths.shape[0] if kv_lengths.dim() == 1 else -1
    for name, tensor, shape in (
        ("block_table", block_table, (batch, block_table.shape[-1])),
        ("kv_lengths", kv_lengths, (batch,)),
        ("cu_seqlens_q", cu_seqlens_q, (batch + 1,)),
    ):
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; allowed: torch.int32 {shape}")
    for name, tensor in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        _check_per_head(name, tensor, num_heads, q.device)
    return PagedAttentionTraits(
        device_type=q.device.type,
        dtype=q.dtype,
        page_dtype=k_pages.dtype,
        batch=batch,
        total=total,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_blocks=block_table.shape[1],
        has_sinks=sinks is not None,
        has_alibi=alibi_slopes is not None,
        need_lse=need_lse,
        contiguous=q.is_contiguous(),
    )


def _append_traits(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, rotary: bool, trusted: bool
) -> CacheAppendTraits:
    for name, tensor, pages in (("k", k, k_pages), ("v", v, v_pages)):
        _check_tensor(name, tensor, 3, "(tokens, kv_heads, head_dim)")
        _check_tensor(f"{name}_pages", pages, 4, "(num_pages, kv_heads, page_size, head_dim)")
        if tensor.shape[0] != k.shape[0] or tensor.shape[1] != pages.shape[1] or tensor.shape[2] != pages.shape[3]:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}; pages of {pages.shape[1]} heads of {pages.shape[3]} channels take "
                f"({k.shape[0]}, {pages.shape[1]}, {pages.shape[3]})"
            )
    if not trusted:
        if not k.device == v.device == k_pages.device == v_pages.device:
            raise ValueError(
                f"k is on {k.device}, v on {v.device}, k_pages on {k_pages.device} and v_pages on {v_pages.device}; "
                "they must be equal"
            )
        check_slots(slots, k.shape[0], k_pages.shape[0] * k_pages.shape[2])
    return CacheAppendTraits(
        device_type=k.device.type,
        dtype=k.dtype,
        page_dtype=k_pages.dtype,
        tokens=k.shape[0],
        num_kv_heads=k.shape[1],
        head_dim=k.shape[2],
        rotary=rotary,
        contiguous=k.is_contiguous(),
    )


def _empty_attention(q, k, v, sinks, return_lse) -> tuple[Tensor, Tensor | None]:
    """No query or no key: zeros that stay connected to the graph, so that gradients are zeros and not missing."""
    batch, num_heads, q_len, _ = q.shape
    nothing = torch.ones((), dtype=torch.bool, device=q.device)
    zero = q[..., :1].masked_fill(nothing, 0.0) + 0.0 * (k[..., :0].sum() + v[..., :0].sum())
    out = zero.expand(batch, num_heads, q_len, v.shape[-1]).contiguous()
    if k.shape[2] == 0:
        out = out + k.sum() + v.sum()
    if not return_lse:
        return out, None
    compute = torch.promote_types(q.dtype, torch.float32)
    lse = torch.full((batch, num_heads, q_len), float("-inf"), device=q.device, dtype=compute)
    if sinks is not None:
        lse = sinks.to(compute).reshape(1, -1, 1).expand(batch, num_heads, q_len)
    return out, lse


def _check_tensor(name: str, tensor: object, dims: int, layout: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; allowed: a tensor {layout}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: {dims} axes {layout}")
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{name} is {tensor.dtype}; allowed: {', '.join(map(str, FLOATING))}")


def _check_groups(num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_heads} heads and k has {num_kv_heads}; the first must be a multiple of the second"
        )


def _check_same(q: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} is {tensor.dtype}; q is {q.dtype}, they must be equal")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}; q is on {q.device}, they must be equal")


def _check_mask(mask: Tensor | None, q: Tensor, full: tuple[int, ...]) -> None:
    if mask is None:
        return
    check_tensor("mask", mask, "a tensor or None")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise TypeError(f"mask is {mask.dtype}; allowed: torch.bool (True = may attend) or floating (added)")
    if mask.device != q.device:
        raise ValueError(f"mask is on {mask.device}; q is on {q.device}, they must be equal")
    if mask.dim() > 4 or any(
        have != 1 and have != want for have, want in zip(reversed(mask.shape), reversed(full), strict=False)
    ):
        raise ValueError(f"mask has shape {tuple(mask.shape)}; it must broadcast to {full}")


def _check_per_head(name: str, tensor: Tensor | None, num_heads: int, device: torch.device) -> None:
    if tensor is None:
        return
    if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
        check_tensor(name, tensor, "a tensor or None")
        raise TypeError(f"{name} is {tensor.dtype}; allowed: a floating dtype")
    if tuple(tensor.shape) != (num_heads,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: ({num_heads},), one a query head")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; q is on {device}, they must be equal")
