"""Projectors: modules that bring vision tokens to the width (and number) that a language model takes."""

from .c_abstractor import CAbstractor
from .linear import LinearProjector, MLPProjector
from .patch_merger import PatchMerger
from .perceiver import PerceiverResampler
from .pixel_shuffle import PixelShuffleProjector, pixel_shuffle
from .pooled import PooledProjector
from .q_former import QFormer

__all__ = [
    "CAbstractor",
    "LinearProjector",
    "MLPProjector",
    "PatchMerger",
    "PerceiverResampler",
    "PixelShuffleProjector",
    "PooledProjector",
    "QFormer",
    "pixel_shuffle",
]
