"""Blocks in which vision and text tokens meet."""

from atb_modules.multimodal.attention import (
    CrossAttentionMode,
    MultiModalLayout,
    MultiModalSpec,
    multimodal_attention,
)

__all__ = [
    "CrossAttentionMode",
    "MultiModalLayout",
    "MultiModalSpec",
    "multimodal_attention",
]
