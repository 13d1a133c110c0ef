"""Attention that follows its structure in plain PyTorch: BLOCKED, a call of SDPA (or EAGER) a block of queries.

Each block reads the slices of keys that some query of it reaches, under a mask of that size alone: work and memory are
those of the structure, whatever it is. Blocks in which the structure looks alike share their mask, and the backward is
that of the calls, summed into one gradient each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.torch.attention import attention_eager, attention_sdpa, sdpa_reasons
from atb_modules.kernels.torch.banded import banded, fits_band
from atb_modules.kernels.torch.query_blocks import QueryBlock, block_size, query_blocks, visible_keys
from atb_modules.kernels.traits import AttentionTraits
from atb_modules.overlays import Overlays
from atb_modules.reach import reach
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import AttentionStrategy

#: q, k, v, mask, sinks, alibi_slopes
Operands = tuple[Tensor | None, ...]


def attention_blocked(
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
    """SDPA a block where it can serve, else EAGER; a wide causal window by triangles. (out, lse or None)."""
    if not need_lse and not dropout_p and fits_band(q, k, v, spec, overlays, mask, sinks, alibi_slopes):
        return banded(q, k, v, spec), None
    call = _Call(spec, overlays, q.shape[2], k.shape[2], dropout_p, need_lse, plain=sinks is None and not need_lse)
    operands = (q, k, v, mask, sinks, alibi_slopes)
    function = _differentiable if _wants_gradient(operands) else _forward
    if overlays is None or overlays.block_mask is None or overlays.block_mask.shape[1] == 1:
        return function(call, operands)
    # heads of different live blocks: each by itself, over its own
    parts = [function(one, its) for one, its in _heads(call, operands)]
    lses = [lse for _, lse in parts if lse is not None]
    return torch.cat([out for out, _ in parts], 1), torch.cat(lses, 1) if need_lse else None


@dataclass(frozen=True)
class _Call:
    """What the blocks of one call have in common."""

    spec: AttentionSpec
    overlays: Overlays | None
    q_len: int
    kv_len: int
    dropout_p: float
    need_lse: bool
    plain: bool  # neither sinks nor the LSE are asked for

    def blocks(self, q: Tensor) -> Iterator[tuple[QueryBlock, Tensor, Tensor | None]]:
        """Every block with its rows of ``reach`` and what its queries see of its keys, None for all of them."""
        ranges = reach(self.spec, self.q_len, self.kv_len, self.overlays, q.device)
        like: tuple[Tensor, Tensor | None] | None = None
        for block in query_blocks(self.spec, self.overlays, ranges, self.q_len):
            rows = ranges[:, block.begin : block.end]
            if self.overlays is not None and self.overlays.block_mask is not None:
                yield block, rows, visible_keys(block, rows, self.overlays, self.spec.block_size)
                continue
            relative = block.relative(rows)
            if like is None or not torch.equal(like[0], relative):
                like = relative, self._additive(visible_keys(block, rows, None, None), q)
            yield block, rows, like[1]

    def _additive(self, visible: Tensor | None, q: Tensor) -> Tensor | None:
        """The form that SDPA adds on the CPU, made once for all blocks that share it."""
        if visible is None or q.device.type != "cpu" or not self._by_sdpa:
            return visible
        dtype = torch.promote_types(q.dtype, torch.float32)
        return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))

    @property
    def _by_sdpa(self) -> bool:
        return self.plain and self.spec.softcap is None

    def run(
        self, block: QueryBlock, ranges: Tensor, visible: Tensor | None, operands: Operands
    ) -> tuple[Tensor, Tensor | None]:
        """One block; ``operands`` are its own parts (``QueryBlock.take``)."""
        q, k, v, mask, sinks, slopes = operands
        assert q is not None and k is not None and v is not None
        bare = AttentionSpec(scale=self.spec.scale, softcap=self.spec.softcap)
        dense = attention_sdpa if self._by_sdpa else attention_eager
        joined = _join(block, ranges, visible, mask, slopes)
        return dense(q, k, v, bare, mask=joined, sinks=sinks, dropout_p=self.dropout_p, need_lse=self.need_lse)

    def empty(self, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        batch, heads, q_len, _ = q.shape
        lse = q.new_empty((batch, heads, q_len), dtype=torch.promote_types(q.dtype, torch.float32))
        return q.new_empty((batch, heads, q_len, v.shape[-1])), lse if self.need_lse else None


def _wants_gradient(operands: Operands) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)


def _forward(call: _Call, operands: Operands) -> tuple[Tensor, Tensor | None]:
    q, _, v = operands[:3]
    assert q is not None and v is not None
    out, lse = call.empty(q, v)
    for block, ranges, visible in call.blocks(q):
        part, part_lse = call.run(block, ranges, visible, block.take(operands))
        out[:, :, block.begin : block.end] = part
        if lse is not None and part_lse is not None:
            lse[:, :, block.begin : block.end] = part_lse
    return out, lse


def _differentiable(call: _Call, operands: Operands) -> tuple[Tensor, Tensor | None]:
    out, lse = _Blocks.apply(call, *operands)
    return out, lse


class _Blocks(torch.autograd.Function):
    """Keeps the graph of each block, so that its keys' gradients are added where they belong.

    Slicing k and v under autograd would instead make a gradient of their full length for every block.
    """

    @staticmethod
    def forward(ctx, call: _Call, *operands: Tensor | None):
        ctx.set_materialize_grads(False)
        ctx.graphs, ctx.like = [], [None if t is None else (t.shape, t.dtype, t.device) for t in operands]
        q, _, v = operands[:3]
        assert q is not None and v is not None
        out, lse = call.empty(q, v)
        for block, ranges, visible in call.blocks(q):
            leaves = tuple(
                None if part is None else part.detach().requires_grad_(wanted)
                for part, wanted in zip(block.take(operands), ctx.needs_input_grad[1:], strict=True)
            )
            with torch.enable_grad():
                part, part_lse = call.run(block, ranges, visible, leaves)
            out[:, :, block.begin : block.end] = part.detach()
            if lse is not None and part_lse is not None:
                lse[:, :, block.begin : block.end] = part_lse.detach()
            ctx.graphs.append((block, leaves, part, part_lse))
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor | None, d_lse: Tensor | None):
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        # sums of many blocks: in float32, rounded once
        sums: list[Tensor | None] = [None] * len(ctx.like)
        for i in wanted:
            shape, dtype, device = ctx.like[i]
            sums[i] = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
        for block, leaves, part, part_lse in ctx.graphs:
            rows = slice(block.begin, block.end)
            pairs = [(t, d[:, :, rows]) for t, d in ((part, d_out), (part_lse, d_lse)) if d is not None]
            if not pairs:
                break
            results, weights = zip(*pairs, strict=True)
            inputs = [leaves[i] for i in wanted]
            grads = torch.autograd.grad(results, inputs, weights, retain_graph=True, allow_unused=True)
            for i, grad in zip(wanted, grads, strict=True):
                if grad is not None:
                    block.add(sums, i, grad)
        return None, *(None if s is None else s.to(ctx.like[i][1]) for i, s in enumerate(sums))


def _heads(call: _Call, operands: Operands) -> Iterator[tuple[_Call, Operands]]:
    """The call split into its query heads, each with its own live blocks."""
    q, k, v, mask, sinks, slopes = operands
    assert q is not None and k is not None and v is not None and call.overlays is not None
    assert call.overlays.block_mask is not None
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    by_head = mask is not None and mask.dim() >= 3 and mask.shape[-3] != 1
    masks = mask.split(1, -3) if mask is not None and by_head else (mask,) * heads
    queries, keys, values = q.split(1, 1), k.split(1, 1), v.split(1, 1)
    for h in range(heads):
        live = call.overlays.block_mask[:, h : h + 1]
        own = (None if vector is None else vector[h : h + 1] for vector in (sinks, slopes))
        its = (queries[h], keys[h // group], values[h // group], masks[h], *own)
        yield replace(call, overlays=replace(call.overlays, block_mask=live)), its


def _join(
    block: QueryBlock, ranges: Tensor, visible: Tensor | None, mask: Tensor | None, slopes: Tensor | None
) -> Tensor | None:
    """The mask of one block: what is visible (bool, or added), the caller's mask and ALiBi's bias."""
    bias = None if visible is None or visible.dtype == torch.bool else visible
    seen = visible if bias is None else None
    if slopes is not None:
        compute = torch.promote_types(slopes.dtype, torch.float32)
        distance = (ranges[..., 4:] - block.positions(slopes.device)).abs().to(compute).unsqueeze(1)
        alibi = -slopes.to(compute)[:, None, None] * distance
        bias = alibi if bias is None else bias + alibi
    if mask is not None and mask.dtype == torch.bool:
        seen = mask if seen is None else seen & mask
    elif mask is not None:
        bias = mask if bias is None else bias + mask
    if bias is None or seen is None:
        return seen if bias is None else bias
    return bias.masked_fill(~seen, float("-inf"))


def _reasons(spec: AttentionSpec, traits: AttentionTraits) -> tuple[str, ...]:
    if torch.compiler.is_compiling():
        return ("reads the ranges of keys as Python numbers, which cannot be traced",)
    if traits.dropout and sdpa_reasons(spec, traits):
        return tuple(reason for reason in sdpa_reasons(spec, traits) if "dropout" in reason)
    return ()


def _cost(spec: AttentionSpec, traits: AttentionTraits) -> Cost:
    size = block_size(spec, traits.has_block_mask)
    pairs = traits.pairs if traits.seen is None else traits.seen
    if spec.left is not None and traits.kv_len:
        width = (
            spec.left + 1.0 * size + (traits.kv_len if spec.right is None and not spec.is_causal else spec.right or 0)
        )
        pairs = traits.pairs * min(1.0, width / traits.kv_len)
    return Cost(
        operations=2.0 * pairs * (traits.head_dim + traits.value_dim),
        bytes=traits.bytes,
        scores=pairs,
        cells=pairs / max(traits.num_heads, 1) + traits.mask_elements,
        steps=-(-traits.q_len // size) + 1.0 * traits.segments,
    )


register(Kernel("attention", AttentionStrategy.BLOCKED, attention_blocked, _reasons, _cost, transformable=False))
