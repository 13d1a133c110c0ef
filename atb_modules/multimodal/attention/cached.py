"""Multimodal attention over a paged cache: vision once, text as it comes.

Vision tokens are the first tokens of their row's pages, text follows. Text that sees all vision and earlier text is
then bottom-right causal over the row, so that a step of text, a first prompt and a single token alike, is one paged
call: no second cache, no merge, and rows can be forked, reordered and cropped as any others. A later image of a
conversation goes behind the text that came before it, and is seen by the text after it.

    pages of a row   v v v v t t t | t | t | v v v t t | t
                     first call      steps   another image

Default positions are the step's; a model that opens the step for all layers shifts them as it wants
(``KVCacheManager.shift_positions``). Where text does not see vision, the pages hold text alone. Vision tokens are
updated by the call that brings them: they see their image and, in the modes where vision sees text, the text of that
call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atb_modules.attention.cache import CacheStep, KVCacheManager
from atb_modules.attention.cache.refusal import check_batch, check_heads, undone_if_refused
from atb_modules.attention.functional import cache_append, paged_attention
from atb_modules.multimodal.attention.config import TextStart
from atb_modules.multimodal.attention.spec import MultiModalLayout
from atb_modules.multimodal.attention.strategies import MultiModalCall, sample_of, unpacked, vision_rows
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
        ValueError: the cache, its rows or its step do not go with the call, or text is not causal.
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
    if layer < kv_cache.num_layers and kv_cache.windows[layer] is not None:
        raise ValueError(
            f"kv_cache has window {kv_cache.windows[layer]} in layer {layer}; allowed: None, text sees all"
        )
    refusals = undone_if_refused(kv_cache, layer if step is None else None)
    with _positions_kept(kv_cache) if step is None else contextlib.nullcontext(), refusals:
        if step is None:
            check_batch(kv_cache, layout.samples)
            step = _open_step(module, own, lengths, kv_cache, layer)
        else:
            kv_cache.check_step("cache_step", step)
            if step.query_lengths != tuple(lengths):
                raise ValueError(f"cache_step is of {step.query_lengths} tokens; the call brings {tuple(lengths)}")
        return _attend_step(module, vision, text, layout, positions, tables, kv_cache, step, layer)


def _open_step(
    module: MultiModalAttention, own: list[int], lengths: list[int], kv_cache: KVCacheManager, layer: int
) -> CacheStep:
    """The step of a layer called by itself. Whoever opens it tells the cache where text goes on behind its vision.

    Text stands at the number of its token in the row, unless vision tokens count and are not stored, or are stored and
    do not count.
    """
    counts = (module.multimodal.text_start is TextStart.AFTER_VISION) - module.spec.text_sees_vision
    if counts and any(own) and kv_cache.layer_steps.joinable(layer) is None:
        if not kv_cache.batch_size:
            kv_cache.begin(len(own))
        rows = list(zip(kv_cache.lengths, kv_cache.next_positions, own, strict=True))
        for row, (length, position, tokens) in enumerate(rows):
            if tokens:
                begin = length + tokens * module.spec.text_sees_vision
                kv_cache.shift_positions(row, begin, position - length + counts * tokens)
    return kv_cache.layer_step(layer, lengths)


@contextlib.contextmanager
def _positions_kept(kv_cache: KVCacheManager) -> Iterator[None]:
    """Where the block raises, the rows go on where they would have: a shift at a row's end outlives its step."""
    before = kv_cache.next_positions
    try:
        yield
    except BaseException:
        if kv_cache.next_positions != before:
            for row, (length, position) in enumerate(zip(kv_cache.lengths, before, strict=False)):
                kv_cache.shift_positions(row, length, position - length)
        raise


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
    vision_len, text_len = vision.states.shape[0], text.states.shape[0]
    places = _places(layout, vision_len, text_len) if module.spec.text_sees_vision and vision_len else None
    text_at = step.positions if places is None else step.positions[places[1]]
    text_qkv = module.project(text, text_at if positions[1] is None else positions[1], tables[1])
    pages, slots = kv_cache.pages(layer), step.slots(layer)
    append: dict = {"strategy": module.config.cache_strategy, "trusted": True}
    vision_out = vision.states.new_empty(0, module.num_heads, module.head_dim)
    if vision_len:
        vision_at = _vision_positions(module, layout, vision_len, step, places)
        vision_qkv = module.project(vision, vision_at if positions[0] is None else positions[0], tables[0])
        rows = unpacked(vision_qkv), unpacked(text_qkv)
        call = MultiModalCall(*rows, module.spec, layout, 0.0, False, module.attention_strategy)
        vision_out = vision_rows(call)[0].transpose(0, 1)
        if places is not None:
            cache_append(*vision_qkv[1:], *pages, slots[places[0]], **append)
            slots = slots[places[1]]
    if text_len:
        cache_append(*text_qkv[1:], *pages, slots, **append)
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
    return module.project_back(vision, vision_out), module.project_back(text, text_out)


def _places(layout: MultiModalLayout, vision_len: int, text_len: int) -> tuple[Tensor, Tensor]:
    """Where vision and text tokens stand among the step's tokens, which go row by row, vision first."""
    cu_vision, cu_text = layout.cu_vision.long(), layout.cu_text.long()
    first = torch.arange(vision_len, device=cu_text.device) + cu_text[sample_of(layout.cu_vision, vision_len)]
    rest = torch.arange(text_len, device=cu_text.device) + cu_vision[sample_of(layout.cu_text, text_len) + 1]
    return first, rest


def _vision_positions(
    module: MultiModalAttention,
    layout: MultiModalLayout,
    vision_len: int,
    step: CacheStep,
    places: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The default ones: the step's where they count in the row, else from 0 in each row."""
    if places is not None and module.multimodal.text_start is TextStart.AFTER_VISION:
        return step.positions[places[0]]
    numbers = torch.arange(vision_len, device=layout.cu_vision.device)
    return numbers - layout.cu_vision[sample_of(layout.cu_vision, vision_len)]
