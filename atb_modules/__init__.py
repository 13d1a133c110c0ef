"""Multimodal Transformer building blocks: correct everywhere, fast on the CPU and on Ascend NPUs."""

import sys

from atb_modules import doctor
from atb_modules.attention import (
    Attention,
    AttentionConfig,
    CachePolicy,
    KVCacheManager,
    LatentAttention,
    LatentConfig,
    OutOfPagesError,
    QKNormOrder,
    QKVLayout,
    RopeScalingKind,
    RotaryConfig,
    RotaryEmbedding,
    RotaryLayout,
    RotaryScaling,
    SparseConfig,
    SparseMode,
    convert_qkv_weight,
    convert_rotary_weight,
)
from atb_modules.explain import explain
from atb_modules.initialization import deepnorm_init_
from atb_modules.kernels.pages import KVQuantization, QuantizedPages
from atb_modules.layer import LayerMode, LayerType, NormPlacement, TransformerLayer
from atb_modules.linear import Linear
from atb_modules.mlp import (
    FeedForward,
    MLPConfig,
    MLPType,
    MoE,
    MoEConfig,
    RouterConfig,
    load_balancing_loss,
    record_router_logits,
)
from atb_modules.models.config import InferenceConfig, ModelConfig
from atb_modules.models.decoder import DecoderModel
from atb_modules.models.loading import load_inference_model, load_model
from atb_modules.models.saving import save_model
from atb_modules.multimodal import (
    CrossAttentionMode,
    LlavaModel,
    MultiModalAttention,
    MultiModalConfig,
    MultiModalTransformerLayer,
    QwenVLConfig,
    QwenVLModel,
    multimodal_attention,
)
from atb_modules.norm import (
    AdaLayerNorm,
    AdaLayerNormZero,
    DeepNorm,
    DeepNormResidual,
    LayerNorm,
    NormCastOrder,
    NormConfig,
    RMSNorm,
)
from atb_modules.ops import (
    fused_attention,
    fused_layernorm_matmul,
    fused_mlp,
    fused_mlp_residual_norm,
    fused_rmsnorm_matmul,
    matmul,
    merge_attention,
    merge_heads,
    silu_matmul,
    softmax,
    split_heads,
)
from atb_modules.optimize import apply_optimizations, restore
from atb_modules.residual import ResidualConfig
from atb_modules.spec import AttentionSpec, Causal
from atb_modules.strategies import (
    AttentionStrategy,
    AttentionType,
    CacheStrategy,
    DecodeStrategy,
    LinearStrategy,
    MLPStrategy,
    MultiModalStrategy,
    NormStrategy,
    RotaryStrategy,
    use_strategy,
)

__version__ = "0.1.0"

__all__ = [
    "doctor",
    "AdaLayerNorm",
    "AdaLayerNormZero",
    "Attention",
    "AttentionConfig",
    "AttentionSpec",
    "AttentionStrategy",
    "AttentionType",
    "CachePolicy",
    "CrossAttentionMode",
    "CacheStrategy",
    "Causal",
    "DecodeStrategy",
    "DecoderModel",
    "DeepNorm",
    "DeepNormResidual",
    "FeedForward",
    "InferenceConfig",
    "KVCacheManager",
    "KVQuantization",
    "LatentAttention",
    "LatentConfig",
    "LayerMode",
    "LayerNorm",
    "LayerType",
    "Linear",
    "LinearStrategy",
    "LlavaModel",
    "MLPConfig",
    "MLPStrategy",
    "MLPType",
    "MoE",
    "MoEConfig",
    "ModelConfig",
    "MultiModalAttention",
    "MultiModalConfig",
    "MultiModalStrategy",
    "MultiModalTransformerLayer",
    "NormCastOrder",
    "NormConfig",
    "NormPlacement",
    "NormStrategy",
    "OutOfPagesError",
    "QKNormOrder",
    "QKVLayout",
    "QuantizedPages",
    "QwenVLConfig",
    "QwenVLModel",
    "RMSNorm",
    "ResidualConfig",
    "RopeScalingKind",
    "RotaryConfig",
    "RotaryEmbedding",
    "RotaryLayout",
    "RotaryScaling",
    "SparseConfig",
    "SparseMode",
    "RotaryStrategy",
    "RouterConfig",
    "TransformerLayer",
    "apply_optimizations",
    "convert_qkv_weight",
    "convert_rotary_weight",
    "deepnorm_init_",
    "explain",
    "fused_attention",
    "fused_layernorm_matmul",
    "fused_mlp",
    "fused_mlp_residual_norm",
    "fused_rmsnorm_matmul",
    "load_balancing_loss",
    "load_inference_model",
    "load_model",
    "matmul",
    "merge_attention",
    "merge_heads",
    "multimodal_attention",
    "record_router_logits",
    "restore",
    "save_model",
    "silu_matmul",
    "softmax",
    "split_heads",
    "use_strategy",
]

# transformers is never imported here; where it is there already, its models get attn_implementation="atb".
if "transformers" in sys.modules:
    from atb_modules.integrations.transformers import register_if_possible

    register_if_possible()
