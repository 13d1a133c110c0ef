"""Vision: image sizes, patches, positions, packing, and the towers that make tokens of pixels."""

from atb_modules.multimodal.vision.config import VisionConfig
from atb_modules.multimodal.vision.packing import (
    Windows,
    frame_starts,
    merge_order,
    pack_images,
    pad_frames,
    patch_positions,
    read_grids,
    unpad_patches,
    window_partition,
)
from atb_modules.multimodal.vision.patch_embed import PatchEmbed, cut_patches
from atb_modules.multimodal.vision.positions import (
    Interpolation,
    InterpolationMode,
    LearnedPositions,
    PositionConfig,
    interpolate_positions,
    rotary_tables_2d,
)
from atb_modules.multimodal.vision.towers import ImageTower, PackedTower, VisionTower, build_tower

__all__ = [
    "ImageTower",
    "Interpolation",
    "InterpolationMode",
    "LearnedPositions",
    "PackedTower",
    "PatchEmbed",
    "PositionConfig",
    "VisionConfig",
    "VisionTower",
    "Windows",
    "build_tower",
    "cut_patches",
    "frame_starts",
    "interpolate_positions",
    "merge_order",
    "pack_images",
    "pad_frames",
    "patch_positions",
    "read_grids",
    "rotary_tables_2d",
    "unpad_patches",
    "window_partition",
]
