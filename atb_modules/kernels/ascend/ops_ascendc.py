"""Our Ascend C kernels behind the registry's signatures: ``torch.ops.atb_modules.ascend_*`` of the built binding."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from atb_modules.kernels.ascend import ascendc
from atb_modules.kernels.ascend.rules import recorded
from atb_modules.kernels.host_values import host_values
from atb_modules.kernels.pages import Pages
from atb_modules.kernels.registry import note_detour
from atb_modules.kernels.torch.cache import rotary_append_torch
from atb_modules.kernels.torch.norm import add_rms_norm_torch, rms_norm_torch
from atb_modules.kernels.torch.norm_linear import norm_linear_torch
from atb_modules.kernels.torch.paged import paged_attention_eager
from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec

_OPS = torch.ops.atb_modules


@functools.cache
def _why_not() -> str:
    try:
        there = ascendc.load()
    except OSError as error:
        return f"the library of our Ascend C kernels does not load: {error}"
    return "" if there else "our Ascend C kernels are not built here (see atb_modules.kernels.ascend.ascendc)"


def unbuilt_reason() -> str:
    """Why the ops are not there; empty where they are."""
    if ascendc.loaded():
        return ""
    if torch.compiler.is_compiling():  # which can look for no file
        return "our Ascend C kernels are not loaded, and a traced graph loads no library"
    return _why_not()


def rms_norm_ascend_c(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, cast_first: bool = False
) -> Tensor:
    """One pass over each row, statistics in float32, weights that count from 0 or 1, either order of rounding."""
    if not x.numel():
        return rms_norm_torch(x, weight, eps, weight_offset, cast_first)
    if weight is not None and weight.dtype != x.dtype and cast_first:  # rounded, then times a wider weight
        normed = rms_norm_ascend_c(x, None, eps)
        return (normed * (weight.float() + weight_offset)).to(x.dtype)
    wide = weight is not None and weight.dtype != x.dtype
    rows = (x.float() if wide else x).reshape(-1, x.shape[-1]).contiguous()
    scale = None if weight is None else weight.to(rows.dtype)
    keep = recorded(x, weight)
    normed, _ = _OPS.ascend_rms_norm(rows, scale, eps, weight_offset, cast_first, keep)
    return normed.to(x.dtype).reshape(x.shape)


def add_rms_norm_ascend_c(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """The sum and its norm: each input read once, each output written once."""
    if not x.numel():
        return add_rms_norm_torch(x, residual, weight, eps, weight_offset, cast_first)
    if weight is not None and weight.dtype != x.dtype:
        total = x + residual
        return rms_norm_ascend_c(total, weight, eps, weight_offset, cast_first), total
    rows = [t.reshape(-1, x.shape[-1]).contiguous() for t in (x, residual)]
    keep = recorded(x, residual, weight)
    normed, total, _ = _OPS.ascend_add_rms_norm(*rows, weight, eps, weight_offset, cast_first, keep)
    return normed.reshape(x.shape), total.reshape(x.shape)


def gated_activation_ascend_c(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """One pass over both halves, which are read where they lie."""
    if not gate.numel():
        return gate * up
    width = gate.shape[-1]
    rows = [t.reshape(-1, width) for t in (gate, up)]
    rows = [t if t.stride(-1) == 1 or width == 1 else t.contiguous() for t in rows]
    if any(t.stride(0) < width and t.shape[0] > 1 for t in rows):
        rows = [t.contiguous() for t in rows]
    return _OPS.ascend_gated_activation(*rows, kind).reshape(gate.shape)


def _dense_heads(x: Tensor) -> Tensor:
    """x (tokens, heads, head_dim), copied where a token's heads do not lie one behind the other."""
    return x if x.shape[0] and x[0].is_contiguous() else x.contiguous()


def rotary_append_ascend_c(
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
    """Queries turned in place, keys turned on their way into the pages, values copied: one kernel."""
    assert isinstance(k_pages, Tensor) and isinstance(v_pages, Tensor)
    if not q.shape[0]:
        return
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        note_detour("rotary_append", "ascend_c", "plain PyTorch", "the pages are not contiguous")
        rotary_append_torch(q, k, v, cos, sin, k_pages, v_pages, slots, interleaved)
        return
    turned, k, v = (_dense_heads(t.to(k_pages.dtype)) for t in (q, k, v))
    tables = (cos.float().contiguous(), sin.float().contiguous())
    _OPS.ascend_rotary_append(turned, k, v, *tables, k_pages, v_pages, slots.contiguous(), interleaved)
    if turned is not q:
        q.copy_(turned)


def paged_attention_ascend_c(
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
    """One token a row, with pages loaded one ahead of the arithmetic; other rows in plain PyTorch."""
    counts = [b - a for a, b in itertools.pairwise(host_values(cu_seqlens_q))]
    if any(count != 1 for count in counts):
        note_detour("paged_attention", "ascend_c", "plain PyTorch", "some rows have no query and others several")
        where = (block_table, kv_lengths, cu_seqlens_q, spec)
        return paged_attention_eager(q, k_pages, v_pages, *where, need_lse=need_lse)
    longest = max(host_values(kv_lengths), default=0)
    left = -1 if spec.left is None else spec.left
    out, lse = _OPS.ascend_paged_decode(
        q.contiguous(),
        k_pages,
        v_pages,
        block_table.contiguous(),
        kv_lengths,
        spec.scale_for(q.shape[-1]),
        spec.softcap or 0.0,
        left,
        longest,
    )
    return out, lse if need_lse else None


def attention_ascend_c(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    overlays: Overlays | None = None,
    dropout_p: float = 0.0,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Flash attention over cube and vector cores, forward: keys outside the window are not read."""
    left = -1 if spec.left is None else spec.left
    right = -1 if spec.right is None else spec.right
    tensors = (t.contiguous() for t in (q, k, v))
    out, lse = _OPS.ascend_flash_attention(*tensors, spec.scale_for(q.shape[-1]), spec.softcap or 0.0, left, right)
    return out, lse if need_lse else None


def norm_linear_ascend_c(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_first: bool = False,
) -> Tensor:
    """Vector cores norm a block of rows while cube cores multiply the one before it."""
    if not x.numel():
        return norm_linear_torch(x, norm_weight, weight, bias, eps, weight_offset, cast_first)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    scale = None if norm_weight is None else norm_weight.to(x.dtype)
    out = _OPS.ascend_norm_matmul(rows, scale, weight.contiguous(), eps, weight_offset, cast_first)
    if bias is not None:
        out = (out.float() + bias.float()).to(x.dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])
