"""The vision-language families that can be read, and how a configuration says which one it is."""

from __future__ import annotations

from .family import MultimodalFamily
from .gemma3 import GEMMA3
from .llava import LLAVA
from .qwen_vl import QWEN2_VL, QWEN3_VL

MULTIMODAL_FAMILIES = {family.name: family for family in (LLAVA, GEMMA3, QWEN2_VL, QWEN3_VL)}


def multimodal_family_of(model_type: str) -> MultimodalFamily | None:
    """The family of a config.json's ``model_type``."""
    return next((f for f in MULTIMODAL_FAMILIES.values() if model_type in f.model_types), None)
