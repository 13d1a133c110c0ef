"""FLEX: torch's FlexAttention, compiled for the call; the structure reaches it as ``reach`` and as live blocks.

One mask function serves every structure, since ``reach`` says in a few numbers a query what it sees, so that calls of
other windows, segments or images share a compiled kernel (Dong et al. 2024, "Flex Attention").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import AttentionTraits
from atb_modules.overlays import Overlays
from atb_modules.reach import reach
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import AttentionStrategy

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

#: queries and keys of a block that is skipped or computed as a whole, FlexAttention's own default
BLOCK = 128
#: compiled kernels that are kept
_SHAPES = 1024


def attention_flex(
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
    """``flex_attention`` under one mask function and, for softcap and ALiBi, a score function; (out, lse or None)."""
    q_len, kv_len = q.shape[2], k.shape[2]
    ranges = reach(spec, q_len, kv_len, overlays, q.device)
    live = None if overlays is None else overlays.block_mask
    result = _compiled()(
        q,
        k,
        v,
        score_mod=_score_function(spec.softcap, alibi_slopes, ranges),
        block_mask=_block_mask(ranges, live, spec.block_size or 1, q_len, kv_len),
        scale=spec.scale_for(q.shape[-1]),
        enable_gqa=q.shape[1] != k.shape[1],
        return_lse=need_lse,
    )
    return result if need_lse else (result, None)


@functools.cache
def _compiled() -> Callable:
    # here, for importing it takes the whole compiler along
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    # one compiled kernel a shape: sizes left open run into errors of its CPU form (torch 2.14)
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return config.patch(recompile_limit=_SHAPES, accumulated_recompile_limit=_SHAPES)(compiled)


def _block_mask(ranges: Tensor, live: Tensor | None, size: int, q_len: int, kv_len: int) -> BlockMask:
    """Which blocks some query of theirs reaches, in O(n + blocks), and the function that decides within them."""
    from torch.nn.attention.flex_attention import BlockMask

    q_blocks, kv_blocks = -(-q_len // BLOCK), -(-kv_len // BLOCK)
    first = torch.arange(kv_blocks, device=ranges.device) * BLOCK
    padded = torch.zeros((ranges.shape[0], q_blocks * BLOCK, 4), device=ranges.device, dtype=ranges.dtype)
    padded[:, :q_len] = ranges[..., :4]
    rows = padded.unflatten(1, (q_blocks, BLOCK))
    reached = torch.zeros((ranges.shape[0], q_blocks, kv_blocks), device=ranges.device, dtype=torch.bool)
    for low, high in ((rows[..., 0], rows[..., 1]), (rows[..., 2], rows[..., 3])):
        some = low < high
        least = low.masked_fill(~some, kv_len).amin(-1, keepdim=True)
        most = high.masked_fill(~some, 0).amax(-1, keepdim=True)
        reached |= (first < most) & (first + BLOCK > least)
    reached = reached.unsqueeze(1)
    if live is not None:
        reached = reached & _coarse(live, size, q_blocks, kv_blocks)
    numbers = reached.sum(-1, dtype=torch.int32)
    order = torch.argsort(reached.int(), dim=-1, descending=True, stable=True).int()
    sees = _mask_function(ranges, live, size)
    return BlockMask.from_kv_blocks(
        numbers, order, None, None, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(q_len, kv_len)
    )


def _coarse(live: Tensor, size: int, q_blocks: int, kv_blocks: int) -> Tensor:
    """bool (batch or 1, heads or 1, q_blocks, kv_blocks): blocks that hold a part of a live one."""
    total = torch.nn.functional.pad(live.long().cumsum(-1).cumsum(-2), (1, 0, 1, 0))
    edges = []
    for blocks, limit in ((q_blocks, live.shape[2]), (kv_blocks, live.shape[3])):
        begin = torch.arange(blocks, device=live.device) * BLOCK
        edges.append(((begin // size).clamp(max=limit), ((begin + BLOCK - 1) // size + 1).clamp(max=limit)))
    (top, bottom), (left, right) = edges
    corner = {
        name: total[:, :, rows][..., columns]
        for name, rows, columns in (
            ("all", bottom, right),
            ("above", top, right),
            ("before", bottom, left),
            ("both", top, left),
        )
    }
    return corner["all"] - corner["above"] - corner["before"] + corner["both"] > 0


def _mask_function(ranges: Tensor, live: Tensor | None, size: int) -> Callable:
    far_low, far_high, low, high = (ranges[..., i].contiguous() for i in range(4))
    many = ranges.shape[0] > 1

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = b if many else 0
        near = (key >= low[row, query]) & (key < high[row, query])
        return near | ((key >= far_low[row, query]) & (key < far_high[row, query]))

    if live is None:
        return sees
    rows, heads = live.shape[0] > 1, live.shape[1] > 1

    def sees_live(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = live[b if rows else 0, h if heads else 0, query // size, key // size]
        return sees(b, h, query, key) & block

    return sees_live


def _score_function(softcap: float | None, slopes: Tensor | None, ranges: Tensor) -> Callable | None:
    if softcap is None and slopes is None:
        return None
    places = ranges[..., 4].contiguous()
    many = ranges.shape[0] > 1

    def score(value: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            value = softcap * torch.tanh(value / softcap)
        if slopes is not None:
            value = value - slopes[h] * (places[b if many else 0, query] - key).abs()
        return value

    return score


def _reasons(spec: AttentionSpec, traits: AttentionTraits) -> tuple[str, ...]:
    if torch.compiler.is_compiling():
        return ("compiles its own kernel, which cannot be traced into another",)
    reasons = []
    if traits.mask != "none":
        reasons.append("takes structure, not a dense mask")
    if traits.has_sinks:
        reasons.append("has no sinks")
    if traits.dropout:
        reasons.append("has no dropout")
    if traits.dtype == torch.float64:
        reasons.append("has no float64")
    if min(traits.q_len, traits.kv_len) < BLOCK:
        reasons.append(f"compiles for blocks of {BLOCK}; q_len is {traits.q_len} and kv_len {traits.kv_len}")
    if traits.device_type == "cpu" and traits.need_lse:
        reasons.append("flex_attention does not return the LSE on the CPU")
    if traits.device_type == "cpu" and traits.requires_grad:
        reasons.append("flex_attention has no backward on the CPU")
    return tuple(reasons)


def _cost(spec: AttentionSpec, traits: AttentionTraits) -> Cost:
    # Compiling takes seconds for a new kind of call, so that it is there for those who ask for it
    return Cost(operations=2.0 * traits.pairs * (traits.head_dim + traits.value_dim), calls=1e6)


register(
    Kernel("attention", AttentionStrategy.FLEX, attention_flex, _reasons, _cost, ("cpu", "cuda"), transformable=False)
)
