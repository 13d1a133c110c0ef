"""VisionLanguageModel: what compositions of a tower, a projector and a decoder share: parts, prompts, generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.attention import KVCacheManager
from atb_modules.checks import check_int, check_tensor, check_type
from atb_modules.inference.prompt import Prompt
from atb_modules.inference.prompts import PromptLike
from atb_modules.models.decoder import DecoderModel
from atb_modules.models.inputs import check_ids
from atb_modules.overlays import Overlays

from .placeholders import Span, check_whole, image_numbers
from .prompts import FeatureReader, VisionPrompt
from .row_positions import RowPositions
from .visuals import Features, Visual, VisualBatch, check_token_types, place_visuals


class ImageAttention(StrEnum):
    """How the tokens of one image see each other: each those before it, or each all of them (Gemma 3)."""

    CAUSAL = "causal"
    BIDIRECTIONAL = "bidirectional"


class VisionLanguageModel(nn.Module, ABC):
    """A vision tower, a projector and a ``DecoderModel``; subclasses say how they are joined.

    Args:
        vision: pixels to tokens.
        projector: tokens to the width of the language model.
        language: the decoder.
        placeholders: the token that stands for the tokens of each kind of visual ("image", "video").
    """

    def __init__(
        self, vision: nn.Module, projector: nn.Module, language: DecoderModel, placeholders: Mapping[str, int]
    ) -> None:
        super().__init__()
        check_type("vision", vision, nn.Module)
        check_type("projector", projector, nn.Module)
        check_type("language", language, DecoderModel)
        for kind, token_id in placeholders.items():
            check_int(f"{kind}_token_id", token_id, 0, language.config.vocab_size - 1)
        self.vision: Any = vision
        self.projector: Any = projector
        self.language = language
        self.placeholders = dict(placeholders)
        self.both_ways = False
        self.checkpoint_config: dict[str, Any] | None = None
        self.unused_tensors: tuple[str, ...] = ()

    @property
    def vision_dtype(self) -> torch.dtype:
        """The dtype that the tower takes pixels in; that of the language model may be another."""
        first = next(self.vision.parameters(), None)
        return self.language.dtype if first is None else first.dtype

    @abstractmethod
    def encode(self, batch: Any) -> Features:
        """Tokens (total, hidden) of all visuals of a batch, and those of each deepstack layer: tower and projector."""

    def positions(
        self,
        shape: tuple[int, int],
        spans: Sequence[Span],
        visuals: Sequence[Visual],
        attention_mask: Tensor | None,
        past: Sequence[tuple[int, int]] | None = None,
    ) -> RowPositions | None:
        """Positions of the tokens of padded rows where they do not stand at their numbers; see ``row_positions``."""
        return None

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """Disjoint parameters, to freeze or to give learning rates: "vision", "language", "projector" for the rest."""
        named = {"vision": list(self.vision.parameters()), "language": list(self.language.parameters())}
        taken = {id(parameter) for part in named.values() for parameter in part}
        named["projector"] = [parameter for parameter in self.parameters() if id(parameter) not in taken]
        return named

    def new_cache(self, max_seq_len: int | None = None, **options: Any) -> KVCacheManager:
        """A paged cache for the language model, see ``DecoderModel.new_cache``; it keeps features of images too.

        It knows prompts by their tokens and pixels. After a change of weights or positions, call its ``reset()``.
        """
        return self.language.new_cache(max_seq_len, **options)

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the directory that transformers' ``from_pretrained`` and ``load_model`` read; see ``save_model``."""
        # The converter knows this class, so it can only be looked up when it is needed.
        from atb_modules.models.saving import save_model

        save_model(self, directory)

    def _check(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        overlays: Overlays | None = None,
        cache: KVCacheManager | None = None,
        labels: Tensor | None = None,
    ) -> None:
        """What the language model would refuse is refused before the vision tower works."""
        check_ids("input_ids", input_ids, self.language.config.vocab_size)
        self.language.check_call(input_ids, attention_mask, position_ids, overlays, cache, labels)

    def _place(
        self,
        input_ids: Tensor,
        visuals: Sequence[Visual],
        attention_mask: Tensor | None,
        cache: KVCacheManager | None,
        overlays: Overlays | None = None,
    ) -> list[Span]:
        """Where the visuals stand. A row that goes on in a cache without any is text: placeholders were generated."""
        if not visuals and cache is not None and any(cache.lengths):
            return []
        spans = place_visuals(input_ids, self.placeholders, visuals, attention_mask)
        if overlays is not None and overlays.cu_seqlens_q is not None:
            check_whole(spans, overlays.cu_seqlens_q)
        return spans

    def _encode(self, batch: Any, cache: KVCacheManager | None) -> Features:
        """``encode``; a call with a cache has no gradients, and the tower need keep nothing for them."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            return self.encode(batch)

    def _seen(self, spans: Sequence[Span], input_ids: Tensor, overlays: Overlays | None) -> Overlays | None:
        """The overlays of a call, with the images that see both ways."""
        if not self.both_ways:
            return overlays
        numbers = image_numbers(spans, input_ids.shape[0], input_ids.shape[1], input_ids.device)
        return replace(overlays if overlays is not None else Overlays(), image_ids=numbers)

    def _generate(
        self,
        input_ids: PromptLike,
        max_new_tokens: int,
        batch: VisualBatch,
        attention_mask: Tensor | None,
        token_types: Mapping[str, Tensor | None],
        options: Mapping[str, Any],
    ) -> Tensor | list[int] | list[list[int]]:
        if any(types is not None for types in token_types.values()):
            check_tensor("input_ids", input_ids, f"a tensor (batch, seq) with {' or '.join(token_types)}")
            assert isinstance(input_ids, Tensor)
            self._check(input_ids, attention_mask)
            spans = place_visuals(input_ids, self.placeholders, batch.visuals, attention_mask)
            check_token_types(token_types, spans, batch.visuals, input_ids, attention_mask)

        def as_prompts(rows: list[list[int]]) -> list[Prompt]:
            return self._prompts(rows, batch)

        return self.language.generate(
            input_ids, max_new_tokens, attention_mask=attention_mask, as_prompts=as_prompts, **options
        )

    def _prompts(self, rows: list[list[int]], batch: VisualBatch) -> list[Prompt]:
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        spans = place_visuals(ids, self.placeholders, batch.visuals, mask)
        placed = self.positions((len(rows), longest), spans, batch.visuals, mask)
        reader = FeatureReader(self.encode, batch)
        prompts: list[Prompt] = []
        for number, row in enumerate(rows):
            mine = sorted((span for span in spans if span.row == number), key=lambda span: span.start)
            shifts = () if placed is None else placed.shifts[number]
            where = None if placed is None else placed.position_ids[:, number, : len(row)]
            prompts.append(VisionPrompt(row, mine, reader, where, shifts, self.both_ways))
        return prompts
