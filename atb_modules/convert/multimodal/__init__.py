"""Checkpoints of vision-language models of transformers: one record a family, foreign weights as views of ours."""

from .families import MULTIMODAL_FAMILIES, multimodal_family_of
from .family import MultimodalFamily, WeightGroup

__all__ = ["MULTIMODAL_FAMILIES", "MultimodalFamily", "WeightGroup", "multimodal_family_of"]
