"""CLIP, SigLIP and SigLIP2 NaFlex vision models, as transformers names them."""

from __future__ import annotations

import math
from dataclasses import replace

from atb_modules.convert.source import ConfigSource
from atb_modules.multimodal.vision import Interpolation, PositionConfig, VisionConfig

from .family import ACTIVATIONS, VisionFamily, no_dropout, one_size, square
from .names import VisionNames

LAYER = {
    "attention_norm": "layer_norm1",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "mlp_norm": "layer_norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}


def _clip(config: ConfigSource) -> VisionConfig:
    image, patch = square(config, "image_size", 224), one_size(config, "patch_size", 32)
    no_dropout(config, "attention_dropout")
    return VisionConfig(
        family="clip",
        hidden_size=config.count("hidden_size", 768),
        num_layers=config.layers("num_hidden_layers") if config.has("num_hidden_layers") else 12,
        num_heads=config.count("num_attention_heads", 12),
        intermediate_size=config.count("intermediate_size", 3072),
        patch_size=patch,
        in_channels=config.count("num_channels", 3),
        image_size=image,
        patch_bias=False,
        mlp_type=config.choice("hidden_act", "quick_gelu", ACTIVATIONS),
        norm_eps=config.positive("layer_norm_eps", 1e-5),
        class_token=True,
        pre_norm=True,
        post_norm=True,
        positions=PositionConfig((image[0] // patch, image[1] // patch)),
    )


def _siglip(config: ConfigSource) -> VisionConfig:
    image, patch = square(config, "image_size", 224), one_size(config, "patch_size", 16)
    no_dropout(config, "attention_dropout")
    return VisionConfig(
        family="siglip",
        hidden_size=config.count("hidden_size", 768),
        num_layers=config.layers("num_hidden_layers") if config.has("num_hidden_layers") else 12,
        num_heads=config.count("num_attention_heads", 12),
        intermediate_size=config.count("intermediate_size", 3072),
        patch_size=patch,
        in_channels=config.count("num_channels", 3),
        image_size=image,
        mlp_type=config.choice("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
        norm_eps=config.positive("layer_norm_eps", 1e-6),
        post_norm=True,
        last_is_normed=True,
        positions=PositionConfig((image[0] // patch, image[1] // patch)),
    )


def _siglip2(config: ConfigSource) -> VisionConfig:
    patches = config.count("num_patches", 256)
    side = math.isqrt(patches)
    if side * side != patches:
        raise config.error(f"num_patches is {patches}; allowed: a square number")
    no_dropout(config, "attention_dropout")
    return VisionConfig(
        family="siglip2",
        hidden_size=config.count("hidden_size", 768),
        num_layers=config.layers("num_hidden_layers") if config.has("num_hidden_layers") else 12,
        num_heads=config.count("num_attention_heads", 12),
        intermediate_size=config.count("intermediate_size", 3072),
        patch_size=one_size(config, "patch_size", 16),
        in_channels=config.count("num_channels", 3),
        mlp_type=config.choice("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
        norm_eps=config.positive("layer_norm_eps", 1e-6),
        post_norm=True,
        last_is_normed=True,
        positions=PositionConfig((side, side), Interpolation("bilinear", antialias=True)),
    )


_CLIP_NAMES = VisionNames(
    layers="encoder.layers.{}.",
    tower={
        "patch_embed": "embeddings.patch_embedding",
        "class_token": "embeddings.class_embedding",
        "positions": "embeddings.position_embedding",
        "pre_norm": "pre_layrnorm",
        "post_norm": "post_layernorm",
    },
    layer=LAYER,
    bare=frozenset({"class_token"}),
)
_SIGLIP_NAMES = VisionNames(
    layers="encoder.layers.{}.",
    tower={
        "patch_embed": "embeddings.patch_embedding",
        "positions": "embeddings.position_embedding",
        "post_norm": "post_layernorm",
    },
    layer=LAYER,
)
# Its kernel is a Linear's; patches come with the channels last, and the kernel's values lie the same way.
_SIGLIP2_NAMES = replace(_SIGLIP_NAMES, patch_axes=2)

CLIP = VisionFamily("clip", ("clip_vision_model", "clip"), _clip, lambda _: _CLIP_NAMES)
SIGLIP = VisionFamily("siglip", ("siglip_vision_model", "siglip"), _siglip, lambda _: _SIGLIP_NAMES)
SIGLIP2 = VisionFamily("siglip2", ("siglip2_vision_model", "siglip2"), _siglip2, lambda _: _SIGLIP2_NAMES)
