"""The vision families that can be read, and how a configuration says which one it is."""

from __future__ import annotations

from .clip import CLIP, SIGLIP, SIGLIP2
from .dinov2 import DINOV2, DINOV2_REGISTERS
from .family import VisionFamily
from .qwen import QWEN2_5_VL, QWEN2_VL, QWEN3_VL

_ALL = (CLIP, SIGLIP, SIGLIP2, DINOV2, DINOV2_REGISTERS, QWEN2_VL, QWEN2_5_VL, QWEN3_VL)
VISION_FAMILIES = {family.name: family for family in _ALL}


def vision_family_of(model_type: str) -> VisionFamily | None:
    """The family of a vision configuration's ``model_type``, or of that of the model around it."""
    return next((f for f in VISION_FAMILIES.values() if model_type in f.model_types), None)


def vision_families_text() -> str:
    """The words that work, for an error message."""
    return ", ".join(word for family in VISION_FAMILIES.values() for word in family.model_types)
