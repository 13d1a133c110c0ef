"""Tiling: how images are cut for a tower of one size, and how its tokens are put together again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.checks import check_floating, check_int

from .vision import join_tiles, num_anyres_tokens, tile_grid
from .visuals import Visual, VisualBatch

ImageSizes = Tensor | Sequence[tuple[int, int]]


class Tiles(VisualBatch):
    """Images as tiles of one size, one image after the other.

    Args:
        tiles: (tiles, channels, height, width).
        visuals: the images, each with the tokens that it will have.
        counts: tiles of each image.
        sizes: height and width of each image before it was cut; None where nothing depends on them.
    """

    def __init__(
        self,
        tiles: Tensor,
        visuals: list[Visual],
        counts: Sequence[int],
        sizes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.tiles, self.visuals, self.counts, self.sizes = tiles, visuals, list(counts), sizes
        self._starts = [sum(self.counts[:number]) for number in range(len(self.counts))]

    def pixels(self, item: int) -> Tensor:
        return self.tiles[self._starts[item] : self._starts[item] + self.counts[item]]

    def content(self, item: int) -> str:
        # Two images of the same tiles may lose other rows and columns to unpadding, and have as many tokens left.
        return super().content(item) + ("" if self.sizes is None else f" of {self.sizes[item]}")

    def select(self, items: Sequence[int]) -> Tiles:
        tiles = torch.cat([self.pixels(item) for item in items]) if items else self.tiles[:0]
        sizes = None if self.sizes is None else [self.sizes[item] for item in items]
        return Tiles(tiles, [self.visuals[item] for item in items], [self.counts[item] for item in items], sizes)


class Tiling(nn.Module, ABC):
    """Base: ``cut`` pixels into tiles, ``join`` the tokens of the tiles."""

    @abstractmethod
    def cut(self, pixel_values: Tensor | None, image_sizes: ImageSizes | None) -> Tiles:
        """The tiles of each image, with the number of tokens that it will have."""

    @abstractmethod
    def join(self, tokens: Tensor, batch: Tiles) -> Tensor:
        """(total, hidden): the tokens (tiles, patches, hidden) of a batch, image after image."""


class WholeImage(Tiling):
    """Every image is one tile (LLaVA 1.5).

    Args:
        tokens_per_image: tokens that the tower makes of an image; None to take them from the sizes of the pixels and
            ``patch_size``.
        patch_size: side of a patch in pixels.
    """

    def __init__(self, tokens_per_image: int | None = None, *, patch_size: int | None = None) -> None:
        super().__init__()
        check_int("tokens_per_image", tokens_per_image, optional=True)
        check_int("patch_size", patch_size, optional=True)
        if (tokens_per_image is None) == (patch_size is None):
            raise ValueError(
                f"tokens_per_image is {tokens_per_image} and patch_size {patch_size}; allowed: one of them, and None"
            )
        self.tokens_per_image, self.patch_size = tokens_per_image, patch_size

    def cut(self, pixel_values: Tensor | None, image_sizes: ImageSizes | None) -> Tiles:
        if pixel_values is None:
            return Tiles(torch.empty(0), [], [])
        check_floating("pixel_values", pixel_values, "a floating tensor (images, channels, height, width)")
        if pixel_values.dim() != 4:
            raise ValueError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; allowed: (images, channels, height, width)"
            )
        grid = (1, 1, self.tokens_per_image or 0)
        if self.patch_size is not None:
            grid = (1, pixel_values.shape[2] // self.patch_size, pixel_values.shape[3] // self.patch_size)
        images = pixel_values.shape[0]
        return Tiles(pixel_values, [Visual("image", grid)] * images, [1] * images)

    def join(self, tokens: Tensor, batch: Tiles) -> Tensor:
        return tokens.flatten(0, 1)


class AnyResolution(Tiling):
    """The whole image as one tile, then its tiles at the best resolution, unpadded, a newline behind each row.

    LLaVA-NeXT (Liu et al. 2024)::

        whole image    tiles, rows of all of them together
        a a            b b c c n        n: image_newline, a trained token
        a a            b b c c n

    Args:
        hidden_size: of the language model.
        pinpoints: (height, width) of the allowed resolutions in pixels.
        tile_size, patch_size: sides of a tile and of a patch in pixels.
        max_tiles: about how many tiles the rows of all of them are resampled to (LLaVA-OneVision); None for no bound.
    """

    def __init__(
        self,
        hidden_size: int,
        pinpoints: Sequence[Sequence[int]],
        tile_size: int,
        patch_size: int,
        *,
        max_tiles: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("max_tiles", max_tiles, optional=True)
        for name, value in (("hidden_size", hidden_size), ("tile_size", tile_size), ("patch_size", patch_size)):
            check_int(name, value)
        self.pinpoints = tuple((int(height), int(width)) for height, width in pinpoints)
        self.tile_size, self.patch_size = tile_size, patch_size
        self._sizes: dict[str, Any] = {"pinpoints": self.pinpoints, "tile_size": tile_size, "max_tiles": max_tiles}
        self.image_newline = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        nn.init.normal_(self.image_newline, std=hidden_size**-0.5)

    def cut(self, pixel_values: Tensor | None, image_sizes: ImageSizes | None) -> Tiles:
        if pixel_values is None:
            return Tiles(torch.empty(0), [], [])
        check_floating("pixel_values", pixel_values, "a floating tensor (images, tiles, channels, height, width)")
        sizes = _sizes(image_sizes)
        if pixel_values.dim() != 5 or pixel_values.shape[0] != len(sizes):
            raise ValueError(
                f"pixel_values has shape {tuple(pixel_values.shape)} and image_sizes {len(sizes)} images; allowed: "
                f"(images, tiles, channels, {self.tile_size}, {self.tile_size}), and a size for each image"
            )
        counts, visuals = [], []
        for number, (height, width) in enumerate(sizes):
            rows, columns = tile_grid(height, width, self.pinpoints, self.tile_size)
            counts.append(rows * columns + 1)
            if counts[-1] > pixel_values.shape[1]:
                raise ValueError(
                    f"pixel_values has {pixel_values.shape[1]} tiles an image; image {number} of {height} x {width} "
                    f"pixels takes {counts[-1]}"
                )
            tokens = num_anyres_tokens(height, width, patch_size=self.patch_size, **self._sizes)
            visuals.append(Visual("image", (1, 1, tokens)))
        if not counts:
            return Tiles(pixel_values.flatten(0, 1), [], [], [])
        tiles = torch.cat([image[:count] for image, count in zip(pixel_values, counts, strict=True)])
        return Tiles(tiles, visuals, counts, sizes)

    def join(self, tokens: Tensor, batch: Tiles) -> Tensor:
        options: dict[str, Any] = {"newline": self.image_newline.to(tokens.dtype), **self._sizes}
        images = tokens.split(batch.counts)
        return torch.cat(
            [join_tiles(image, size, **options) for image, size in zip(images, batch.sizes or (), strict=True)]
        )


def _sizes(image_sizes: ImageSizes | None) -> list[tuple[int, int]]:
    if image_sizes is None:
        raise ValueError("image_sizes is None; images cut into tiles need the height and width of each")
    pairs: Any = image_sizes.tolist() if isinstance(image_sizes, Tensor) else image_sizes
    if not isinstance(pairs, Sequence) or not all(map(_is_size, pairs)):
        raise ValueError(f"image_sizes is {pairs!r:.200}; allowed: height and width of each image, positive integers")
    return [(height, width) for height, width in pairs]


def _is_size(pair: object) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and all(type(side) is int and side > 0 for side in pair)
