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
from atb_modules.multimodal.layer import MultiModalTransformerLayer

__all__ = [
    "CrossAttentionMode",
    "MultiModalAttention",
    "MultiModalConfig",
    "MultiModalLayout",
    "MultiModalSpec",
    "MultiModalTransformerLayer",
    "Sharing",
    "TextStart",
    "multimodal_attention",
]
