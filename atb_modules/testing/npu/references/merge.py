"""Partial attentions joined: by LSE (npu_attention_update), by max and sum (npu_ring_attention_update)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.errors import NoReferenceError
from atb_modules.testing.npu.references.registry import reference
from atb_modules.testing.npu.references.rules import require_dtype, require_not_310p, require_same_dtype


@reference("npu::npu_attention_update")
def attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int) -> tuple[Tensor, Tensor]:
    """Docs: "lse_max = max(lse_i); lse = sum exp(lse_i - lse_max); lse_m = lse_max + log(lse); O = sum O_i exp(lse_i -
    lse_m)"; "lse: (batch * seqLen * headNum), FLOAT; local_out: (batch * seqLen * headNum, head_dim)"; "lse_out is
    valid with update_type 1". Parts that are all empty (LSE of minus infinity) give NaN by that formula, and here.
    """
    require_not_310p()
    require(len(lse) == len(local_out) > 0, f"{len(lse)} LSEs for {len(local_out)} outputs")
    require(update_type in (0, 1), f"update_type is {update_type}; 0 or 1")
    for one, out in zip(lse, local_out, strict=True):
        require(one.dtype == torch.float32, f"lse is {one.dtype}; float32")
        require_dtype("local_out", out)
        require(one.dim() == 1 and out.dim() == 2, "lse has 1 dim (rows,), local_out 2 (rows, head_dim)")
        require(out.shape[0] == one.shape[0] and out.shape == local_out[0].shape, "the parts differ in shape")
    parts = torch.stack(list(lse))
    top = parts.amax(0)
    joined = top + torch.log(torch.exp(parts - top).sum(0))
    weights = torch.exp(parts - joined)[..., None]
    merged = (torch.stack([out.float() for out in local_out]) * weights).sum(0)
    return merged.to(local_out[0].dtype), joined if update_type == 1 else torch.full_like(joined, float("nan"))


@reference("npu::npu_ring_attention_update")
def ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    actual_seq_qlen: Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Docs: "softmax_max = max(prev, cur); softmax_sum = prev_sum exp(prev_max - softmax_max) + cur_sum exp(cur_max -
    softmax_max); attn_out = prev_out exp(prev_max - softmax_max) prev_sum / softmax_sum + the same of cur"; layouts SBH
    and TND ("actual_seq_qlen: prefix sums that start from 0, needed in TND").
    """
    require_not_310p()
    require_same_dtype(prev_attn_out=prev_attn_out, cur_attn_out=cur_attn_out)
    require(prev_attn_out.shape == cur_attn_out.shape, "the outputs differ in shape")
    statistics = (prev_softmax_max, prev_softmax_sum, cur_softmax_max, cur_softmax_sum)
    require(all(t.dtype == torch.float32 for t in statistics), "max and sum are float32")
    require(all(t.shape == prev_softmax_max.shape for t in statistics), "max and sum differ in shape")
    require(input_layout in ("SBH", "TND"), f"input_layout is {input_layout!r}; 'SBH' or 'TND'")
    if input_layout == "TND":
        raise NoReferenceError("npu_ring_attention_update: only SBH is emulated")
    top = torch.maximum(prev_softmax_max, cur_softmax_max)
    before = prev_softmax_sum * torch.exp(prev_softmax_max - top)
    now = cur_softmax_sum * torch.exp(cur_softmax_max - top)
    total = before + now
    batch, heads, rows, _ = top.shape
    parts = []
    for out, share in ((prev_attn_out, before / total), (cur_attn_out, now / total)):
        wide = out.float().view(rows, batch, heads, -1)
        parts.append(wide * share[..., :1].permute(2, 0, 1, 3))
    return (parts[0] + parts[1]).reshape(prev_attn_out.shape).to(prev_attn_out.dtype), top, total
