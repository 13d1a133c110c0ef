"""From an image's size to the size it is resized to and the number of its tokens: one rule for processor and model.

Everything here is plain arithmetic on (height, width), always in this order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from atb_modules.checks import check_bool, check_int

Size = tuple[int, int]
ROWS_COLUMNS = ("rows", "columns")
HEIGHT_WIDTH = ("height", "width")

#: Qwen refuses images longer than this times their width.
MAX_ASPECT_RATIO = 200


def check_size(name: str, size: object, sides: tuple[str, str] = ROWS_COLUMNS, least: int = 1) -> None:
    """Raises unless ``size`` is a pair of ints of at least ``least``, called ``sides``."""
    if not isinstance(size, (tuple, list)):
        raise TypeError(f"{name} is {size!r:.80} ({type(size).__name__}); allowed: a pair ({', '.join(sides)})")
    if len(size) != 2:
        raise ValueError(f"{name} is {size!r:.80}; allowed: a pair ({', '.join(sides)})")
    for side, what in zip(size, sides, strict=True):
        check_int(f"{name}'s {what}", side, least=least)


def smart_resize(
    height: int,
    width: int,
    *,
    patch_size: int = 14,
    merge_size: int = 2,
    min_pixels: int = 56 * 56,
    max_pixels: int = 28 * 28 * 1280,
) -> Size:
    """Qwen-VL's size of an image: sides that are multiples of patch_size * merge_size, near its aspect ratio.

    Sides are rounded to the nearest multiple; an area past max_pixels shrinks both (rounding down, but to one
    multiple at least), one under min_pixels grows both (rounding up).

    Args:
        height, width: of the image, pixels.
        patch_size, merge_size: of the tower.
        min_pixels, max_pixels: bounds of the area.

    Raises:
        ValueError, TypeError: sides that are no positive ints, or a side more than 200 times the other.
    """
    factor = _factor(height, width, patch_size, merge_size, min_pixels, max_pixels)
    _check_ratio(height, width)
    rows, columns = (round(side / factor) * factor for side in (height, width))
    return _within(rows * columns, (height, width), (rows, columns), 1, factor, min_pixels, max_pixels)


def smart_resize_video(
    num_frames: int,
    height: int,
    width: int,
    *,
    patch_size: int = 16,
    merge_size: int = 2,
    temporal_patch_size: int = 2,
    min_pixels: int = 128 * 32 * 32,
    max_pixels: int = 32 * 32 * 768,
) -> Size:
    """Qwen3-VL's size of a video's frames: as ``smart_resize``, with the bounds on the pixels of all frames.

    Frames smaller than one multiple are scaled up to it first, keeping their aspect ratio. Qwen2-VL and Qwen2.5-VL
    bound single frames: ``smart_resize`` serves them.

    Raises:
        ValueError, TypeError: as ``smart_resize``, and fewer frames than temporal_patch_size.
    """
    factor = _factor(height, width, patch_size, merge_size, min_pixels, max_pixels)
    check_int("temporal_patch_size", temporal_patch_size)
    check_int("num_frames", num_frames)
    if num_frames < temporal_patch_size:
        raise ValueError(f"num_frames is {num_frames}; allowed: at least temporal_patch_size {temporal_patch_size}")
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_ratio(height, width)
    rows, columns = (round(side / factor) * factor for side in (height, width))
    frames = round(num_frames / temporal_patch_size) * temporal_patch_size
    area = frames * rows * columns
    return _within(area, (height, width), (rows, columns), num_frames, factor, min_pixels, max_pixels)


def num_image_tokens(
    height: int,
    width: int,
    *,
    patch_size: int = 14,
    merge_size: int = 2,
    min_pixels: int = 56 * 56,
    max_pixels: int = 28 * 28 * 1280,
) -> int:
    """Tokens of an image of any size in a Qwen-VL model, after ``smart_resize`` and merging."""
    rows, columns = smart_resize(
        height, width, patch_size=patch_size, merge_size=merge_size, min_pixels=min_pixels, max_pixels=max_pixels
    )
    factor = patch_size * merge_size
    return (rows // factor) * (columns // factor)


def naflex_resize(height: int, width: int, *, patch_size: int = 16, max_patches: int = 256) -> Size:
    """SigLIP2 NaFlex's size of an image: the largest multiples of patch_size with at most max_patches patches.

    The scale is the one that SigLIP2's processor finds by bisection between 1e-6 and 100, to within 1e-5; sides are
    rounded up, to one patch at least.

    Raises:
        ValueError, TypeError: sides that are no positive ints.
    """
    for name, value in (
        ("height", height),
        ("width", width),
        ("patch_size", patch_size),
        ("max_patches", max_patches),
    ):
        check_int(name, value)

    def scaled(scale: float) -> Size:
        rows, columns = (max(1, math.ceil(side * scale / patch_size)) for side in (height, width))
        return rows, columns

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        middle = (low + high) / 2
        if math.prod(scaled(middle)) <= max_patches:
            low = middle
        else:
            high = middle
    rows, columns = scaled(low)
    return rows * patch_size, columns * patch_size


def best_pinpoint(height: int, width: int, pinpoints: Sequence[Sequence[int]]) -> Size:
    """LLaVA-NeXT's resolution of an image: the one that shows most of it, and among those the smallest waste.

    Args:
        height, width: of the image, pixels.
        pinpoints: (height, width) of the allowed resolutions.

    Raises:
        ValueError, TypeError: sides that are no positive ints, or no pinpoint.
    """
    check_int("height", height)
    check_int("width", width)
    best: Size | None = None
    shown, wasted = 0, math.inf
    if not isinstance(pinpoints, (list, tuple)):
        raise TypeError(f"pinpoints is {pinpoints!r:.80} ({type(pinpoints).__name__}); allowed: a list of pairs")
    for index, pinpoint in enumerate(pinpoints):
        check_size(f"pinpoints[{index}]", pinpoint, HEIGHT_WIDTH)
        rows, columns = pinpoint
        scale = min(columns / width, rows / height)
        effective = min(int(width * scale) * int(height * scale), width * height)
        waste = rows * columns - effective
        if effective > shown or (effective == shown and waste < wasted):
            best, shown, wasted = (rows, columns), effective, waste
    if best is None:
        raise ValueError("pinpoints is empty; allowed: at least one (height, width)")
    return best


def tile_grid(height: int, width: int, pinpoints: Sequence[Sequence[int]], tile_size: int) -> Size:
    """(rows, columns) of the tiles that an image is cut into at its best pinpoint."""
    check_int("tile_size", tile_size)
    rows, columns = best_pinpoint(height, width, pinpoints)
    for side in (rows, columns):
        if side % tile_size:
            raise ValueError(f"pinpoints has ({rows}, {columns}), which tile_size {tile_size} does not divide")
    return rows // tile_size, columns // tile_size


def unpadded_grid(grid: Size, image_size: Size) -> tuple[Size, Size]:
    """The part of a grid of features that shows the image, where it was padded to the grid's aspect ratio.

    Args:
        grid: (rows, columns) of the features.
        image_size: (height, width) of the image.

    Returns:
        (first row, first column) and (rows, columns) of the part; the padding on both sides is cut by the same number.
    """
    check_size("grid", grid)
    check_size("image_size", image_size, HEIGHT_WIDTH)
    (rows, columns), (height, width) = grid, image_size
    # Rounded to 7 places before it is cut: 7.999999999 rows are 8.
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        padding = (rows - kept) // 2
        return (padding, 0), (rows - 2 * padding, columns)
    kept = int(round(width * (rows / height), 7))
    padding = (columns - kept) // 2
    return (0, padding), (rows, columns - 2 * padding)


def limited_grid(grid: Size, tile_side: int, max_tiles: int | None) -> Size:
    """(rows, columns) that a grid is resampled to so that it is about max_tiles tiles (LLaVA-OneVision's anyres_max).

    A grid that is less than 1.1 times too long a side stays as it is, as does any where max_tiles is None.

    Args:
        grid: (rows, columns) of the features.
        tile_side: features along a side of a tile.
        max_tiles: how many tiles.
    """
    if max_tiles is None:
        return grid
    # 0 is what is left of an image so long that padding is all there is
    check_size("grid", grid, least=0)
    check_int("tile_side", tile_side)
    check_int("max_tiles", max_tiles)
    ratio = math.sqrt(grid[0] * grid[1] / (max_tiles * tile_side**2))
    return (int(grid[0] // ratio), int(grid[1] // ratio)) if ratio > 1.1 else grid


def num_anyres_tokens(
    height: int,
    width: int,
    *,
    pinpoints: Sequence[Sequence[int]],
    tile_size: int,
    patch_size: int,
    newline: bool = True,
    max_tiles: int | None = None,
) -> int:
    """Tokens of an image in a LLaVA-NeXT model: one tile of the whole image, and the unpadded tiles row by row.

    Args:
        height, width: of the image, pixels.
        pinpoints: (height, width) of the allowed resolutions.
        tile_size: side of a tile, the tower's image size.
        patch_size: of the tower.
        newline: whether a token ends each row.
        max_tiles: see ``limited_grid``; None for LLaVA-NeXT.
    """
    check_int("patch_size", patch_size)
    down, across = tile_grid(height, width, pinpoints, tile_size)
    check_bool("newline", newline)
    side = tile_size // patch_size
    if not side:
        raise ValueError(f"tile_size is {tile_size}; allowed: at least patch_size {patch_size}")
    _, part = unpadded_grid((down * side, across * side), (height, width))
    rows, columns = limited_grid(part, side, max_tiles)
    return side * side + rows * (columns + int(newline))


def _factor(height: int, width: int, patch_size: int, merge_size: int, min_pixels: int, max_pixels: int) -> int:
    for name, value in (
        ("height", height),
        ("width", width),
        ("patch_size", patch_size),
        ("merge_size", merge_size),
        ("max_pixels", max_pixels),
    ):
        check_int(name, value)
    check_int("min_pixels", min_pixels, least=0)
    if min_pixels > max_pixels:
        raise ValueError(f"min_pixels is {min_pixels}; allowed: at most max_pixels {max_pixels}")
    return patch_size * merge_size


def _check_ratio(height: int, width: int) -> None:
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise ValueError(
            f"the image is {height} x {width} pixels, one side {ratio:g} times the other; allowed: {MAX_ASPECT_RATIO}"
        )


def _within(area: int, image: Size, rounded: Size, frames: int, factor: int, least: int, most: int) -> Size:
    """The rounded sides, or where their area is out of bounds the image's own sides scaled into them."""
    height, width = image
    if area > most:
        beta = math.sqrt(frames * height * width / most)
        rows, columns = (math.floor(side / beta / factor) * factor for side in image)
    elif area < least:
        beta = math.sqrt(least / (frames * height * width))
        rows, columns = (math.ceil(side * beta / factor) * factor for side in image)
    else:
        rows, columns = rounded
    return max(factor, rows), max(factor, columns)
