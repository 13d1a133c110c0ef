"""Image sizes: properties that hold for every size, and refusals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules.multimodal.vision import (
    best_pinpoint,
    naflex_resize,
    num_anyres_tokens,
    num_image_tokens,
    smart_resize,
    smart_resize_video,
    tile_grid,
)

SIDES = st.integers(1, 4000)
PINPOINTS = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]


@settings(max_examples=200, deadline=None)
@given(SIDES, SIDES, st.sampled_from([(14, 2), (16, 2), (14, 1)]))
def test_a_size_is_never_zero_and_always_whole(height, width, sizes):
    patch, merge = sizes
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match=f"the image is {height} x {width} pixels, one side .* allowed: 200"):
            smart_resize(height, width, patch_size=patch, merge_size=merge)
        return
    for least in (0, 56 * 56):
        rows, columns = smart_resize(height, width, patch_size=patch, merge_size=merge, min_pixels=least)
        assert min(rows, columns) >= patch * merge and rows % (patch * merge) == columns % (patch * merge) == 0
        count = num_image_tokens(height, width, patch_size=patch, merge_size=merge, min_pixels=least)
        assert count == rows * columns // (patch * merge) ** 2


@settings(max_examples=100, deadline=None)
@given(SIDES, SIDES)
def test_naflex_fills_its_patches_but_not_more(height, width):
    rows, columns = naflex_resize(height, width)
    assert rows % 16 == columns % 16 == 0 and 1 <= rows * columns // 256 <= 256


@settings(max_examples=100, deadline=None)
@given(SIDES, SIDES)
def test_the_transposed_image_has_the_transposed_tiles(height, width):
    """Pinpoints that are symmetric, so that height and width cannot be mixed up unseen; ties go by order."""
    pinpoints = [(336, 672), (672, 336)]
    if height != width:
        one, other = best_pinpoint(height, width, pinpoints), best_pinpoint(width, height, pinpoints)
        assert one == other[::-1] or one == other  # equal where both show as much of it


@pytest.mark.parametrize(
    ("size", "tokens"), [((400, 900), 1896), ((900, 400), 576 + 54 * 25), ((500, 500), 576 + 48 * 49)]
)
def test_counts_of_llava_next(size, tokens):
    assert num_anyres_tokens(*size, pinpoints=PINPOINTS, tile_size=336, patch_size=14) == tokens


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="height is 0"):
        smart_resize(0, 5)
    with pytest.raises(TypeError, match="width is 5.5"):
        num_image_tokens(5, 5.5)
    with pytest.raises(ValueError, match="min_pixels is 100; allowed: at most max_pixels 50"):
        smart_resize(5, 5, min_pixels=100, max_pixels=50)
    with pytest.raises(ValueError, match="num_frames is 1; allowed: at least temporal_patch_size 2"):
        smart_resize_video(1, 64, 64)
    with pytest.raises(ValueError, match="pinpoints is empty"):
        best_pinpoint(5, 5, [])
    with pytest.raises(ValueError, match=r"pinpoints has \(336, 1008\), which tile_size 224 does not divide"):
        tile_grid(300, 700, PINPOINTS, 224)
