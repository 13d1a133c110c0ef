"""The registry's records of attention of two modalities: what each strategy's calls cost, and AUTO's choice by that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from atb_modules.kernels.costs import Cost, predicted_seconds
from atb_modules.kernels.registry import WHEN_FORGOTTEN, Kernel, explain_choice, register
from atb_modules.kernels.traits import AttentionTraits, MultiModalTraits
from atb_modules.multimodal.attention.spec import MultiModalSpec
from atb_modules.multimodal.attention.strategies import (
    MultiModalCall,
    Results,
    native_pair,
    prefix,
    three_call,
    unified,
)
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import AttentionStrategy, MultiModalStrategy, effective_strategy

PartialCall = tuple[AttentionSpec, AttentionTraits]

#: By how much AUTO counts a strategy as slower than predicted: PREFIX holds all keys a second time, UNIFIED everything
#: and a mask, so that each has to be clearly faster to be chosen.
MARGINS = {MultiModalStrategy.PREFIX: 1.1, MultiModalStrategy.UNIFIED: 1.5}


def partial_calls(
    strategy: MultiModalStrategy, spec: MultiModalSpec, traits: MultiModalTraits
) -> list[list[PartialCall]]:
    """The calls of attention that ``strategy`` makes, those that are merged in one list; empty ones are left out."""
    vision, text = traits.vision_len, traits.text_len
    of_vision, of_text, across = traits.packed_pairs or (None, None, None)
    if strategy in (MultiModalStrategy.UNIFIED, MultiModalStrategy.REFERENCE):
        whole = _part(traits, vision + text, vision + text, None, 0, traits.need_lse, masked=True)
        return [_filled((spec.full, whole))]
    several = traits.images != traits.samples
    calls = []
    for own, other, sees, structure, own_pairs, count, joins in (
        (vision, text, spec.vision_sees_text, spec.full, of_vision, traits.images, not several),
        (text, vision, spec.text_sees_vision, spec.text, of_text, traits.samples, True),
    ):
        if sees and joins and strategy is MultiModalStrategy.PREFIX:
            both = None if own_pairs is None or across is None else own_pairs + across
            part = _part(traits, own, own + other, both, traits.samples, traits.need_lse)
            calls.append(_filled((structure, part)))
            continue
        first = structure, _part(traits, own, own, own_pairs, count, traits.need_lse or sees)
        second = spec.full, _part(traits, own, other, across, traits.samples, True)
        calls.append(_filled(first, second) if sees else _filled(first))
    return calls


def _filled(*calls: PartialCall) -> list[PartialCall]:
    return [(spec, part) for spec, part in calls if part.batch and part.q_len and part.kv_len]


def _part(
    traits: MultiModalTraits,
    q_len: int,
    kv_len: int,
    pairs: float | None,
    segments: int,
    need_lse: bool,
    masked: bool = False,
) -> AttentionTraits:
    return AttentionTraits(
        device_type=traits.device_type,
        dtype=traits.dtype,
        batch=traits.batch,
        num_heads=traits.num_heads,
        num_kv_heads=traits.num_kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=traits.head_dim,
        value_dim=traits.value_dim,
        mask="bool" if masked else "none",
        mask_elements=q_len * kv_len if masked else 0,
        segments=segments,
        seen=None if pairs is None else pairs * traits.num_heads,
        dropout=traits.dropout,
        need_lse=need_lse,
        requires_grad=traits.requires_grad,
        contiguous=traits.contiguous,
    )


def _extra(strategy: MultiModalStrategy, spec: MultiModalSpec, traits: MultiModalTraits) -> Cost:
    """What is moved around the calls: outputs that are merged, keys and queries that are put side by side."""
    size = 1.0 * traits.batch * traits.dtype.itemsize * (traits.head_dim + traits.value_dim)
    tokens = traits.vision_len + traits.text_len
    keys = 2.0 * size * traits.num_kv_heads * tokens * (2 if traits.samples else 1)
    grad = 2.0 if traits.requires_grad else 1.0
    if strategy in (MultiModalStrategy.UNIFIED, MultiModalStrategy.REFERENCE):
        queries = size * traits.num_heads * tokens
        return Cost(bytes=grad * (keys + queries), calls=3.0, cells=1.0 * tokens * tokens)
    joins = spec.vision_sees_text or spec.text_sees_vision
    if strategy is MultiModalStrategy.PREFIX:
        return Cost(bytes=grad * keys * joins, calls=2.0 * joins)
    merged = traits.vision_len * spec.vision_sees_text + traits.text_len * spec.text_sees_vision
    return Cost(bytes=1.5 * size * traits.num_heads * merged, calls=6.0 * joins)


@functools.lru_cache(maxsize=1024)
def _judged(
    strategy: MultiModalStrategy, spec: MultiModalSpec, traits: MultiModalTraits, inner: str
) -> tuple[tuple[str, ...], float]:
    """Reasons against ``strategy`` and its predicted seconds, with ``inner`` as the attention strategy of its calls."""
    seconds, reasons = 0.0, []
    for merged in partial_calls(strategy, spec, traits):
        asked = AttentionStrategy.CPU.value if len(merged) == 2 and native_pair(merged, inner) else inner
        for structure, part in merged:
            table = explain_choice("attention", structure, part, asked)
            chosen = next((row for row in table.rows if row.chosen), None)
            if chosen is None:
                reasons += [why for row in table.rows if asked in ("auto", row.strategy) for why in row.reasons]
            else:
                seconds += chosen.predicted_seconds or 0.0
    extra = _extra(strategy, spec, traits)
    seconds += predicted_seconds("multimodal_attention", "torch", spec, traits, extra)
    return tuple(dict.fromkeys(reasons)), seconds * MARGINS.get(strategy, 1.0)


WHEN_FORGOTTEN.append(_judged.cache_clear)


@dataclass(frozen=True)
class _MultiModalKernel(Kernel):
    """A kernel that is made of calls of attention: its reasons and its time are those of the calls."""

    def predicted_seconds(self, spec: Any, traits: Any) -> float:
        return _judged(self.strategy, spec, traits, _inner(self.strategy, traits))[1]


def _inner(strategy: Any, traits: MultiModalTraits) -> str:
    if strategy is MultiModalStrategy.REFERENCE:
        return "reference"
    return effective_strategy("attention", traits.attention_strategy).value


def _reasons(strategy: MultiModalStrategy) -> Callable[[Any, Any], tuple[str, ...]]:
    def reasons(spec: MultiModalSpec, traits: MultiModalTraits) -> tuple[str, ...]:
        if torch.compiler.is_compiling():
            return ()
        return _judged(strategy, spec, traits, _inner(strategy, traits))[0]

    return reasons


def reference(call: MultiModalCall) -> Results:
    """UNIFIED by the einops reference: the truth of the tests."""
    return unified(replace(call, attention_strategy="reference"))


# Registered in this order: while a call is traced for every length, AUTO takes the first.
for _strategy, _function in (
    (MultiModalStrategy.THREE_CALL, three_call),
    (MultiModalStrategy.PREFIX, prefix),
    (MultiModalStrategy.UNIFIED, unified),
    (MultiModalStrategy.REFERENCE, reference),
):
    register(
        _MultiModalKernel(
            "multimodal_attention",
            _strategy,
            _function,
            _reasons(_strategy),
            functools.partial(_extra, _strategy),
        )
    )
