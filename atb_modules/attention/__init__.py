"""Attention: the functional ops, the modules, rotary embeddings, and the caches."""

from atb_modules.attention.cache import CachePolicy, CacheStep, KVCacheManager, OutOfPagesError
from atb_modules.attention.config import AttentionConfig, QKNormOrder, alibi_slopes
from atb_modules.attention.functional import (
    attention,
    cache_append,
    paged_attention,
    rotary_append,
)
from atb_modules.attention.mla import LatentAttention, LatentConfig
from atb_modules.attention.module import Attention
from atb_modules.attention.qkv import QKVLayout, convert_qkv_weight, split_qkv
from atb_modules.attention.rope import (
    RotaryConfig,
    RotaryEmbedding,
    RotaryLayout,
    convert_rotary_weight,
    rotary,
)
from atb_modules.attention.rope_scaling import RopeScalingKind, RotaryScaling
from atb_modules.attention.sparse import SparseConfig, SparseMode

__all__ = [
    "CachePolicy",
    "Attention",
    "AttentionConfig",
    "CacheStep",
    "KVCacheManager",
    "LatentAttention",
    "LatentConfig",
    "OutOfPagesError",
    "QKNormOrder",
    "QKVLayout",
    "RopeScalingKind",
    "RotaryConfig",
    "RotaryEmbedding",
    "RotaryLayout",
    "RotaryScaling",
    "SparseConfig",
    "SparseMode",
    "alibi_slopes",
    "attention",
    "cache_append",
    "convert_qkv_weight",
    "convert_rotary_weight",
    "paged_attention",
    "rotary",
    "rotary_append",
    "split_qkv",
]
