"""What the attention ops ask of their arguments, and the traits that they build of them."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.attention.tables import check_devices, check_slots
from atb_modules.checks import check_probability, check_tensor, check_type
from atb_modules.kernels.pages import Pages, QuantizedPages
from atb_modules.kernels.traits import (
    AttentionTraits,
    CacheAppendTraits,
    PagedAttentionTraits,
    under_autocast,
)
from atb_modules.overlays import Overlays
from atb_modules.reach import seen_pairs
from atb_modules.spec import AttentionSpec, Causal

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast q and k often come as float32 (normed, rotated) and v as bfloat16: one dtype for all."""
    device_type = q.device.type
    if under_autocast(device_type) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def attention_traits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    mask: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    overlays: Overlays | None,
    dropout_p: float,
    need_lse: bool,
) -> AttentionTraits:
    """Raises where the arguments do not fit each other; else what kernels may know of the call."""
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
    if overlays is not None or spec.block_size is not None:
        _check_overlays(overlays if overlays is not None else Overlays(), spec, q, kv_len)
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
        segments=0 if overlays is None or overlays.cu_seqlens_q is None else overlays.cu_seqlens_q.numel() - 1,
        has_images=overlays is not None and overlays.image_ids is not None,
        has_block_mask=overlays is not None and overlays.block_mask is not None,
        seen=seen_pairs(spec, overlays, (batch, num_heads, q_len, kv_len)),
        dropout=dropout_p > 0.0,
        need_lse=need_lse,
        requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        bias_requires_grad=torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in (mask, alibi_slopes)),
        contiguous=q.is_contiguous() and k.is_contiguous() and v.is_contiguous(),
    )


def paged_traits(
    q, k_pages, v_pages, block_table, kv_lengths, cu_seqlens_q, spec, sinks, alibi_slopes, need_lse
) -> PagedAttentionTraits:
    check_layout("q", q, 3, "(total, heads, head_dim)")
    check_pages(k_pages, v_pages)
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
    tables = {"block_table": block_table, "kv_lengths": kv_lengths, "cu_seqlens_q": cu_seqlens_q}
    check_devices("q", q.device, k_pages=k_pages, v_pages=v_pages, **tables)
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


def check_pages(k_pages: object, v_pages: object) -> None:
    """Pages as tensors, or both as ``QuantizedPages``, which have checked themselves."""
    if isinstance(k_pages, QuantizedPages) and isinstance(v_pages, QuantizedPages):
        return
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if isinstance(pages, QuantizedPages):
            raise TypeError(f"{name} is QuantizedPages, the other pages are a tensor; allowed: both or neither")
        check_layout(name, pages, 4, "(num_pages, kv_heads, page_size, head_dim)")


def append_traits(
    k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, slots: Tensor, rotary: bool, trusted: bool
) -> CacheAppendTraits:
    check_pages(k_pages, v_pages)
    for name, tensor, pages in (("k", k, k_pages), ("v", v, v_pages)):
        check_layout(name, tensor, 3, "(tokens, kv_heads, head_dim)")
        if tensor.shape[0] != k.shape[0] or tensor.shape[1] != pages.shape[1] or tensor.shape[2] != pages.shape[3]:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}; pages of {pages.shape[1]} heads of {pages.shape[3]} channels take "
                f"({k.shape[0]}, {pages.shape[1]}, {pages.shape[3]})"
            )
    check_devices("k", k.device, v=v, k_pages=k_pages, v_pages=v_pages)
    if not trusted:
        check_slots(slots, k.shape[0], k_pages.shape[0] * k_pages.shape[2])
    check_devices("k", k.device, slots=slots)
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


def empty_attention(q, k, v, sinks, return_lse) -> tuple[Tensor, Tensor | None]:
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


def check_layout(name: str, tensor: object, dims: int, layout: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; allowed: a tensor {layout}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: {dims} axes {layout}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is {tensor.layout}; allowed: torch.strided, a dense tensor")
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


def _check_overlays(overlays: Overlays, spec: AttentionSpec, q: Tensor, kv_len: int) -> None:
    batch, num_heads, q_len, _ = q.shape
    overlays.check(batch, num_heads, q_len, kv_len, spec.block_size)
    for name, tensor in vars(overlays).items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}; q is on {q.device}, they must be equal")


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
