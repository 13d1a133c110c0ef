"""Attention of two modalities: the functional op, its strategies, the module, and its cached decode."""

from atb_modules.multimodal.attention.config import MultiModalConfig, Sharing, TextStart
from atb_modules.multimodal.attention.functional import multimodal_attention
from atb_modules.multimodal.attention.module import MultiModalAttention
from atb_modules.multimodal.attention.spec import CrossAttentionMode, MultiModalLayout, MultiModalSpec
from atb_modules.multimodal.attention.strategies import unified_mask

__all__ = [
    "CrossAttentionMode",
    "MultiModalAttention",
    "MultiModalConfig",
    "MultiModalLayout",
    "MultiModalSpec",
    "Sharing",
    "TextStart",
    "multimodal_attention",
    "unified_mask",
]
