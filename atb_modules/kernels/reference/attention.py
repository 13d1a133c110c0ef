"""Reference attention: one softmax over all visible keys, written with einops."""

from __future__ import annotations

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from atb_modules import masks
from atb_modules.kernels.costs import Cost
from atb_modules.kernels.pages import Pages
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import AttentionTraits, PagedAttentionTraits
from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import AttentionStrategy


def attention_reference(
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
    need_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``softmax(cap(scale * q k^T) + bias) v`` over (batch, heads, seq, head_dim), differentiable.

    Computes in float32, or float64 for float64 inputs; returns ``(out, lse)`` with out in q's dtype and lse float32
    (float64 for float64 inputs). A row that sees no key gives output 0 and LSE -inf (the sink, if there are sinks).
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    k, v = (repeat(t.to(compute), "b h s d -> b (h g) s d", g=group) for t in (k, v))
    scores = einsum(q.to(compute), k, "b h q d, b h k d -> b h q k") * spec.scale_for(q.shape[-1])
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    q_len, kv_len = scores.shape[-2:]
    if alibi_slopes is not None:
        q_pos, k_pos = spec.positions(q_len, kv_len, q.device, overlays)
        scores = scores + masks.alibi_bias(alibi_slopes.to(compute), q_pos, k_pos)
    visible = spec.dense_mask(q_len, kv_len, q.device, overlays)
    if mask is not None:
        if mask.dtype == torch.bool:
            visible = visible & mask
        else:
            scores = scores + mask.to(compute)
    scores = scores.masked_fill(~visible, float("-inf"))
    joined = scores
    if sinks is not None:
        sink = repeat(sinks.to(compute), "h -> b h q 1", b=scores.shape[0], q=q_len)
        joined = torch.cat([scores, sink], dim=-1)
    # An empty row has no finite score: it is computed over zeros, then set to 0 and -inf, gradients included.
    empty = (joined == float("-inf")).all(dim=-1, keepdim=True)
    joined = joined.masked_fill(empty, 0.0)
    lse = torch.logsumexp(joined, dim=-1)
    probabilities = torch.softmax(joined, dim=-1)[..., :kv_len].masked_fill(empty, 0.0)
    probabilities = torch.nn.functional.dropout(probabilities, dropout_p)
    out = einsum(probabilities, v, "b h q k, b h k d -> b h q d").to(q.dtype)
    return out, lse.masked_fill(rearrange(empty, "b h q 1 -> b h q"), float("-inf"))


def paged_attention_reference(
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
    need_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Each row's written tokens are gathered from its pages, then reference attention a row.

    q is packed (total, heads, head_dim); returns out of that shape and lse (heads, total). Pages freed behind a window
    (block -1) read as zeros: the window hides them.
    """
    from atb_modules.kernels.torch.paged import gather_pages

    out = q.new_empty(q.shape[0], q.shape[1], v_pages.shape[-1])
    lse = torch.empty(q.shape[1], q.shape[0], device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
    starts = cu_seqlens_q.tolist()
    for row, length in enumerate(kv_lengths.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        k, v = (gather_pages(pages, block_table[row], length) for pages in (k_pages, v_pages))
        row_out, row_lse = attention_reference(
            rearrange(q[begin:end], "t h d -> 1 h t d"),
            k.unsqueeze(0),
            v.unsqueeze(0),
            spec,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )
        out[begin:end] = rearrange(row_out, "1 h t d -> t h d")
        assert row_lse is not None  # the reference always returns it
        lse[:, begin:end] = row_lse[0]
    return out, lse


def _cost(spec: AttentionSpec, traits: AttentionTraits) -> Cost:
    scores = traits.batch * traits.num_heads * traits.q_len * traits.kv_len
    return Cost(operations=2.0 * scores * (traits.head_dim + traits.value_dim), bytes=40.0 * scores, calls=20)


def _paged_cost(spec: AttentionSpec, traits: PagedAttentionTraits) -> Cost:
    scores = traits.num_heads * traits.total * traits.max_blocks * traits.page_size
    return Cost(operations=4.0 * scores * traits.head_dim, bytes=40.0 * scores, calls=25 * traits.batch)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


register(Kernel("attention", AttentionStrategy.REFERENCE, attention_reference, _no_reasons, _cost))
register(Kernel("paged_attention", AttentionStrategy.REFERENCE, paged_attention_reference, _no_reasons, _paged_cost))
