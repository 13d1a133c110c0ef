"""Visuals: the images, videos and frames of a batch, as the language model sees them, and where they stand in it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atb_modules.checks import check_tensor

from .placeholders import Span, find_spans

#: A processor's word on the tokens of each kind; text is 0.
_TYPE_IDS = {"image": 1, "video": 2}

#: tokens (total, hidden) of visuals one after the other, and the same for each layer of deepstack.
Features = tuple[Tensor, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Visual:
    """One image, one video, or one frame that stands by itself.

    Args:
        kind: "image", "video" or the like; each kind has a placeholder of its own.
        grid: its tokens in time, height and width, after merging.
        time_step: see ``VisionBlock``.
    """

    kind: str
    grid: tuple[int, int, int]
    time_step: float = 1.0

    @property
    def length(self) -> int:
        time, height, width = self.grid
        return time * height * width


class VisualBatch(ABC):
    """The visuals of a call in the order of the rows, images before videos, with their pixels."""

    visuals: list[Visual]

    @abstractmethod
    def select(self, items: Sequence[int]) -> VisualBatch:
        """The same for some of the visuals."""

    @abstractmethod
    def pixels(self, item: int) -> Tensor:
        """What the tower sees of one visual."""

    def content(self, item: int) -> str:
        """What the features of a visual depend on beside its pixels."""
        return str(self.visuals[item])

    def digest(self, item: int) -> bytes:
        """SHA-256 of all that the features of a visual depend on."""
        pixels = self.pixels(item).detach().to("cpu").contiguous()
        digest = hashlib.sha256(f"{self.content(item)} {pixels.dtype} {tuple(pixels.shape)} ".encode())
        digest.update(pixels.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.digest()


def place_visuals(
    input_ids: Tensor, kinds: Mapping[str, int], visuals: Sequence[Visual], attention_mask: Tensor | None = None
) -> list[Span]:
    """The span of every visual in input_ids (batch, seq), in the order of the visuals.

    Args:
        kinds: the placeholder of each kind of visual, by its name. Those of a kind of which none was given raise too.

    Raises:
        ValueError: see ``find_spans``.
    """
    spans: list[Span] = []
    for name, token_id in kinds.items():
        items = [item for item, visual in enumerate(visuals) if visual.kind == name]
        counts = [visuals[item].length for item in items]
        found = find_spans(input_ids, token_id, counts, attention_mask, name=name)
        spans += [replace(span, item=items[span.item]) for span in found]
    return sorted(spans, key=lambda span: span.item)


def check_token_types(
    given: Mapping[str, Tensor | None],
    spans: Sequence[Span],
    visuals: Sequence[Visual],
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
) -> None:
    """Raises where a processor's word on a token, 0 text, 1 image, 2 video, is not what was found in input_ids.

    Args:
        given: the words (batch, seq) or None, by the names of their arguments.
        spans, visuals: as ``place_visuals`` has them.
        attention_mask: (batch, seq), 1 = real; what is said of padding is not read.
    """
    for name, types in given.items():
        if types is None:
            continue
        check_tensor(name, types, "a tensor (batch, seq) or None")
        if types.shape != input_ids.shape:
            raise ValueError(f"{name} has shape {tuple(types.shape)}; input_ids has {tuple(input_ids.shape)}")
        rest = types != 0 if attention_mask is None else (types != 0) & (attention_mask != 0)
        for span in spans:
            kind, where = visuals[span.item].kind, slice(span.start, span.start + span.length)
            found, want = types[span.row, where], _TYPE_IDS[kind]
            if bool((found != want).any()):
                raise ValueError(
                    f"{name} has {sorted(set(found.tolist()))} at tokens {span.start} to {where.stop - 1} of row "
                    f"{span.row}; input_ids has the placeholders of {kind} {span.item} there, allowed: {want}"
                )
            rest[span.row, where] = False
        if bool(rest.any()):
            row, token = rest.nonzero()[0].tolist()
            raise ValueError(
                f"{name} has {int(types[row, token])} at token {token} of row {row}; no image or video that was given "
                "stands there, allowed: 0"
            )
