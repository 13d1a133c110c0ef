"""VisionPrompt: a row to be prefilled with images in it; their features are computed when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atb_modules.inference.prompt import Injected, Prompt

from .placeholders import Span
from .visuals import Features, VisualBatch

if TYPE_CHECKING:
    from atb_modules.attention import KVCacheManager
    from atb_modules.attention.cache.features import FeatureStore
    from atb_modules.models.decoder import DecoderModel


class FeatureReader:
    """Features of the visuals of a call. All that are wanted when the first is read are encoded in one pass, those of
    equal content once.

    Args:
        encode: features of all visuals of a batch.
        batch: the visuals.
    """

    def __init__(self, encode: Callable[[VisualBatch], Features], batch: VisualBatch) -> None:
        self.batch = batch
        self._encode = encode
        self.digests = [batch.digest(item) for item in range(len(batch.visuals))]
        self._wanted: set[int] = set()
        self._features: dict[bytes, Features] = {}
        self._store: FeatureStore | None = None

    def want(self, items: Sequence[int], store: FeatureStore) -> None:
        """These will be read; what the store has of them need not be encoded, and it gets what is."""
        self._store = store
        self._wanted |= set(items)
        for item in items:
            known = store.get(self.digests[item])
            if known is not None:
                self._features[self.digests[item]] = known

    def __getitem__(self, item: int) -> Features:
        if self.digests[item] not in self._features:
            self._read({item, *self._wanted})
        return self._features[self.digests[item]]

    def _read(self, items: set[int]) -> None:
        first = {self.digests[item]: item for item in sorted(items, reverse=True)}
        missing = sorted(item for digest, item in first.items() if digest not in self._features)
        tokens, deepstack = self._encode(self.batch.select(missing))
        lengths = [self.batch.visuals[item].length for item in missing]
        layers = [layer.split(lengths) for layer in deepstack]
        for place, (item, part) in enumerate(zip(missing, tokens.split(lengths), strict=True)):
            digest = self.digests[item]
            self._features[digest] = part, tuple(layer[place] for layer in layers)
            if self._store is not None:
                self._store.put(digest, self._features[digest])


class VisionPrompt(Prompt):
    """A row of text and visuals.

    Args:
        tokens: token ids, placeholders included; a placeholder outside of ``spans`` is text.
        spans: where its visuals stand, in the order of the tokens.
        reader: their features.
        position_ids: (axes, tokens), or None where tokens stand at their numbers.
        shifts: see ``Prompt``.
        both_ways: whether the tokens of an image see each other; a piece then holds whole images.
    """

    def __init__(
        self,
        tokens: list[int],
        spans: Sequence[Span],
        reader: FeatureReader,
        position_ids: Tensor | None = None,
        shifts: Sequence[tuple[int, int]] = (),
        both_ways: bool = False,
    ) -> None:
        super().__init__(tokens, [(span.start, reader.digests[span.item]) for span in spans], shifts)
        self._spans, self._reader, self._position_ids = list(spans), reader, position_ids
        self._both_ways = both_ways

    def prepare(self, begin: int, cache: KVCacheManager) -> None:
        self._reader.want([span.item for span in self._spans if span.start + span.length > begin], cache.features)

    def embeds(self, model: DecoderModel, begin: int, end: int) -> Tensor:
        embeds = super().embeds(model, begin, end)
        for span, first, last in self._inside(begin, end):
            tokens = self._reader[span.item][0][first - span.start : last - span.start]
            embeds[first - begin : last - begin] = tokens.to(embeds.dtype)
        return embeds

    def positions(self, begin: int, end: int) -> Tensor | None:
        return None if self._position_ids is None else self._position_ids[:, begin:end]

    def image_ids(self, begin: int, end: int) -> Tensor | None:
        if not self._both_ways:
            return None
        ids = torch.full((end - begin,), -1)
        for span, first, last in self._inside(begin, end):
            ids[first - begin : last - begin] = span.item
        return ids

    def fitted(self, begin: int, count: int) -> int:
        for span in self._spans if self._both_ways else ():
            if span.start < begin + count < span.start + span.length:
                return span.start + span.length - begin
        return count

    def injected(self, begin: int, end: int) -> Injected | None:
        index, layers = [], []
        for span, first, last in self._inside(begin, end):
            index.append(torch.arange(first - begin, last - begin))
            layers.append([layer[first - span.start : last - span.start] for layer in self._reader[span.item][1]])
        if not layers or not layers[0]:
            return None
        return torch.cat(index), tuple(torch.cat(parts) for parts in zip(*layers, strict=True))

    def _inside(self, begin: int, end: int) -> list[tuple[Span, int, int]]:
        """The spans that reach into tokens begin to end, and which of those they are."""
        parts = [(span, max(begin, span.start), min(end, span.start + span.length)) for span in self._spans]
        return [part for part in parts if part[1] < part[2]]
