"""What is no argument of the towers and their functions: the error names it; and the edges that are allowed."""

from __future__ import annotations

import copy

import pytest
import torch

from atb_modules.multimodal import vision
from atb_modules.multimodal.vision import (
    FusedTower,
    ImageTower,
    Interpolation,
    PackedTower,
    PositionConfig,
    VisionConfig,
)

FIXED = {
    "family": "test",
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 24,
    "patch_size": 4,
    "image_size": (8, 8),
    "positions": PositionConfig((2, 2)),
}
PACKED = {**FIXED, "image_size": None, "positions": None, "rotary_base": 1e4, "merge_size": 2}
IMAGES = torch.zeros(1, 3, 8, 8)
TOKENS = torch.zeros(1, 4, 8)
BILINEAR = Interpolation("bilinear")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("family", 3),
        ("image_size", 8),
        ("image_size", (8,)),
        ("norm_eps", "x"),
        ("norm_eps", -1.0),
        ("norm_eps", float("nan")),
        ("last_is_normed", 1),
        ("full_attention_layers", 1),
        ("full_attention_layers", (0.5,)),
        ("full_attention_layers", "0"),
        ("full_attention_layers", (2,)),
    ],
)
def test_a_vision_config_names_its_fields(name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        VisionConfig(**{**FIXED, name: value})


def test_sizes_may_be_lists():
    config = VisionConfig(**{**FIXED, "image_size": [8, 8], "full_attention_layers": [0]})
    assert config.image_size == (8, 8) and config.full_attention_layers == (0,)
    assert ImageTower(config)(IMAGES).shape == (1, 4, 16)


def test_a_tower_takes_a_config_of_its_kind():
    with pytest.raises(ValueError, match="config.image_size is None; ImageTower allows an image_size"):
        ImageTower(VisionConfig(**PACKED))
    with pytest.raises(ValueError, match=r"config.image_size is \(8, 8\); PackedTower allows None"):
        PackedTower(VisionConfig(**FIXED))


FUNCTIONS = [
    (vision.pool_tokens, (TOKENS, 3), "grid"),
    (vision.pool_tokens, (TOKENS, (2,)), "grid"),
    (vision.pooled_grid, ((2, 2, 2), 2, "avg"), "grid"),
    (vision.pooled_grid, ((0, 2), 1, "bilinear"), "grid's rows"),
    (vision.resample_tokens, (TOKENS, (2, 2), 3), "target"),
    (vision.resample_tokens, (TOKENS, (2, 2), (0, 1)), "target's rows"),
    (vision.interpolate_positions, (TOKENS[0], (2, 2), 3, BILINEAR), "target"),
    (vision.interpolate_positions, (TOKENS[0], 4, (3, 3), BILINEAR), "grid"),
    (vision.interpolate_positions, (TOKENS[0], (2, 2), (3, 3), "bilinear"), "interpolation"),
    (vision.rotary_tables_2d, (3, 8), "positions"),
    (vision.rotary_tables_2d, (torch.zeros(2, 2), 8, -5.0), "base"),
    (vision.pack_images, (3, 4), "images"),
    (vision.pack_images, ([IMAGES[0], IMAGES[0].to("meta")], 4), r"images\[1\]"),
    (vision.read_grids, (torch.ones(1, 3, dtype=torch.int64, device="meta"),), "grid_thw"),
    (vision.unpad_patches, (TOKENS, torch.ones(1, 4), torch.tensor([[2.0, 2.5]])), "spatial_shapes"),
    (vision.unpad_patches, (TOKENS, torch.ones(1, 4), torch.tensor([[-2, -2]])), "spatial_shapes"),
    (vision.best_pinpoint, (8, 8, 3), "pinpoints"),
    (vision.best_pinpoint, (8, 8, [3]), r"pinpoints\[0\]"),
    (vision.unpadded_grid, (3, (2, 2)), "grid"),
    (vision.unpadded_grid, ((2, 2), (2,)), "image_size"),
    (vision.limited_grid, ((2, 2), 0, 1), "tile_side"),
    (vision.limited_grid, (3, 2, 1), "grid"),
    (vision.frame_starts, (3,), "grids"),
    (vision.frame_starts, ([(1, 2)],), r"grids\[0\]"),
    (vision.patch_positions, ([(0, 2, 2)], 1), r"grids\[0\]"),
    (vision.patch_positions, ([(1, 3, 2)], 2), r"grids\[0\] has 3 rows"),
    (vision.window_partition, ([(1, 2, 3)], 2, 2), r"grids\[0\] has 3 columns"),
    (vision.window_partition, ([(1, 2.5, 2)], 2, 2), r"grids\[0\]"),
    (vision.window_partition([(1, 4, 4)], 2, 2).gather, (torch.zeros(15, 2),), "tokens"),
    (vision.merge_order, (3, 3, 2), "rows is 3"),
    (vision.merge_order, (2, 2, 0), "merge_size"),
    (vision.pad_frames, (torch.zeros(0, 3), 2), "frames"),
    (vision.pad_frames, (torch.zeros(3, 2), 0), "temporal_patch_size"),
    (vision.cut_patches, (TOKENS, 2), "images"),
    (vision.cut_patches, (IMAGES, 0), "patch_size"),
    (vision.LearnedPositions(8, PositionConfig((2, 2), BILINEAR)), (3,), "target"),
    (vision.LearnedPositions(8, PositionConfig((2, 2), BILINEAR)), ((1.5, 2),), "target's rows"),
]


@pytest.mark.parametrize(("function", "arguments", "name"), FUNCTIONS)
def test_functions_name_their_arguments(function, arguments, name):
    with pytest.raises((ValueError, TypeError), match=name):
        function(*arguments)


def test_tiles_name_their_arguments():
    with pytest.raises(ValueError, match="tile_size is 4; allowed: at least patch_size 8"):
        vision.num_anyres_tokens(8, 8, pinpoints=[(8, 8)], tile_size=4, patch_size=8)
    with pytest.raises(TypeError, match="newline"):
        vision.join_tiles(torch.zeros(5, 4, 8), (8, 8), pinpoints=[(8, 8)], tile_size=4, newline=3)
    with pytest.raises(TypeError, match="image_size"):
        vision.join_tiles(torch.zeros(5, 4, 8), 8, pinpoints=[(8, 8)], tile_size=4)


@pytest.mark.parametrize("pixels", [None, 3, "x", IMAGES[0], IMAGES.byte(), IMAGES[:, :2], IMAGES.to("meta")])
def test_towers_name_their_pixels(pixels):
    tower = ImageTower(VisionConfig(**FIXED))
    for call in (tower, tower.grid_of, lambda given: tower.forward_intermediates(given, [0])):
        with pytest.raises((ValueError, TypeError), match="pixel_values"):
            call(pixels)
    with pytest.raises(TypeError, match="layers is 3"):
        tower.forward_intermediates(IMAGES, 3)


def test_patches_of_images_smaller_than_one_are_refused():
    with pytest.raises(ValueError, match="pixel_values is 3 pixels high"):
        vision.PatchEmbed(4, 8)(torch.zeros(1, 3, 3, 8))


@pytest.mark.parametrize(
    ("pixels", "error"),
    [(None, TypeError), ("ab", TypeError), ([IMAGES], ValueError), ([IMAGES, 3], TypeError), ([], ValueError)],
)
def test_fused_towers_name_their_pixels(pixels, error):
    tower = ImageTower(VisionConfig(**FIXED))
    fused = FusedTower([tower, tower])
    for call in (fused, fused.grid_of):
        with pytest.raises(error, match="pixel_values"):
            call(pixels)
    with pytest.raises(ValueError, match=r"pixel_values\[1\] has shape \(2, 3, 8, 8\) and pixel_values\[0\] \(1, "):
        fused([IMAGES, IMAGES.expand(2, -1, -1, -1)])
    for towers in (None, 3, tower, "ab"):
        with pytest.raises(TypeError, match="towers"):
            FusedTower(towers)
    for grid in (3, (1,), (1, 2, 3), (0, 1)):
        with pytest.raises((ValueError, TypeError), match="grid"):
            FusedTower([tower], grid=grid)


def test_resampling_keeps_float64():
    tokens = torch.rand(1, 4, 3, dtype=torch.float64)
    corner = vision.resample_tokens(tokens, (2, 2), (4, 4))[:, 0]
    assert torch.equal(corner, tokens[:, 0])
    assert corner.dtype == torch.float64


def test_a_batch_without_images_has_a_gradient_to_give():
    for states in (None, [0, -1]):
        tower = PackedTower(VisionConfig(**PACKED), select_layer=states)
        tokens = tower(torch.zeros(0, 48), torch.zeros(0, 3, dtype=torch.int64))
        assert tokens.shape == (0, tower.out_channels)
        tokens.sum().backward()


def test_a_copy_of_a_fused_tower_is_the_same():
    tower = ImageTower(VisionConfig(**FIXED), select_layer=[-1, 0, 0])
    fused = FusedTower([tower, tower], grid=(3, 1))
    images = torch.rand(2, 3, 8, 8)
    assert torch.equal(copy.deepcopy(fused)(images), fused(images))
