"""Placeholders: where a prompt's images stand, checked image by image, and their features put there.

A processor leaves one placeholder token for each feature of an image. A run of placeholders holds one image or
several side by side; it must end where an image ends::

    text text <img><img><img><img><img><img> text       images of 4 and 2 features: one run of 6
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atb_modules.checks import check_int


@dataclass(frozen=True)
class Span:
    """The placeholders of one image (or one frame of a video): ``length`` tokens of ``row`` from ``start`` on.

    ``item`` is the image's number among all that were given, in the order of the rows.
    """

    row: int
    start: int
    length: int
    item: int


def find_spans(
    input_ids: Tensor,
    token_id: int,
    counts: Sequence[int],
    attention_mask: Tensor | None = None,
    *,
    name: str = "image",
) -> list[Span]:
    """The span of each image, by the token that stands for it.

    Args:
        input_ids: integers (batch, seq).
        token_id: the placeholder.
        counts: features of each image, in the order of the rows.
        attention_mask: (batch, seq), 1 = real; a placeholder that is padding is none.
        name: what the items are called in an error.

    Raises:
        ValueError: a run of placeholders ends inside of an image, or images and placeholders do not come out even. The
            message names row, image and both numbers. Totals that agree do not help.
    """
    check_int("token_id", token_id, 0)
    found = input_ids == token_id
    if attention_mask is not None:
        found = found & (attention_mask != 0)
    spans: list[Span] = []
    for row, start, length in _runs(found):
        used = 0
        while used < length:
            item = len(spans)
            if item == len(counts):
                raise ValueError(
                    f"input_ids has {length - used} placeholders ({token_id}) left at token {start + used} of row "
                    f"{row}; {len(counts)} {name}s with {sum(counts)} features were given, and they are placed"
                )
            if used + counts[item] > length:
                before = f", of which {used} belong to {name}s before it" if used else ""
                raise ValueError(
                    f"row {row}, {name} {item}: {length - used} placeholders, {counts[item]} features (a run of "
                    f"{length} placeholders ({token_id}) at token {start} of input_ids{before})"
                )
            spans.append(Span(row, start + used, counts[item], item))
            used += counts[item]
    if len(spans) < len(counts):
        item = len(spans)
        raise ValueError(
            f"{len(counts)} {name}s were given and input_ids has placeholders ({token_id}) for {item}: {name} {item} "
            f"has {counts[item]} features and 0 placeholders"
        )
    return spans


def _runs(found: Tensor) -> list[tuple[int, int, int]]:
    """(row, start, length) of each run of True in (batch, seq)."""
    edges = torch.nn.functional.pad(found.to(torch.int8), (1, 1)).diff(dim=1).cpu()
    begins, ends = (edges == 1).nonzero().tolist(), (edges == -1).nonzero().tolist()
    return [(row, begin, end - begin) for (row, begin), (_, end) in zip(begins, ends, strict=True)]


def check_whole(spans: Sequence[Span], cu_seqlens: Tensor) -> None:
    """Raises a ValueError where a sequence of a packed row begins inside of a span."""
    for begin in cu_seqlens.tolist():
        for span in spans:
            if span.start < begin < span.start + span.length:
                raise ValueError(
                    f"cu_seqlens_q has a sequence that begins at token {begin}, inside of image {span.item}, which has "
                    f"{span.length} placeholders from token {span.start} on; allowed: whole images"
                )


def span_index(spans: Sequence[Span], seq_len: int, device: torch.device | str | None = None) -> Tensor:
    """int64 (features,): the place of every feature in the flattened (batch * seq), in the order of the items."""
    parts = [torch.arange(s.row * seq_len + s.start, s.row * seq_len + s.start + s.length) for s in spans]
    index = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    return index.to(device)


def merge_features(inputs_embeds: Tensor, features: Tensor, spans: Sequence[Span]) -> Tensor:
    """inputs_embeds (batch, seq, hidden) with features (total, hidden), in the order of spans, at their places.

    Raises:
        ValueError: features that are not as many as the spans take, or of another width.
    """
    total, hidden = sum(span.length for span in spans), inputs_embeds.shape[-1]
    if tuple(features.shape) != (total, hidden):
        raise ValueError(
            f"features has shape {tuple(features.shape)}; {len(spans)} spans take ({total}, {hidden}), one feature a "
            "placeholder"
        )
    index = span_index(spans, inputs_embeds.shape[1], inputs_embeds.device)
    flat = inputs_embeds.flatten(0, 1).index_copy(0, index, features.to(inputs_embeds.dtype))
    return flat.reshape(inputs_embeds.shape)


def image_numbers(spans: Sequence[Span], batch: int, seq_len: int, device: torch.device | str | None = None) -> Tensor:
    """int64 (batch, seq): the number of the image of each token, -1 for text, as ``Overlays.image_ids``."""
    numbers = torch.full((batch, seq_len), -1, dtype=torch.int64)
    for span in spans:
        numbers[span.row, span.start : span.start + span.length] = span.item
    return numbers.to(device)
