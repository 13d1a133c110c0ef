"""torch.library op of attention over two sets of keys that lie apart, without putting them side by side.

Two calls of the flash kernel, the second merged into the first by their log-sum-exps. The backward gives both calls
the merged output and LSE, under which each finds its share of the one softmax: no second forward, nothing kept twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import library, ops_attention, structs
from .library_ops import LIB, call, check_same, define, pointer, threads


def merge_into(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """``out`` (batch, heads, q_len, head_dim) and ``lse`` become those over the keys of both; float32 inside.

    All four are results of ``attention``: heads of a token side by side. A row that neither part sees stays empty,
    output 0 and LSE -inf.
    """
    batch, heads, q_len, head_dim = out.shape
    for name, tensor in (("out", out), ("other", other)):
        check_same(name, tensor, "out", out.shape, out.dtype)
        if not tensor.transpose(1, 2).is_contiguous():
            raise ValueError(f"{name} must have the heads of a token side by side, got strides {tensor.stride()}")
    for name, tensor in (("lse", lse), ("other_lse", other_lse)):
        check_same(name, tensor, "the rows of out", out.shape[:3], torch.float32)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    dtype = library.dtype_code("out", out.dtype)
    tensors = (pointer(tensor) for tensor in (out, lse, other, other_lse))
    args = structs.MergeArgs(*tensors, batch, heads, q_len, head_dim, dtype, threads())
    if out.numel():
        call("atb_merge_attention", args)


def _options(
    reach: Tensor | None, starts: Tensor | None, causal: int, scale: float, softcap: float
) -> ops_attention.Options:
    """What ``attention`` takes after q, k and v."""
    return ops_attention.Options(
        mask=None, sinks=None, alibi_slopes=None, reach=reach, blocks=None, block_size=0, causal=causal, left=-1,
        right=-1, scale=scale, softcap=softcap, starts=starts,
    )  # fmt: skip


def _pair(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    other_k: Tensor,
    other_v: Tensor,
    reach: Tensor | None,
    other_reach: Tensor | None,
    starts: Tensor | None,
    other_starts: Tensor | None,
    causal: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    out, lse = ops_attention._attention(q, k, v, *_options(reach, starts, causal, scale, softcap))
    other, other_lse = ops_attention._attention(
        q, other_k, other_v, *_options(other_reach, other_starts, 0, scale, softcap)
    )
    merge_into(out, lse, other, other_lse)
    return out, lse


def _meta(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return ops_attention._meta(q, q, q)


def _pair_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    other_k: Tensor,
    other_v: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, other_k and other_v in float32; ``options`` are those of the forward, from reach on."""
    reach, other_reach, starts, other_starts, causal, scale, softcap = options
    merged = d_out, d_lse, out, lse, q
    d_q, d_k, d_v = ops_attention._attention_backward(*merged, k, v, *_options(reach, starts, causal, scale, softcap))
    more, d_other_k, d_other_v = ops_attention._attention_backward(
        *merged, other_k, other_v, *_options(other_reach, other_starts, 0, scale, softcap)
    )
    return d_q.add_(more), d_k, d_v, d_other_k, d_other_v


def _meta_backward(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *rest: Tensor):
    return tuple(torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in rest[:5])


_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor other_k, Tensor other_v, Tensor? reach, Tensor? other_reach, Tensor? starts,"
    " Tensor? other_starts, int causal, float scale, float softcap"
)
define(f"attention_pair({_SCHEMA}) -> (Tensor, Tensor)", _pair, _meta)
define(
    f"attention_pair_backward(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, {_SCHEMA})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _pair_backward,
    _meta_backward,
)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output, *inputs[:9])
    ctx.options = inputs[9:]
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_lse):
    if torch.is_grad_enabled():
        raise RuntimeError("the CPU attention kernel has no second derivative; attention_strategy='eager' has")
    none = (None,) * 7
    if d_out is None and d_lse is None:
        return (None,) * 5 + none
    out, lse, *inputs = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    grads = torch.ops.atb_modules.attention_pair_backward(d_out, d_lse, out, lse, *inputs, *ctx.options)
    return *(grad.to(t.dtype) for grad, t in zip(grads, inputs[:5], strict=True)), *none


torch.library.register_autograd("atb_modules::attention_pair", _backward, setup_context=_save, lib=LIB)
