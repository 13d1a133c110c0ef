"""Vision and text together: attention, towers, projectors, joining, models."""

from atb_modules.multimodal.attention import (
    CrossAttentionMode,
    MultiModalAttention,
    MultiModalConfig,
    MultiModalLayout,
    MultiModalSpec,
    Sharing,
    TextStart,
    multimodal_attention,
)
from atb_modules.multimodal.gated_cross_attention import GateConfig, GatedCrossAttention, ImageReach, image_reach
from atb_modules.multimodal.layer import MultiModalTransformerLayer
from atb_modules.multimodal.llava import LlavaModel
from atb_modules.multimodal.model import ImageAttention, VisionLanguageModel
from atb_modules.multimodal.mrope import MRoPEAdvance, VisionBlock, mrope_positions
from atb_modules.multimodal.placeholders import Span, find_spans, merge_features
from atb_modules.multimodal.qwen_vl import QwenVLConfig, QwenVLModel
from atb_modules.multimodal.tiling import AnyResolution, Tiling, WholeImage

__all__ = [
    "AnyResolution",
    "CrossAttentionMode",
    "GateConfig",
    "GatedCrossAttention",
    "ImageAttention",
    "ImageReach",
    "LlavaModel",
    "MRoPEAdvance",
    "MultiModalAttention",
    "MultiModalConfig",
    "MultiModalLayout",
    "MultiModalSpec",
    "MultiModalTransformerLayer",
    "QwenVLConfig",
    "QwenVLModel",
    "Sharing",
    "Span",
    "TextStart",
    "Tiling",
    "VisionBlock",
    "VisionLanguageModel",
    "WholeImage",
    "find_spans",
    "image_reach",
    "merge_features",
    "mrope_positions",
    "multimodal_attention",
]
