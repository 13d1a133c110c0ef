"""Sizes and token counts against transformers' own processors and models, on a thousand random sizes and the edges."""

from __future__ import annotations

import inspect
import random

import pytest
import torch
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl, image_processing_qwen2_vl
from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize as video_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as qwen3_resize
from transformers.models.siglip2 import image_processing_pil_siglip2, image_processing_siglip2

from atb_modules.multimodal.vision import (
    best_pinpoint,
    join_tiles,
    naflex_resize,
    num_anyres_tokens,
    num_image_tokens,
    smart_resize,
    smart_resize_video,
    unpadded_grid,
)

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
EDGES = [(1, 1), (1, 200), (200, 1), (1, 201), (13, 15), (14, 42), (28, 28), (56, 55), (3000, 2999), (7, 1400)]
# Sizes whose unpadded side is a whole number but for the last bits of a float.
EDGES += [(55, 176), (88, 99), (376, 799)]
EDGES += [(400, 900), (900, 400), (500, 500), (161, 184), (184, 161), (336, 336), (20000, 100), (1, 5000)]


def sizes(count=1000):
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    return (
        EDGES
        + [(draw.randint(1, 40), draw.randint(1, 3000)) for _ in range(count // 4)]
        + [(int(2 ** draw.uniform(0, 13)), int(2 ** draw.uniform(0, 13))) for _ in range(count - count // 4)]
    )


def outcome(function, *arguments, **options):
    """What a function returns, or None where it refuses."""
    try:
        return function(*arguments, **options)
    except ValueError:
        return None


@pytest.mark.parametrize(
    "theirs",
    [image_processing_qwen2_vl.smart_resize, image_processing_pil_qwen2_vl.smart_resize, video_resize],
)
@pytest.mark.parametrize(("patch", "merge"), [(14, 2), (16, 2), (8, 3)])
def test_smart_resize(theirs, patch, merge):
    factor = patch * merge
    for height, width in sizes():
        for bounds in ({"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}, {"min_pixels": 9, "max_pixels": 5000}):
            ours = outcome(smart_resize, height, width, patch_size=patch, merge_size=merge, **bounds)
            assert ours == outcome(theirs, height, width, factor=factor, **bounds), (height, width)
            if ours is not None:
                assert min(ours) >= factor
                count = num_image_tokens(height, width, patch_size=patch, merge_size=merge, **bounds)
                assert count * factor * factor == ours[0] * ours[1]


def test_smart_resize_of_videos():
    draw = random.Random(0)
    for height, width in sizes():
        frames = draw.randint(1, 40)
        bounds = {"min_pixels": 128 * 32 * 32, "max_pixels": 32 * 32 * 768}
        ours = outcome(smart_resize_video, frames, height, width, **bounds)
        assert ours == outcome(qwen3_resize, frames, height, width, factor=32, **bounds), (frames, height, width)


@pytest.mark.parametrize("module", [image_processing_siglip2, image_processing_pil_siglip2])
def test_naflex_resize(module):
    for height, width in sizes(300):
        theirs = module.get_image_size_for_max_num_patches(height, width, patch_size=16, max_num_patches=256)
        assert naflex_resize(height, width) == theirs, (height, width)


def unbound(cls, **attributes):
    """An instance that has only what its counting needs; no file is read."""
    self = cls.__new__(cls)
    self.__dict__.update(attributes)
    return self


class _Pinpoints:
    image_grid_pinpoints = PINPOINTS


def test_any_resolution_counts_and_pinpoints():
    next_ = unbound(LlavaNextProcessor, image_processor=_Pinpoints, patch_size=14, num_additional_image_tokens=0)
    one = unbound(
        LlavaOnevisionProcessor,
        image_processor=_Pinpoints,
        patch_size=14,
        num_image_tokens=576,
        vision_aspect_ratio="anyres_max_2",
    )
    options = {"pinpoints": PINPOINTS, "tile_size": 336, "patch_size": 14}
    for height, width in sizes():
        best = tuple(select_best_resolution((height, width), PINPOINTS))
        assert best_pinpoint(height, width, PINPOINTS) == best
        assert num_anyres_tokens(height, width, **options) == next_._get_number_of_features(height, width, 336, 336)
        theirs = one._get_number_of_features(height, width, 336, 336)
        assert num_anyres_tokens(height, width, **options, max_tiles=2) == theirs, (height, width)


class _Config:
    image_grid_pinpoints = PINPOINTS

    class vision_config:
        image_size, patch_size = 336, 14


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((400, 900), (24, 54)),
        ((900, 400), (54, 24)),
        ((500, 500), (48, 48)),
        ((161, 184), (24, 28)),
        ((184, 161), None),
    ],
)
def test_tiles_are_joined_in_raster_order_and_unpadded(size, grid):
    tiles = best_pinpoint(*size, PINPOINTS)
    num_tiles = 1 + (tiles[0] // 336) * (tiles[1] // 336)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_tiles, 576, 5, generator=generator, requires_grad=True)
    newline = torch.randn(5, generator=generator)
    ours = join_tiles(features, size, pinpoints=PINPOINTS, tile_size=336, newline=newline)
    self = unbound(LlavaNextModel, config=_Config)
    (theirs,), _ = LlavaNextModel.pack_image_features(self, [features], torch.tensor([size]), "full", newline)
    assert torch.equal(ours, theirs)
    options = {"pinpoints": PINPOINTS, "tile_size": 336, "patch_size": 14}
    assert ours.shape[0] == num_anyres_tokens(*size, **options)
    if grid is not None:
        assert unpadded_grid((tiles[0] // 14, tiles[1] // 14), size)[1] == grid
        assert ours.shape[0] == 576 + grid[0] * (grid[1] + 1)
    weight = torch.randn(ours.shape, generator=generator)
    (mine,) = torch.autograd.grad((ours * weight).sum(), features, retain_graph=True)
    (its,) = torch.autograd.grad((theirs * weight).sum(), features)
    assert torch.equal(mine, its)


@pytest.mark.parametrize("size", [(1500, 900), (335, 1400), (2000, 2000)])
def test_a_bound_on_the_tiles_resamples_as_llava_onevision(size):
    tiles = best_pinpoint(*size, PINPOINTS)
    features = torch.randn(1 + (tiles[0] // 336) * (tiles[1] // 336), 576, 3)
    self = unbound(LlavaOnevisionModel, config=_Config)
    signature = inspect.signature(LlavaOnevisionModel.pack_image_features)
    assert "vision_aspect_ratio" in signature.parameters
    (theirs,), _ = LlavaOnevisionModel.pack_image_features(
        self, [features], torch.tensor([size]), torch.ones(3), vision_aspect_ratio="anyres_max_2"
    )
    ours = join_tiles(features, size, pinpoints=PINPOINTS, tile_size=336, newline=torch.ones(3), max_tiles=2)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
