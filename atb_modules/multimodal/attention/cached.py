"""Multimodal attention over a paged cache: vision once, text as it comes.

Vision tokens are the first tokens of their row's pages, text follows. Text that sees all vision and earlier text is
then bottom-right causal over the row, so that a step of text, a first prompt and a single token alike, is one paged
call: no second cache, no merge, and rows can be forked, reordered and cropped as any others. A later image of a
conversation goes behind the text that came before it, and is seen by the text after it.

    pages of a row   v v v v t t t | t | t | v v v t t | t
                     first call      steps   another image

Where text does not see vision, the pages hold text alone. Vision tokens are updated by the call that brings them: they
see their image and, in the modes where vision sees text, the text of that call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atb_modules.attention.cache import CacheStep, KVCacheManager
from atb_modules.attention.cache.refusal import check_batch, check_heads, undone_if_refused
from atb_modules.attention.functional import cache_append, paged_attention
from atb_modules.multimodal.attention.config import TextStart
from atb_modules.multimodal.attention.spec import MultiModalLayout
from atb_modules.multimodal.attention.strategies import MultiModalCall, sample_of, unpacked, vision_part
from atb_modules.multimodal.attention.tokens import RotaryTables, Tokens

if TYPE_CHECKING:
    from atb_modules.multimodal.attention.module import MultiModalAttention


def attend_cached(
    module: MultiModalAttention,
    vision: Tokens,
    text: Tokens,
    layout: MultiModalLayout,
    positions: tuple[Tensor | None, Tensor | None],
    tables: tuple[RotaryTables | None, RotaryTables | None],
    kv_cache: KVCacheManager,
    step: CacheStep | None,
) -> tuple[Tensor, Tensor]:
    """Append, attend and project back; both modalities are packed.

    Raises:
        ValueError: the cache, its rows or its step do not go with the call; text that is not causal; or default
            positions that cannot be told from what the cache holds.
    """
    check_heads(kv_cache, module.num_kv_heads, module.head_dim)
    if not module.spec.text_causal:
        raise ValueError("kv_cache is given; config.causal False has no cache, later text would change earlier text")
    if kv_cache.device != text.states.device:
        raise ValueError(f"kv_cache is on {kv_cache.device}; text is on {text.states.device}")
    stored = module.spec.text_sees_vision
    own, others = layout.cu_vision.diff().tolist(), layout.cu_text.diff().tolist()
    lengths = [a * stored + b for a, b in zip(own, others, strict=True)]
    layer = module.layer_idx
    if layer is None:
        layer = module.layer_idx = kv_cache.register_layer()
    with undone_if_refused(kv_cache, layer if step is None else None):
        if step is None:
            check_batch(kv_cache, layout.samples)
            step = kv_cache.layer_step(layer, lengths)
        else:
            kv_cache.check_step("cache_step", step)
            if step.query_lengths != tuple(lengths):
                raise ValueError(f"cache_step is of {step.query_lengths} tokens; the call brings {tuple(lengths)}")
        return _attend_step(module, vision, text, layout, positions, tables, kv_cache, step, layer)


def _attend_step(
    module: MultiModalAttention,
    vision: Tokens,
    text: Tokens,
    layout: MultiModalLayout,
    positions: tuple[Tensor | None, Tensor | None],
    tables: tuple[RotaryTables | None, RotaryTables | None],
    kv_cache: KVCacheManager,
    step: CacheStep,
    layer: int,
) -> tuple[Tensor, Tensor]:
    stored = module.spec.text_sees_vision
    vision_len, text_len = vision.states.shape[0], text.states.shape[0]
    known = _positions(module, layout, positions, tables, step, vision_len, text_len)
    vision_qkv, text_qkv = module.project(vision, text, known, tables)
    pages, slots = kv_cache.pages(layer), step.slots(layer)
    text_slots = slots
    options: dict = {"strategy": module.config.cache_strategy, "trusted": True}
    if stored and vision_len:
        first, rest = _places(layout, vision_len, text_len)
        cache_append(*vision_qkv[1:], *pages, slots[first], **options)
        text_slots = slots[rest]
    if text_len:
        cache_append(*text_qkv[1:], *pages, text_slots, **options)
    text_out, _ = paged_attention(
        text_qkv[0],
        *pages,
        step.block_table(layer),
        step.kv_lengths,
        layout.cu_text,
        module.spec.text,
        strategy=module.attention_strategy,
        trusted=True,
    )
    vision_out = vision_qkv[0]
    if vision_len:
        rows = unpacked(vision_qkv), unpacked(text_qkv)
        call = MultiModalCall(*rows, module.spec, layout, 0.0, False, module.attention_strategy)
        vision_out = vision_part(call)[0][0].transpose(0, 1)
    return module.project_back(vision, vision_out), module.project_back(text, text_out)


def _places(layout: MultiModalLayout, vision_len: int, text_len: int) -> tuple[Tensor, Tensor]:
    """Where vision and text tokens stand among the step's tokens, which go row by row, vision first."""
    cu_vision, cu_text = layout.cu_vision.long(), layout.cu_text.long()
    first = torch.arange(vision_len, device=cu_text.device) + cu_text[sample_of(layout.cu_vision, vision_len)]
    rest = torch.arange(text_len, device=cu_text.device) + cu_vision[sample_of(layout.cu_text, text_len) + 1]
    return first, rest


def _positions(
    module: MultiModalAttention,
    layout: MultiModalLayout,
    given: tuple[Tensor | None, Tensor | None],
    tables: tuple[RotaryTables | None, RotaryTables | None],
    step: CacheStep,
    vision_len: int,
    text_len: int,
) -> tuple[Tensor | None, Tensor | None]:
    """The caller's positions, or the default ones behind what each row holds."""
    stored = module.spec.text_sees_vision
    after = module.multimodal.text_start is TextStart.AFTER_VISION
    device = layout.cu_text.device
    past = torch.tensor(step.past_lengths, device=device)
    vision, text = given
    if vision is None and module.vision_rotary is not None:
        sample = sample_of(layout.cu_vision, vision_len)
        vision = torch.arange(vision_len, device=device) - layout.cu_vision[sample]
        vision = vision + past[sample] if after and stored else vision
    if text is None and module.text_rotary is not None and tables[1] is None:
        if stored != after and any(step.past_lengths):
            raise ValueError(
                f"text_positions is None; rows of {step.past_lengths} tokens in a cache do not tell where text of "
                f"text_start {str(module.multimodal.text_start)!r} and mode {str(module.spec.cross)!r} goes on"
            )
        sample = sample_of(layout.cu_text, text_len)
        text = torch.arange(text_len, device=device) - layout.cu_text[sample]
        text = text + layout.cu_vision.diff()[sample] if after else text
        text = text + past[sample] if stored == after else text
    return vision, text
