"""Vision checkpoints of transformers: one record a family, foreign weights as views of ours."""

from atb_modules.convert.vision.families import VISION_FAMILIES, vision_family_of
from atb_modules.convert.vision.family import VisionFamily
from atb_modules.convert.vision.loading import load_vision_tower

__all__ = ["VISION_FAMILIES", "VisionFamily", "load_vision_tower", "vision_family_of"]
