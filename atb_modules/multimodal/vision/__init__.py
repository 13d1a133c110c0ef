"""Vision: image sizes, patches, positions, packing, and the towers that make tokens of pixels."""

from atb_modules.multimodal.vision.config import VisionConfig
from atb_modules.multimodal.vision.fused import FusedTower
from atb_modules.multimodal.vision.image_size import (
    best_pinpoint,
    limited_grid,
    naflex_resize,
    num_anyres_tokens,
    num_image_tokens,
    smart_resize,
    smart_resize_video,
    tile_grid,
    unpadded_grid,
)
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
from atb_modules.multimodal.vision.pooling import PoolMode, join_tiles, pool_tokens, pooled_grid, resample_tokens
from atb_modules.multimodal.vision.positions import (
    Interpolation,
    InterpolationMode,
    LearnedPositions,
    PositionConfig,
    interpolate_positions,
    rotary_tables_2d,
)
from atb_modules.multimodal.vision.timm_tower import TimmTower
from atb_modules.multimodal.vision.towers import ImageTower, PackedTower, VisionTower, build_tower

__all__ = [
    "FusedTower",
    "ImageTower",
    "Interpolation",
    "InterpolationMode",
    "LearnedPositions",
    "PackedTower",
    "PatchEmbed",
    "PoolMode",
    "PositionConfig",
    "TimmTower",
    "VisionConfig",
    "VisionTower",
    "Windows",
    "best_pinpoint",
    "build_tower",
    "cut_patches",
    "frame_starts",
    "interpolate_positions",
    "join_tiles",
    "limited_grid",
    "merge_order",
    "naflex_resize",
    "num_anyres_tokens",
    "num_image_tokens",
    "pack_images",
    "pad_frames",
    "patch_positions",
    "pool_tokens",
    "pooled_grid",
    "read_grids",
    "resample_tokens",
    "rotary_tables_2d",
    "smart_resize",
    "smart_resize_video",
    "tile_grid",
    "unpad_patches",
    "unpadded_grid",
    "window_partition",
]
