"""Attention by torch_npu: ``npu_fusion_attention`` (training, packed, biased) and the fused attention of inference."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atb_modules.kernels.ascend.ops_prompt import prompt_attention
from atb_modules.kernels.ascend.rules import HALVES, is_310p
from atb_modules.kernels.ascend.structure import Structure, empty_rows, structure_of
from atb_modules.kernels.host_values import host_values
from atb_modules.kernels.registry import note_detour
from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec

_NPU = torch.ops.npu
#: channels that carry the gradient of the LSE through the fused backward
_LSE_CHANNELS = 16


def attention_ascend(
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
    """One fused call; grouped heads share k and v without a copy, but for the inference chip 310P."""
    if is_310p():
        return prompt_attention(q, k, v, spec, mask, overlays), None
    structure, lengths = structure_of(spec, q, k.shape[2], mask, alibi_slopes, overlays), None
    if overlays is not None and overlays.cu_seqlens_q is not None:
        lengths = _packed_lengths(overlays)
        if lengths is None:  # a sequence with queries alone or keys alone: the packed layout knows none
            note_detour("attention", "ascend", "a full mask", "a packed sequence has queries or keys alone")
            visible = spec.dense_mask(q.shape[2], k.shape[2], q.device, overlays)
            structure = Structure((~visible).contiguous(), visible=visible)
    empty = None
    if need_lse or structure.visible is not None or q.shape[2] > k.shape[2] or lengths is not None:
        empty = empty_rows(spec, structure, q.shape[2], k.shape[2], overlays, q.device)
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, sinks))
    scale = spec.scale_for(q.shape[-1])
    keep = 1.0 - dropout_p
    if (
        not gradients
        and not dropout_p
        and lengths is None
        and sinks is None
        and _inference_takes(q, v, structure, empty)
    ):
        out, lse = _infer(q, k, v, structure, scale, empty is not None, need_lse)
    elif gradients and (need_lse or sinks is not None):
        out, lse = _Differentiable.apply(q, k, v, sinks, empty, structure, scale, lengths, keep)
    else:
        if sinks is None:
            out, top, total, *_ = _fusion(q, k, v, structure, scale, lengths, keep)
        else:
            out, top, total, *_ = _with_sinks(q, k, v, sinks, structure, scale, lengths, keep)
        lse = _lse_of(top, total, lengths is not None) if need_lse else None
    if empty is not None:
        out = out.masked_fill(empty.unsqueeze(-1), 0.0)
        if need_lse and lse is not None:
            alone = float("-inf") if sinks is None else sinks.float().view(1, -1, 1)
            lse = torch.where(empty, alone, lse)
    return out, lse if need_lse else None


def _packed_lengths(overlays: Overlays) -> tuple[list[int], list[int]] | None:
    """Cumulative ends of the sequences that have tokens; None where one has queries alone or keys alone."""
    assert overlays.cu_seqlens_q is not None and overlays.cu_seqlens_k is not None
    starts_q, starts_k = host_values(overlays.cu_seqlens_q), host_values(overlays.cu_seqlens_k)
    ends: tuple[list[int], list[int]] = ([], [])
    for i in range(1, len(starts_q)):
        queries, keys = starts_q[i] > starts_q[i - 1], starts_k[i] > starts_k[i - 1]
        if queries != keys:
            return None
        if queries:
            ends[0].append(starts_q[i])
            ends[1].append(starts_k[i])
    return ends


def _inference_takes(q: Tensor, v: Tensor, structure: Structure, empty: Tensor | None) -> bool:
    """Whether the fused attention of inference has what the call needs; the other operator serves the rest."""
    mask = structure.visible
    if q.dtype not in HALVES or structure.bias is not None or q.shape[-1] != v.shape[-1] or q.shape[-1] > 512:
        return False
    if mask is not None and mask.shape[1] > 1:
        return False
    if q.shape[1] > 64 * v.shape[1]:
        return False
    if q.shape[2] == 1:  # it corrects no rows that see nothing there, and ignores modes
        return empty is None and mask is None and structure.mode in (0, 3)
    return q.shape[-1] % 16 == 0


def _infer(
    q: Tensor, k: Tensor, v: Tensor, structure: Structure, scale: float, correct: bool, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    single = q.shape[2] == 1
    out, lse = _NPU.npu_fused_infer_attention_score_v2(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        atten_mask=None if single else structure.mask,
        num_query_heads=q.shape[1],
        num_key_value_heads=k.shape[1],
        softmax_scale=scale,
        pre_tokens=structure.before,
        next_tokens=structure.after,
        input_layout="BNSD",
        sparse_mode=0 if single else structure.mode,
        inner_precise=2 if correct and not single else 0,
        return_softmax_lse=need_lse,
    )
    return out, lse.squeeze(-1) if need_lse else None


def _packed(tensor: Tensor) -> Tensor:
    """(1, heads, total, channels) as (total, heads, channels)."""
    return tensor[0].transpose(0, 1)


def _options(structure: Structure, scale: float, dtype: torch.dtype) -> dict[str, Any]:
    """What the forward and the backward of npu_fusion_attention are told alike.

    The bias stands inside the scale there. Rows that see nothing are computed as zeros with ``inner_precise`` 2.
    """
    bias = structure.bias
    if bias is not None:
        bias = (bias / scale).clamp(min=torch.finfo(dtype).min).to(dtype)
    return {
        "pse": bias,
        "atten_mask": structure.mask,
        "pre_tockens": structure.before,
        "next_tockens": structure.after,
        "inner_precise": 0 if structure.mask is None else 2,
        "sparse_mode": structure.mode,
    }


def _lengths_and_layout(lengths: tuple[list[int], list[int]] | None) -> tuple[dict[str, Any], str]:
    if lengths is None:
        return {}, "BNSD"
    return {"actual_seq_qlen": lengths[0], "actual_seq_kvlen": lengths[1], "softmax_layout": "TND"}, "TND"


def _biased(structure: Structure, q: Tensor, kv_len: int) -> Structure:
    """The bias in a shape that the operator takes: (batch, heads, q_len, kv_len) or with batch 1."""
    if structure.bias is None:
        return structure
    bias = structure.bias[(None,) * (4 - structure.bias.dim())]
    bias = bias.expand(1 if bias.shape[0] == 1 else q.shape[0], q.shape[1], q.shape[2], kv_len).contiguous()
    return Structure(structure.mask, structure.mode, structure.before, structure.after, bias, structure.visible)


def _fusion(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    structure: Structure,
    scale: float,
    lengths: tuple[list[int], list[int]] | None,
    keep: float,
) -> tuple[Any, ...]:
    """npu_fusion_attention: (out, max, sum, seed, offset), with torch_npu's own derivative.

    Weights are dropped where ``keep`` is below 1. The mask is drawn from the device's generator, and the derivative
    draws it again from its seed and offset.
    """
    heads = q.shape[1]
    structure = _biased(structure, q, k.shape[2])
    said, layout = _lengths_and_layout(lengths)
    if lengths is not None:
        q, k, v = (_packed(tensor).contiguous() for tensor in (q, k, v))
    out, top, total, _, seed, offset, _ = _NPU.npu_fusion_attention(
        q, k, v, heads, layout, scale=scale, keep_prob=keep, **_options(structure, scale, q.dtype), **said
    )
    return (out.transpose(0, 1).unsqueeze(0) if lengths is not None else out), top, total, seed, offset


def _lse_of(top: Tensor, total: Tensor, packed: bool) -> Tensor:
    """max + log(sum) as (batch, heads, q_len); the operator repeats each statistic eight times."""
    lse = top[..., 0] + total[..., 0].log()
    return lse.transpose(0, 1).unsqueeze(0) if packed else lse


def _with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    structure: Structure,
    scale: float,
    lengths: tuple[list[int], list[int]] | None,
    keep: float,
) -> tuple[Any, ...]:
    """npu_fusion_attention_v3, which knows a logit a head that takes weight to nowhere: as ``_fusion``.

    Seed and offset are tensors of the host there.
    """
    heads = q.shape[1]
    structure = _biased(structure, q, k.shape[2])
    said, layout = _lengths_and_layout(lengths)
    if lengths is not None:
        q, k, v = (_packed(tensor).contiguous() for tensor in (q, k, v))
        said |= {name: torch.tensor(said[name]) for name in ("actual_seq_qlen", "actual_seq_kvlen")}
    out, top, total, _, seed, offset = _NPU.npu_fusion_attention_v3(
        q,
        k,
        v,
        heads,
        layout,
        scale=scale,
        keep_prob=keep,
        sink=sinks.float(),
        **_options(structure, scale, q.dtype),
        **said,
    )
    return (out.transpose(0, 1).unsqueeze(0) if lengths is not None else out), top, total, seed, offset


def _drawn(keep: float, seed: Any, offset: Any, q: Tensor, k: Tensor, lengths: Any) -> dict[str, Any]:
    """What the backward is told of the dropout mask, whose length is "[B, N, S, S]", or N times the sum of Sq * Skv."""
    if keep == 1.0:
        return {}
    numels = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if lengths is not None:
        counts = [[b - a for a, b in itertools.pairwise([0, *ends])] for ends in lengths]
        numels = q.shape[1] * sum(rows * columns for rows, columns in zip(*counts, strict=True))
    return {"keep_prob": keep, "seed": int(seed), "offset": int(offset), "numels": numels}


class _Differentiable(torch.autograd.Function):
    """(out, lse), both differentiable, with or without sinks. torch_npu's own formula gives the statistics no gradient.

    The operator's backward takes ``delta = sum(dy * out)`` out of each score's gradient. A gradient of the LSE adds to
    it, so it goes in as one more channel: dy has 1 there, ``out`` has minus the LSE's gradient, and values have 0.
    Dropout changes nothing of that: ``delta`` is the same sum, and the LSE knows nothing of it.
    Sinks are in the statistics already; their own gradient is ``exp(sink - lse) * (dlse - delta)``, summed.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, empty, structure, scale, lengths, keep):
        if sinks is None:
            out, top, total, seed, offset = _fusion(q, k, v, structure, scale, lengths, keep)
        else:
            out, top, total, seed, offset = _with_sinks(q, k, v, sinks, structure, scale, lengths, keep)
        lse = _lse_of(top, total, lengths is not None)
        ctx.save_for_backward(q, k, v, out, top, total, lse, sinks, empty)
        ctx.call = structure, scale, lengths, _drawn(keep, seed, offset, q, k, lengths)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, top, total, lse, sinks, empty = ctx.saved_tensors
        structure, scale, lengths, drawn = ctx.call
        channels, value_dim = q.shape[-1], v.shape[-1]
        dout = torch.zeros_like(out) if dout is None else dout
        dsinks = None
        if sinks is not None:
            through = -(dout.float() * out.float()).sum(-1)
            through = through if dlse is None else through + dlse
            share = torch.exp(sinks.float().view(1, -1, 1) - lse) * through
            if empty is not None:  # the caller's: such a row's LSE is the sink itself
                share = share.masked_fill(empty, 0.0)
            dsinks = share.sum((0, 2)).to(sinks.dtype)
        if dlse is not None:
            room = _LSE_CHANNELS
            q, k, v = (torch.nn.functional.pad(t, (0, room)) for t in (q, k, v))
            one, lse_part = torch.zeros_like(dout[..., :1]), -dlse.to(q.dtype).unsqueeze(-1)
            rest = torch.zeros_like(dout[..., :1]).expand(*dout.shape[:-1], room - 1)
            dout, out = torch.cat([dout, one + 1.0, rest], -1), torch.cat([out, lse_part, rest], -1)
        heads = q.shape[1]
        structure = _biased(structure, q, k.shape[2])
        said, layout = _lengths_and_layout(lengths)
        if lengths is not None:
            q, k, v, dout, out = (_packed(tensor).contiguous() for tensor in (q, k, v, dout, out))
        dq, dk, dv, *_ = _NPU.npu_fusion_attention_grad(
            q,
            k,
            v,
            dout,
            heads,
            layout,
            softmax_max=top,
            softmax_sum=total,
            attention_in=out,
            scale_value=scale,
            **_options(structure, scale, q.dtype),
            **said,
            **drawn,
        )
        if lengths is not None:
            dq, dk, dv = (t.transpose(0, 1).unsqueeze(0) for t in (dq, dk, dv))
        return dq[..., :channels], dk[..., :channels], dv[..., :value_dim], dsinks, None, None, None, None, None
