"""torch.library ops of the rotary embedding, and of the append of keys and values to the pages."""

from __future__ import annotations

import torch
from torch import Tensor

from . import library, structs
from .library_ops import LIB, call, check_same, define, last_dense, pointer, threads
from .ops_paged import check_scales


def _check_tables(cos: Tensor, sin: Tensor, tokens: int, head_dim: int) -> int:
    """The number of rotated pairs; raises where the tables do not fit."""
    if cos.dim() != 2 or cos.shape[0] != tokens or 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"cos must be (tokens, rotary_dim / 2) = ({tokens}, at most {head_dim // 2}), got {tuple(cos.shape)}"
        )
    check_same("sin", sin, "cos", cos.shape, torch.float32)
    check_same("cos", cos, "sin", cos.shape, torch.float32)
    return cos.shape[1]


def _check_packed(name: str, x: Tensor) -> None:
    if x.dim() != 3:
        raise ValueError(f"{name} must be (tokens, heads, head_dim), got {tuple(x.shape)}")


def rotary_out(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, out: Tensor) -> None:
    """Rotates x (tokens, heads, head_dim) into `out`, which may be x; tables (tokens, rotary_dim / 2)."""
    _check_packed("x", x)
    dtype = library.dtype_code("x", x.dtype)
    tokens, heads, head_dim = x.shape
    half = _check_tables(cos, sin, tokens, head_dim)
    check_same("out", out, "the result", x.shape, x.dtype)
    if x.numel() == 0:
        return
    if last_dense(out) is not out:
        raise ValueError(f"out must have a dense last axis, got strides {out.stride()}")
    x, cos, sin = last_dense(x), cos.contiguous(), sin.contiguous()
    args = structs.RotaryArgs(
        x.data_ptr(),
        out.data_ptr(),
        pointer(cos),
        pointer(sin),
        tokens,
        heads,
        head_dim,
        half,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        dtype,
        interleaved,
        threads(),
    )
    call("atb_rotary", args)


def _new(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    out = _new(x)
    rotary_out(x, cos, sin, interleaved, out=out)
    return out


def _meta(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _new(x)


def _meta_none(*_: object, **__: object) -> None:
    return None


define("rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor", _rotary, _meta)
define(
    "rotary.out(Tensor x, Tensor cos, Tensor sin, bool interleaved, *, Tensor(a!) out) -> ()",
    rotary_out,
    _meta_none,
)


def _save(ctx, inputs, output) -> None:
    x, cos, sin, ctx.interleaved = inputs
    ctx.save_for_backward(x, cos, sin)


def _backward(ctx, grad):
    x, cos, sin = ctx.saved_tensors
    grad_x = grad_cos = grad_sin = None
    if ctx.needs_input_grad[0]:
        # A rotation's transpose is the rotation by the negative angle.
        grad_x = torch.ops.atb_modules.rotary(grad, cos, -sin, ctx.interleaved)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        half = cos.shape[1]
        v, g = x[..., : 2 * half].float(), grad[..., : 2 * half].float()
        if ctx.interleaved:
            (a, b), (ga, gb) = (v[..., 0::2], v[..., 1::2]), (g[..., 0::2], g[..., 1::2])
        else:
            (a, b), (ga, gb) = (v[..., :half], v[..., half:]), (g[..., :half], g[..., half:])
        grad_cos, grad_sin = (ga * a + gb * b).sum(1), (gb * a - ga * b).sum(1)
    return grad_x, grad_cos, grad_sin, None


torch.library.register_autograd("atb_modules::rotary", _backward, setup_context=_save, lib=LIB)


def _append(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    interleaved: bool,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    _check_packed("k", k)
    tokens, kv_heads, head_dim = k.shape
    dtype, page_dtype = library.dtype_code("k", k.dtype), library.page_dtype_code("k_pages", k_pages.dtype)
    check_same("v", v, "k", k.shape, k.dtype)
    check_same("v_pages", v_pages, "k_pages", k_pages.shape, k_pages.dtype)
    if k_pages.dim() != 4 or k_pages.shape[1] != kv_heads or k_pages.shape[3] != head_dim:
        raise ValueError(
            f"k_pages must be (num_pages, {kv_heads}, page_size, {head_dim}) for k of shape {tuple(k.shape)},"
            f" got {tuple(k_pages.shape)}"
        )
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError(f"k_pages and v_pages must be contiguous, got {k_pages.stride()} and {v_pages.stride()}")
    check_scales(k_pages, k_scales=k_scales, v_scales=v_scales)
    check_same("slots", slots, "the tokens of k", (tokens,), torch.int64)
    heads = half = 0
    if q is not None:
        _check_packed("q", q)
        heads = q.shape[1]
        check_same("q", q, "k (heads aside)", (tokens, heads, head_dim), k.dtype)
        if q.numel() and q.stride(2) != 1 and head_dim > 1:
            raise ValueError(f"q is rotated in place and must have a dense last axis, got strides {q.stride()}")
    if cos is not None and sin is not None:
        half = _check_tables(cos, sin, tokens, head_dim)
        cos, sin = cos.contiguous(), sin.contiguous()
    if tokens == 0:
        return
    k, v, slots = last_dense(k), last_dense(v), slots.contiguous()
    args = structs.AppendArgs(
        pointer(q),
        pointer(k),
        pointer(v),
        pointer(cos),
        pointer(sin),
        pointer(k_pages),
        pointer(v_pages),
        pointer(k_scales),
        pointer(v_scales),
        slots.data_ptr(),
        tokens,
        heads,
        kv_heads,
        head_dim,
        half,
        k_pages.shape[2],
        0 if q is None else q.stride(0),
        0 if q is None else q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        dtype,
        page_dtype,
        interleaved,
        threads(),
    )
    call("atb_append", args)


def rotary_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    interleaved: bool,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Rotates q in place, writes the rotated k and v to their slots of the pages (-1: not written).

    q (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim), views of one fused product
    allowed; cos and sin (tokens, rotary_dim / 2) float32; pages (num_pages, kv_heads, page_size, head_dim) of any
    of the three dtypes, or int8 with scales float32 (num_pages, kv_heads), which grow as ``QuantizedPages`` says; slots
    int64 (tokens,), inside the pool.
    """
    _append(q, k, v, cos, sin, k_pages, v_pages, slots, interleaved, k_scales, v_scales)


def cache_append(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Writes k and v (tokens, kv_heads, head_dim) to their slots of the pages (-1: not written)."""
    _append(None, k, v, None, None, k_pages, v_pages, slots, False, k_scales, v_scales)


define(
    "rotary_append(Tensor(a!) q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(b!) k_pages,"
    " Tensor(c!) v_pages, Tensor slots, bool interleaved, Tensor(d!)? k_scales=None, Tensor(e!)? v_scales=None) -> ()",
    rotary_append,
    _meta_none,
)
define(
    "cache_append(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slots,"
    " Tensor(c!)? k_scales=None, Tensor(d!)? v_scales=None) -> ()",
    cache_append,
    _meta_none,
)
