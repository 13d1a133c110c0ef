"""npu_fusion_attention: the fused attention of training, and its backward from the statistics of the forward.

Docs, the formula: "y = Softmax(Mask(scale * (pse + query * key^T), atten_mask), keep_prob); attention = Dropout(y) *
value". Note that pse stands inside the scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.errors import NoReferenceError
from atb_modules.testing.npu.references.attention_math import (
    attend,
    join_sequences,
    masked_scores,
    split_sequences,
    spread_heads,
)
from atb_modules.testing.npu.references.fusion_rules import Inputs
from atb_modules.testing.npu.references.registry import reference

_FAR = 2147483647
_LANES = 8  # a statistic is repeated over 32 bytes


@reference("npu::npu_fusion_attention")
def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _FAR,
    next_tockens: int = _FAR,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Docs: "the second output is the Max of softmax, the third its Sum, for the backward, float"; LSE = max +
    log(sum).

    "atten_mask: 1 (or True) takes no part"; "with atten_mask None, sparse_mode, pre_tockens and next_tockens have no
    effect: everything is computed"; "inner_precise 2 computes rows without effect, which avoids the loss of precision
    of a row masked all over; it is switched on by itself where it can be seen, e.g. sparse_mode 3 with Sq > Skv";
    "softmax_layout: by default the statistics of TND are arranged NTD, with 'TND' as TND". The statistics of a row
    without effect are not documented; here they are (lowest, largest), so that an LSE made of them blindly shows.
    """
    if keep_prob != 1.0:
        raise NoReferenceError("npu_fusion_attention: keep_prob below 1 is not emulated")
    require(padding_mask is None, "padding_mask is not supported")
    inputs = Inputs(
        query, key, value, head_num, input_layout, pse, atten_mask, scale, pre_tockens, next_tockens, inner_precise,
        prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, softmax_layout, sink,
    )  # fmt: skip
    results = [attend(q, k, v, masked, scale, bias, sink, zero) for q, k, v, masked, bias, zero in inputs.sequences()]
    out = join_sequences([result[0] for result in results], input_layout, query)
    top, total = (_join_statistics([result[i] for result in results], inputs) for i in (1, 2))
    return out, top, total, query.new_empty(0), 0, 0, 0


@reference("npu::npu_fusion_attention_v3")
def fusion_attention_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _FAR,
    next_tockens: int = _FAR,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Docs: "the version of npu_fusion_attention that supports graph mode"; lengths are tensors, and so are seed and
    offset in the result.
    """
    results = fusion_attention(
        query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale, keep_prob, pre_tockens,
        next_tockens, inner_precise, prefix, _as_list(actual_seq_qlen), _as_list(actual_seq_kvlen), sparse_mode,
        gen_mask_parallel, sync, softmax_layout, sink,
    )  # fmt: skip
    return *results[:4], torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


@reference("npu::npu_fusion_attention_grad")
def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _FAR,
    next_tockens: int = _FAR,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
    """(dq, dk, dv, dpse, dsink). Weights are rebuilt from the given statistics, exp(score - max) / sum, and the row
    term is the sum of dy * attention_in: with the output and the statistics of a *merged* attention, the gradients of
    the part are exact. aclnnFlashAttentionScoreGrad: dpse "is not used yet", so there is none.
    """
    if keep_prob != 1.0:
        raise NoReferenceError("npu_fusion_attention_grad: keep_prob below 1 is not emulated")
    require(softmax_max is not None and softmax_sum is not None, "softmax_max and softmax_sum are needed")
    require(attention_in is not None, "attention_in is needed")
    assert softmax_max is not None and softmax_sum is not None and attention_in is not None
    inputs = Inputs(
        query, key, value, head_num, input_layout, pse, atten_mask, scale_value, pre_tockens, next_tockens,
        inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, softmax_layout, sink,
    )  # fmt: skip
    grads = split_sequences(dy, input_layout, head_num, inputs.ends_q)
    outs = split_sequences(attention_in, input_layout, head_num, inputs.ends_q)
    tops, totals = (_split_statistics(stat, inputs) for stat in (softmax_max, softmax_sum))
    parts = []
    dsink = torch.zeros(head_num) if sink is not None else query.new_zeros(0, dtype=torch.float32)
    for place, (q, k, v, masked, bias, _) in enumerate(inputs.sequences()):
        weights = torch.exp(masked_scores(q, k, masked, scale_value, bias) - tops[place]) / totals[place]
        upstream = grads[place].float()
        row = (upstream * outs[place].float()).sum(-1, keepdim=True)
        dscore = weights * (upstream @ spread_heads(v, head_num).transpose(-1, -2) - row) * scale_value
        dq = dscore @ spread_heads(k, head_num)
        dk = _gather_heads(dscore.transpose(-1, -2) @ q.float(), k.shape[0])
        dv = _gather_heads(weights.transpose(-1, -2) @ upstream, v.shape[0])
        parts.append((dq, dk, dv))
        if sink is not None:
            share = torch.exp(sink.float().view(-1, 1, 1) - tops[place]) / totals[place]
            dsink -= (share * row).sum((1, 2))
    dq, dk, dv = (
        join_sequences([part[i] for part in parts], input_layout, like) for i, like in enumerate((query, key, value))
    )
    return dq, dk, dv, None, dsink


@reference("npu::npu_fusion_attention_grad_v3")
def fusion_attention_grad_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _FAR,
    next_tockens: int = _FAR,
    inner_precise: int = 0,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
    """``npu_fusion_attention_grad`` with lengths as tensors."""
    dq, dk, dv, dpse, dsink = fusion_attention_grad(
        query, key, value, dy, head_num, input_layout, pse, padding_mask, atten_mask, softmax_max, softmax_sum,
        softmax_in, attention_in, scale_value, keep_prob, pre_tockens, next_tockens, inner_precise, 0, 0, 0, prefix,
        _as_list(actual_seq_qlen), _as_list(actual_seq_kvlen), sparse_mode, gen_mask_parallel, sync, softmax_layout,
        sink,
    )  # fmt: skip
    return dq, dk, dv, dpse, dsink if sink is not None else dsink.new_zeros(())


def _as_list(lengths: Tensor | None) -> list[int] | None:
    return None if lengths is None else [int(value) for value in lengths.tolist()]


def _gather_heads(tensor: Tensor, heads: int) -> Tensor:
    """Gradients of query heads summed over the group that shares a key head."""
    return tensor.unflatten(0, (heads, -1)).sum(1)


def _join_statistics(parts: list[Tensor], inputs: Inputs) -> Tensor:
    """Dense: (B, N, S, 8). Packed: (T, N, 8), whose memory by default holds (N, S, 8) of each sequence in turn."""
    wide = [part.expand(*part.shape[:-1], _LANES) for part in parts]
    if inputs.layout != "TND":
        return torch.stack(wide).contiguous()
    if inputs.softmax_layout == "TND":
        wide = [part.transpose(0, 1) for part in wide]
    flat = torch.cat([part.reshape(-1, _LANES) for part in wide])
    rest = inputs.query.shape[0] * inputs.head_num - flat.shape[0]
    flat = torch.cat((flat, torch.full((rest, _LANES), float("nan"))))
    return flat.view(inputs.query.shape[0], inputs.head_num, _LANES)


def _split_statistics(statistic: Tensor, inputs: Inputs) -> list[Tensor]:
    if inputs.layout != "TND":
        return list(statistic[..., :1].unbind(0))
    flat = statistic.reshape(-1, _LANES)[:, :1]
    parts, start = [], 0
    for begin, end in zip([0, *inputs.ends_q], inputs.ends_q, strict=False):
        rows = (end - begin) * inputs.head_num
        part = flat[start : start + rows]
        if inputs.softmax_layout == "TND":
            parts.append(part.view(end - begin, inputs.head_num, 1).transpose(0, 1))
        else:
            parts.append(part.view(inputs.head_num, end - begin, 1))
        start += rows
    return parts
