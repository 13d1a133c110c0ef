"""Projectors: modules that bring vision tokens to the width (and number) that a language model takes."""

from .linear import LinearProjector, MLPProjector
from .patch_merger import PatchMerger

__all__ = ["LinearProjector", "MLPProjector", "PatchMerger"]
