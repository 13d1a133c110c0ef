"""A causal window as triangles: torch's fused kernel of the CPU under its causal flag alone, no mask anywhere.

Blocks as long as the window. A block of queries sees the keys of its own block up to itself, and of the block before
those that its window still reaches; turned around, this second triangle is a causal one too::

    block before     own block
    . x x x          x . . .            turned around    x . .
    . . x x          x x . .                             x x .
    . . . x          x x x .                             x x x
    . . . .          x x x x

The two are joined by their log-sum-exps. Both are differentiated with the joined output and LSE, without a second
forward (FlashAttention; Dao et al., 2022).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec, Causal

aten = torch.ops.aten

#: Queries from which the fused kernel works on its largest tiles.
_LEAST = 768


def fits_band(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, overlays: Overlays | None, *others: Tensor | None
) -> bool:
    """Whether such a call is a causal window and nothing else, wide enough, on the CPU."""
    plain = spec.softcap is None and not spec.has_overlays and not overlays and all(one is None for one in others)
    window = spec.left is not None and spec.left + 1 >= _LEAST and spec.causal is not Causal.NONE
    same = q.shape[2] == k.shape[2] and q.shape[-1] == v.shape[-1]
    return plain and window and same and spec.left is not None and q.shape[2] > spec.left + 1 and q.device.type == "cpu"


def banded(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """out (batch, heads, seq, head_dim) of q, and of k and v (batch, kv_heads, seq, head_dim); see ``fits_band``."""
    assert spec.left is not None
    return _Banded.apply(q, k, v, spec.left + 1, spec.scale_for(q.shape[-1]))


class _Banded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for rows, its_q, its_k, its_v in _own(window, q, k, v):
            out[:, :, rows], lse[:, :, rows] = _fused(its_q, its_k, its_v, scale)
        for rows, _, its_q, its_k, its_v in _before(window, q, k, v):
            count = rows.stop - rows.start
            part, part_lse = (t[:, :, -count:].flip(2) for t in _fused(its_q, its_k, its_v, scale))
            _join(out[:, :, rows], lse[:, :, rows], part, part_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.window, ctx.scale = window, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        window, heads, kv_heads = ctx.window, q.shape[1], k.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        d_q, d_k, d_v = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (q, k, v))

        def add(query_rows: slice, key_rows: slice, parts: tuple[Tensor, ...], turned: bool) -> None:
            for whole, rows, part in zip((d_q, d_k, d_v), (query_rows, key_rows, key_rows), parts, strict=True):
                part = part.flip(2) if turned else part
                if whole.shape[1] != part.shape[1]:
                    part = part.unflatten(1, (kv_heads, heads // kv_heads)).sum(2, dtype=wide)
                whole[:, :, rows] += part

        for rows, its_q, its_k, its_v in _own(window, q, k, v):
            mine = d_out[:, :, rows], its_q, its_k, its_v, out[:, :, rows], lse[:, :, rows]
            add(rows, rows, _fused_backward(*mine, ctx.scale), False)
        for rows, keys, its_q, its_k, its_v in _before(window, q, k, v):
            count = rows.stop - rows.start
            d, o = (F.pad(t[:, :, rows].flip(2), (0, 0, window - 1 - count, 0)) for t in (d_out, out))
            its_lse = F.pad(lse[:, :, rows].flip(2), (window - 1 - count, 0))
            of_q, of_k, of_v = _fused_backward(d, its_q, its_k, its_v, o, its_lse, ctx.scale)
            add(rows, keys, (of_q[:, :, -count:], of_k, of_v), True)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None


def _own(window: int, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Every block of queries over its own keys."""
    for begin in range(0, q.shape[2], window):
        rows = slice(begin, min(begin + window, q.shape[2]))
        yield rows, q[:, :, rows], _grouped(k[:, :, rows], q), _grouped(v[:, :, rows], q)


def _before(window: int, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Every block but the first over the block before, both turned around: queries, and the keys that they reach.

    Query a of a block reaches keys a + 1 and later of the block before, so its last query reaches none.
    """
    for begin in range(window, q.shape[2], window) if window > 1 else ():
        count = min(window - 1, q.shape[2] - begin)
        rows, keys = slice(begin, begin + count), slice(begin - window + 1, begin)
        its_k, its_v = (_grouped(t[:, :, keys], q).flip(2) for t in (k, v))
        # a last block that is cut short has queries of the small end alone: they see all keys but the nearest
        its_q = F.pad(q[:, :, rows].flip(2), (0, 0, window - 1 - count, 0))
        yield rows, keys, its_q, its_k, its_v


def _grouped(t: Tensor, q: Tensor) -> Tensor:
    """Key or value heads as many as query heads."""
    return t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], 1)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Square causal attention: out and the natural LSE, (batch, heads, seq)."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, attn_mask=None, scale=scale)


def _fused_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v for the share of these keys in a softmax whose output and LSE are given."""
    q, k, v, d_out, out = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v, d_out, out))
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(d_out, q, k, v, out, lse.contiguous(), 0.0, True, attn_mask=None, scale=scale)


def _join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds a part over other keys to ``out`` and ``lse``, in their memory. Every row has seen a key already."""
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    joined = torch.lerp(out.to(weight.dtype), part.to(weight.dtype), weight)
    lse.copy_(torch.logaddexp(lse, part_lse))
    out.copy_(joined)
