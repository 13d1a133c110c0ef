"""Blocks in which vision and text tokens meet."""

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

__all__ = [
    "CrossAttentionMode",
    "MultiModalAttention",
    "MultiModalConfig",
    "MultiModalLayout",
    "MultiModalSpec",
    "Sharing",
    "TextStart",
    "multimodal_attention",
]
