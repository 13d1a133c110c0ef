"""Prompt: one row to be prefilled, piece by piece: its tokens, and what stands in the place of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atb_modules.models.inputs import Deepstack

if TYPE_CHECKING:
    from atb_modules.attention import KVCacheManager
    from atb_modules.attention.cache.prefix import PrefixImage
    from atb_modules.models.decoder import DecoderModel

#: Features that join the stream behind the first layers: which tokens of a piece, and one tensor a layer.
Injected = tuple[Tensor, tuple[Tensor, ...]]


class Prompt:
    """A row of text.

    Attributes:
        tokens: token ids.
        images: (first placeholder token, content) of every image: part of the key of the pages that hold it.
        shifts: (token, shift): from which token on positions are ahead of the tokens' numbers, and by how much.
    """

    def __init__(
        self,
        tokens: list[int],
        images: Sequence[PrefixImage] = (),
        shifts: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.tokens, self.images, self.shifts = tokens, tuple(images), tuple(shifts)

    @property
    def key(self) -> object:
        """Equal for prompts that compute the same."""
        return tuple(self.tokens), self.images, self.shifts

    def images_before(self, end: int) -> tuple[PrefixImage, ...]:
        """The images that begin before token ``end``."""
        return tuple(image for image in self.images if image[0] < end)

    def prepare(self, begin: int, cache: KVCacheManager) -> None:
        """Called once, before the pieces: tokens before ``begin`` are in the cache already."""

    def embeds(self, model: DecoderModel, begin: int, end: int) -> Tensor:
        """(end - begin, hidden_size) for tokens ``begin`` to ``end``."""
        return model.embed_tokens(torch.tensor(self.tokens[begin:end], device=model.device))

    def positions(self, begin: int, end: int) -> Tensor | None:
        """(axes, end - begin) where tokens stand elsewhere than at their numbers, else None."""
        return None

    def image_ids(self, begin: int, end: int) -> Tensor | None:
        """int64 (end - begin,): numbers of the images that see both ways, -1 for text; None where there is none."""
        return None

    def fitted(self, begin: int, count: int) -> int:
        """``count`` tokens from ``begin`` on, or more where a piece may not end there."""
        return count

    def injected(self, begin: int, end: int) -> Injected | None:
        """Deepstack features of tokens ``begin`` to ``end``."""
        return None


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens of several prompts, one row after the other: what ``DecoderModel.run_packed`` and a cache's step take."""

    embeds: Tensor
    position_ids: Tensor | None
    deepstack: Deepstack | None
    image_ids: Tensor | None


def packed_piece(model: DecoderModel, prompts: Sequence[Prompt], begins: Sequence[int], counts: Sequence[int]) -> Piece:
    """``counts`` tokens of each prompt, from ``begins`` on."""
    embeds: list[Tensor] = []
    images: list[Tensor] = []
    positions: list[Tensor | None] = []
    injected: list[Injected] = []
    total = 0
    for prompt, begin, count in zip(prompts, begins, counts, strict=True):
        if not count:
            continue
        embeds.append(prompt.embeds(model, begin, begin + count))
        positions.append(prompt.positions(begin, begin + count))
        ids = prompt.image_ids(begin, begin + count)
        images.append(torch.full((count,), -1) if ids is None else ids)
        more = prompt.injected(begin, begin + count)
        if more is not None:
            injected.append((more[0] + total, more[1]))
        total += count
    where = None
    if all(part is not None for part in positions):
        where = torch.cat([part for part in positions if part is not None], dim=-1).to(model.device)
    deepstack = None
    if injected:
        layers = zip(*(features for _, features in injected), strict=True)
        index = torch.cat([index for index, _ in injected]).to(model.device)
        deepstack = Deepstack(index, tuple(torch.cat(layer) for layer in layers))
    return Piece(torch.cat(embeds), where, deepstack, torch.cat(images).to(model.device))
