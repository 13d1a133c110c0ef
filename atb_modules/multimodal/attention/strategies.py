"""The ways to one result: separate calls joined by their log-sum-exps, keys side by side, or everything under one mask.

THREE_CALL   text over text, text over vision, vision over vision; nothing is copied, rows are merged in float32
PREFIX       the queries of each modality in one call, over [vision | text] keys: text bottom-right causal
UNIFIED      queries and keys side by side, one call under one mask: what the others are measured against
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atb_modules.attention.calls import attention_traits
from atb_modules.attention.functional import attention
from atb_modules.attention.merge import merge_attention
from atb_modules.checks import check_int, check_type
from atb_modules.kernels.cpu.records import attention_pair_cpu
from atb_modules.kernels.registry import explain_choice, kernels, resolve
from atb_modules.kernels.traits import AttentionTraits
from atb_modules.masks import same_segment
from atb_modules.multimodal.attention.spec import MultiModalLayout, MultiModalSpec
from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import AttentionStrategy, effective_strategy

QKV = tuple[Tensor, Tensor, Tensor]
#: vision's output and LSE, text's output and LSE
Results = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class MultiModalCall:
    """Checked arguments; q, k, v are (batch, heads, tokens, head_dim), with batch 1 where ``layout`` is given."""

    vision: QKV
    text: QKV
    spec: MultiModalSpec
    layout: MultiModalLayout | None
    dropout_p: float
    need_lse: bool
    attention_strategy: str

    def one(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, overlays: Overlays | None, need_lse: bool):
        """One call of attention: (out, lse)."""
        starts = (None, None) if overlays is None else (overlays.cu_seqlens_q, overlays.cu_seqlens_k)
        return attention(
            q,
            k,
            v,
            spec,
            cu_seqlens_q=starts[0],
            cu_seqlens_k=starts[1],
            dropout_p=self.dropout_p,
            return_lse=need_lse,
            strategy=self.attention_strategy,
        )

    def pair(
        self, own: QKV, other: QKV, spec: AttentionSpec, overlays: Overlays | None, across: Overlays | None
    ) -> tuple[Tensor, Tensor | None]:
        """The queries of ``own`` over their own keys and over all keys of ``other``, as one softmax: (out, lse)."""
        q, k, v = own
        _, other_k, other_v = other
        full = self.spec.full
        if q.numel() and k.numel() and other_k.numel():
            parts = [
                (structure, attention_traits(q, *kv, structure, None, None, None, its, self.dropout_p, need_lse=True))
                for kv, structure, its in (((k, v), spec, overlays), ((other_k, other_v), full, across))
            ]
            if native_pair(parts, self.attention_strategy):
                for structure, traits in parts:
                    resolve("attention", structure, traits, AttentionStrategy.CPU)
                out, lse = attention_pair_cpu(q, k, v, other_k, other_v, spec, overlays, across)
                return out, lse if self.need_lse else None
        first, first_lse = self.one(q, k, v, spec, overlays, True)
        second, second_lse = self.one(q, other_k, other_v, full, across, True)
        out, lse = merge_attention([first, second], [first_lse, second_lse])
        return out, lse if self.need_lse else None


def native_pair(parts: Sequence[tuple[AttentionSpec, AttentionTraits]], strategy: str) -> bool:
    """Whether our C++ kernel takes both calls of a pair, which it then merges in place, with one backward.

    AUTO takes it where either call would go there by itself: joining the results of two kernels costs more than the
    other kernel saves.
    """
    asked = effective_strategy("attention", strategy)
    native = [kernel for kernel in kernels("attention") if kernel.strategy is AttentionStrategy.CPU]
    if asked not in (AttentionStrategy.AUTO, AttentionStrategy.CPU) or not native:
        return False
    if any(native[0].reasons_against(spec, traits) for spec, traits in parts):
        return False
    if asked is AttentionStrategy.CPU or torch.compiler.is_compiling():
        return True
    return any(explain_choice("attention", *part).chosen == AttentionStrategy.CPU for part in parts)


def three_call(call: MultiModalCall) -> Results:
    """Each modality over itself and, where the mode says so, over the other; merged exactly."""
    return *vision_part(call), *text_part(call)


def vision_part(call: MultiModalCall) -> tuple[Tensor, Tensor | None]:
    """Vision over its image and, where it sees it, over text: (out, lse)."""
    layout = call.layout
    images = None if layout is None else Overlays(layout.images, layout.images)
    if not call.spec.vision_sees_text:
        return call.one(*call.vision, call.spec.full, images, call.need_lse)
    across = None if layout is None else Overlays(layout.cu_vision, layout.cu_text)
    return call.pair(call.vision, call.text, call.spec.full, images, across)


def vision_rows(call: MultiModalCall) -> Tensor:
    """Vision's output alone: in parts, or in one call under ``unified_mask`` where no part would return its LSE."""
    asked = effective_strategy("attention", call.attention_strategy)
    if not call.spec.vision_sees_text or asked is not AttentionStrategy.SDPA:
        return vision_part(call)[0]
    vision_len, text_len = call.vision[0].shape[2], call.text[0].shape[2]
    keys, values = (torch.cat(parts, dim=2) for parts in zip(call.vision[1:], call.text[1:], strict=True))
    mask = unified_mask(call.spec, vision_len, text_len, call.layout, keys.device)[:vision_len]
    options: dict[str, Any] = {"dropout_p": call.dropout_p, "strategy": call.attention_strategy}
    out, _ = attention(call.vision[0], keys, values, call.spec.full, mask=mask, **options)
    return out


def text_part(call: MultiModalCall) -> tuple[Tensor, Tensor | None]:
    """Text over text and, where it sees it, over vision: (out, lse)."""
    layout = call.layout
    samples = None if layout is None else Overlays(layout.cu_text, layout.cu_text)
    if not call.spec.text_sees_vision:
        return call.one(*call.text, call.spec.text, samples, call.need_lse)
    across = None if layout is None else Overlays(layout.cu_text, layout.cu_vision)
    return call.pair(call.text, call.vision, call.spec.text, samples, across)


def prefix(call: MultiModalCall) -> Results:
    """One call a modality: the keys of vision are a prefix of those of text.

    Vision tokens of several images that also see text have no such form: those are split.
    """
    spec, layout = call.spec, call.layout
    several = layout is not None and layout.cu_images is not None
    joined_vision = spec.vision_sees_text and not several
    vision_starts = text_starts = None
    if joined_vision or spec.text_sees_vision:
        keys, values, starts = side_by_side(call)
        if layout is not None and starts is not None:
            vision_starts, text_starts = Overlays(layout.cu_vision, starts), Overlays(layout.cu_text, starts)
    if joined_vision:
        vision = call.one(call.vision[0], keys, values, spec.full, vision_starts, call.need_lse)
    else:
        vision = vision_part(call)
    if spec.text_sees_vision:
        text = call.one(call.text[0], keys, values, spec.text, text_starts, call.need_lse)
    else:
        text = text_part(call)
    return *vision, *text


def side_by_side(call: MultiModalCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values as [vision | text] in each sample, and where the samples begin (None for dense rows)."""
    keys, values = (torch.cat(parts, dim=2) for parts in zip(call.vision[1:], call.text[1:], strict=True))
    if call.layout is None:
        return keys, values, None
    cu_vision, cu_text = call.layout.cu_vision.long(), call.layout.cu_text.long()
    vision_sample = sample_of(call.layout.cu_vision, call.vision[0].shape[2])
    text_sample = sample_of(call.layout.cu_text, call.text[0].shape[2])
    # each token moves past the text of earlier samples, or past the vision tokens of its own and earlier ones
    now = torch.arange(keys.shape[2], device=keys.device)
    before = torch.cat([cu_text[vision_sample], cu_vision[text_sample + 1] - call.vision[0].shape[2]])
    order = torch.empty_like(now).scatter_(0, now + before, now)
    starts = call.layout.cu_vision + call.layout.cu_text
    return keys.index_select(2, order), values.index_select(2, order), starts


def unpacked(qkv: QKV) -> QKV:
    """Packed (tokens, heads, head_dim) as (1, heads, tokens, head_dim)."""
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in qkv)
    return q, k, v


def sample_of(starts: Tensor, total: int) -> Tensor:
    """The sample (or image) that each of ``total`` tokens belongs to."""
    numbers = torch.arange(starts.numel() - 1, device=starts.device)
    return torch.repeat_interleave(numbers, starts.diff(), output_size=total)


def unified(call: MultiModalCall) -> Results:
    """Everything side by side, all vision tokens first, in one call under ``unified_mask``."""
    vision_len, text_len = call.vision[0].shape[2], call.text[0].shape[2]
    q, k, v = (torch.cat(parts, dim=2) for parts in zip(call.vision, call.text, strict=True))
    mask = unified_mask(call.spec, vision_len, text_len, call.layout, q.device)
    out, lse = attention(
        q,
        k,
        v,
        call.spec.full,
        mask=mask,
        dropout_p=call.dropout_p,
        return_lse=call.need_lse,
        strategy=call.attention_strategy,
    )
    vision_out, text_out = out.split([vision_len, text_len], dim=2)
    if lse is None:
        return vision_out, None, text_out, None
    vision_lse, text_lse = lse.split([vision_len, text_len], dim=2)
    return vision_out, vision_lse, text_out, text_lse


def unified_mask(
    spec: MultiModalSpec,
    vision_len: int,
    text_len: int,
    layout: MultiModalLayout | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The truth about who sees whom, all vision tokens first: bool (tokens, tokens), True = may attend.

    ``CrossAttentionMode`` draws it.
    """
    check_type("spec", spec, MultiModalSpec)
    check_type("layout", layout, MultiModalLayout, optional=True)
    check_int("vision_len", vision_len, least=0)
    check_int("text_len", text_len, least=0)
    if layout is not None:
        layout.check(vision_len, text_len)
    total = vision_len + text_len
    mask = torch.zeros(total, total, dtype=torch.bool, device=device)
    mask[:vision_len, :vision_len] = True
    mask[:vision_len, vision_len:] = spec.vision_sees_text
    mask[vision_len:, :vision_len] = spec.text_sees_vision
    text = torch.ones(text_len, text_len, dtype=torch.bool, device=device)
    mask[vision_len:, vision_len:] = text.tril() if spec.text_causal else text
    if layout is None:
        return mask
    samples = torch.cat([sample_of(layout.cu_vision, vision_len), sample_of(layout.cu_text, text_len)])
    images = sample_of(layout.images, vision_len)
    mask &= same_segment(samples[:, None], samples[None])
    mask[:vision_len, :vision_len] &= same_segment(images[:, None], images[None])
    return mask
