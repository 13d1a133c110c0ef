"""torch.library ops of dense attention: forward with the log-sum-exp, and its gradients."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import library, structs
from .library_ops import LIB, call, check_same, define, last_dense, pointer, threads

#: queries that the native kernels take at a time (csrc/flash_tile.h)
LANES = 64


def per_head(name: str, vector: Tensor | None, heads: int) -> Tensor | None:
    if vector is None:
        return None
    if tuple(vector.shape) != (heads,):
        raise ValueError(f"{name} must have shape ({heads},), one for each query head, got {tuple(vector.shape)}")
    return vector.detach().float().contiguous()


def check_groups(heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"the heads of q must be a multiple of the kv heads, got {heads} and {kv_heads}")


def _check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (batch, heads, seq, head_dim), got {tuple(tensor.shape)}")
    check_same("v", v, "k", k.shape, k.dtype)
    check_same("k", k, "q (heads and length aside)", (q.shape[0], *k.shape[1:3], q.shape[3]), q.dtype)
    check_groups(q.shape[1], k.shape[1])


def _expanded_mask(mask: Tensor | None, shape: tuple[int, int, int, int]) -> tuple[Tensor | None, int, tuple[int, ...]]:
    """The mask, its dtype code and its strides (0 along broadcast axes)."""
    if mask is None:
        return None, 0, (0, 0, 0, 0)
    code = structs.MASK_BOOL if mask.dtype == torch.bool else structs.DTYPES.get(mask.dtype)
    if code is None:
        raise TypeError(f"mask must be bool (True = attend), float32, bfloat16 or float16, got {mask.dtype}")
    if mask.dim() > 4 or any(
        have not in (1, want) for have, want in zip(reversed(mask.shape), reversed(shape), strict=False)
    ):
        raise ValueError(f"mask must broadcast to (batch, heads, q_len, kv_len) = {shape}, got {tuple(mask.shape)}")
    return mask, code, mask.expand(shape).stride()


class Options(NamedTuple):
    """What the ops take after q, k and v, in the order of their schema."""

    mask: Tensor | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    reach: Tensor | None
    blocks: Tensor | None
    block_size: int
    causal: int
    left: int
    right: int
    scale: float
    softcap: float
    starts: Tensor | None = None


def _arguments(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[structs.AttentionArgs, list[Tensor | None]]:
    """The argument struct, and the tensors that must stay alive while it is used."""
    _check_dense(q, k, v)
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    dtype = library.dtype_code("q", q.dtype)
    sinks, slopes = per_head("sinks", options.sinks, heads), per_head("alibi_slopes", options.alibi_slopes, heads)
    mask, mask_code, mask_strides = _expanded_mask(options.mask, (batch, heads, q_len, kv_len))
    reach, reach_stride = _checked_reach(options.reach, batch, q_len)
    blocks, block_strides = _checked_blocks(options.blocks, options.block_size, q.shape, kv_len)
    starts = _checked_starts(options.starts, q_len * (heads // kv_heads))
    q, k, v = last_dense(q), last_dense(k), last_dense(v)
    strides = ctypes.c_int64 * 3
    args = structs.AttentionArgs(
        q.data_ptr(),
        pointer(k),
        pointer(v),
        pointer(mask),
        pointer(sinks),
        pointer(slopes),
        pointer(reach),
        pointer(blocks),
        pointer(starts),
        out.data_ptr(),
        lse.data_ptr(),
        batch,
        heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        strides(*q.stride()[:3]),
        strides(*k.stride()[:3]),
        strides(*v.stride()[:3]),
        (ctypes.c_int64 * 4)(*mask_strides),
        0 if starts is None else starts.numel(),
        reach_stride,
        (ctypes.c_int64 * 2)(*block_strides),
        options.block_size,
        options.left,
        options.right,
        options.scale,
        options.softcap,
        dtype,
        mask_code,
        options.causal,
        threads(),
    )
    return args, [q, k, v, mask, sinks, slopes, reach, blocks, starts]


def _checked_reach(reach: Tensor | None, batch: int, q_len: int) -> tuple[Tensor | None, int]:
    """The reach (rows of five int32) and its stride from one batch row to the next, 0 where all share it."""
    if reach is None:
        return None, 0
    if (
        reach.dtype != torch.int32
        or reach.dim() != 3
        or reach.shape[0] not in (1, batch)
        or reach.shape[1:] != (q_len, 5)
    ):
        raise ValueError(f"reach must be int32 (1 or {batch}, {q_len}, 5), got {reach.dtype} {tuple(reach.shape)}")
    return reach.contiguous(), 0 if reach.shape[0] == 1 else q_len * 5


def _checked_blocks(
    blocks: Tensor | None, size: int, q_shape: torch.Size, kv_len: int
) -> tuple[Tensor | None, tuple[int, int]]:
    """The block mask and its strides from one batch row and one head to the next, 0 where all share it."""
    if blocks is None:
        return None, (0, 0)
    if size < 1:
        raise ValueError(f"block_size must be at least 1 with blocks, got {size}")
    across = -(-q_shape[2] // size), -(-kv_len // size)
    fits = blocks.dim() == 4 and blocks.shape[0] in (1, q_shape[0]) and blocks.shape[1] in (1, q_shape[1])
    if blocks.dtype != torch.bool or not fits or tuple(blocks.shape[2:]) != across:
        raise ValueError(
            f"blocks must be bool (1 or {q_shape[0]}, 1 or {q_shape[1]}, {across[0]}, {across[1]}), "
            f"got {blocks.dtype} {tuple(blocks.shape)}"
        )
    blocks = blocks.contiguous()
    strides = tuple(0 if n == 1 else stride for n, stride in zip(blocks.shape[:2], blocks.stride()[:2], strict=True))
    return blocks, (strides[0], strides[1])


def _checked_starts(starts: Tensor | None, lanes: int) -> Tensor | None:
    """The cuts of the queries into blocks: the kernel follows them as addresses."""
    if starts is None:
        return None
    if starts.dtype != torch.int64 or starts.dim() != 1 or starts.numel() < 2:
        raise ValueError(f"starts must be int64 (blocks + 1,), got {starts.dtype} {tuple(starts.shape)}")
    steps = starts.diff()
    if starts[0] != 0 or starts[-1] != lanes or steps.min() < 1 or steps.max() > LANES:
        raise ValueError(f"starts must rise from 0 to {lanes} by 1 to {LANES}, got {starts.tolist()}")
    return starts.contiguous()


def _attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out, lse = _meta(q, k, v)
    args, keep = _arguments(out, lse, q, k, v, Options(*options))
    if q.numel():
        call("atb_attention", args)
    del keep
    return out, lse


def _meta(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    # A token's heads lie side by side, so that the output projection reads them without a copy.
    batch, heads, q_len, head_dim = q.shape
    out = torch.empty((batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _attention_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in float32; ``out`` and ``lse`` may be those of several calls merged."""
    out, d_out = (t.to(q.dtype).transpose(1, 2).contiguous() for t in (out, d_out))
    lse = lse.contiguous()
    forward, keep = _arguments(out, lse, q, k, v, Options(*options))
    d_q = torch.empty(q.shape, dtype=torch.float32)
    splits = _splits(q.shape[0] * k.shape[1], q.shape[1] // k.shape[1] * q.shape[2], threads())
    d_k, d_v = (torch.zeros((splits, *k.shape), dtype=torch.float32) for _ in range(2))
    if d_lse is not None:
        d_lse = d_lse.float().contiguous()
    args = structs.AttentionBackwardArgs(
        forward, d_out.data_ptr(), pointer(d_lse), pointer(d_q), pointer(d_k), pointer(d_v), splits
    )
    if q.numel():
        call("atb_attention_backward", args)
    del keep
    return d_q, _joined(d_k), _joined(d_v)


def _splits(units: int, lanes: int, count: int) -> int:
    """How many threads share a unit (a batch row and kv head): more than one where units do not fill the threads."""
    if units % count == 0 or units >= 4 * count or lanes <= LANES:
        return 1
    return min(count, -(-lanes // LANES))


def _joined(parts: Tensor) -> Tensor:
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)


def _meta_backward(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_):
    return tuple(torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v))


#: what follows q, k and v in both ops
_OPTIONS = (
    "Tensor? mask, Tensor? sinks, Tensor? alibi_slopes, Tensor? reach, Tensor? blocks, int block_size, int causal,"
    " int left, int right, float scale, float softcap, Tensor? starts=None"
)
define(f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)", _attention, _meta)
define(
    "attention_backward(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v,"
    f" {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    _meta_backward,
)


def _save(ctx, inputs, output) -> None:
    q, k, v, mask, sinks, slopes, reach, blocks, *ctx.options, starts = inputs
    ctx.save_for_backward(*output, q, k, v, mask, sinks, slopes, reach, blocks, starts)
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_lse):
    if torch.is_grad_enabled():
        raise RuntimeError("the CPU attention kernel has no second derivative; strategy='eager' has")
    if ctx.needs_input_grad[3] or ctx.needs_input_grad[5]:
        raise RuntimeError("the CPU attention kernel has no gradient of a mask or of ALiBi slopes")
    out, lse, q, k, v, mask, sinks, slopes, reach, blocks, starts = ctx.saved_tensors
    none = (None,) * (len(ctx.options) + 4)
    if d_out is None and d_lse is None:
        return (None,) * 5 + none
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_q, d_k, d_v = torch.ops.atb_modules.attention_backward(
        d_out, d_lse, out, lse, q, k, v, mask, sinks, slopes, reach, blocks, *ctx.options, starts
    )
    d_sinks = None
    if sinks is not None and ctx.needs_input_grad[4]:
        # the sink is one more key with value 0: its share of the softmax, times 0 - delta
        delta = (out.float() * d_out.float()).sum(-1)
        if d_lse is not None:
            delta = delta - d_lse
        share = torch.exp(sinks.float()[:, None] - lse)
        d_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, d_sinks, *none


torch.library.register_autograd("atb_modules::attention", _backward, setup_context=_save, lib=LIB)
