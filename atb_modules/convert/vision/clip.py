"""CLIP, SigLIP and SigLIP2 NaFlex vision models, as transformers names them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atb_modules.convert.source import ConfigSource
from atb_modules.multimodal.vision import Interpolation, PositionConfig, VisionConfig

from .family import ACTIVATIONS, VisionFamily, depth, no_dropout, one_size, square, square_side
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


def _vit(config: ConfigSource, patch_size: int, activation: str, eps: float) -> dict[str, Any]:
    """What the three configurations share; they differ in defaults."""
    no_dropout(config, "attention_dropout")
    return {
        "hidden_size": config.count("hidden_size", 768),
        "num_layers": depth(config, "num_hidden_layers", 12),
        "num_heads": config.count("num_attention_heads", 12),
        "intermediate_size": config.count("intermediate_size", 3072),
        "patch_size": one_size(config, "patch_size", patch_size),
        "in_channels": config.count("num_channels", 3),
        "mlp_type": config.choice("hidden_act", activation, ACTIVATIONS),
        "norm_eps": config.positive("layer_norm_eps", eps),
        "post_norm": True,
    }


def _clip(config: ConfigSource) -> VisionConfig:
    common, image = _vit(config, 32, "quick_gelu", 1e-5), square(config, "image_size", 224)
    own: dict[str, Any] = {"patch_bias": False, "class_token": True, "pre_norm": True}
    return VisionConfig("clip", image_size=image, positions=_one_grid(image, common["patch_size"]), **common, **own)


def _siglip(config: ConfigSource) -> VisionConfig:
    common, image = _vit(config, 16, "gelu_pytorch_tanh", 1e-6), square(config, "image_size", 224)
    positions = _one_grid(image, common["patch_size"])
    return VisionConfig("siglip", image_size=image, positions=positions, last_is_normed=True, **common)


def _siglip2(config: ConfigSource) -> VisionConfig:
    side = square_side(config, "num_patches", 256)
    positions = PositionConfig((side, side), Interpolation("bilinear", antialias=True))
    common = _vit(config, 16, "gelu_pytorch_tanh", 1e-6)
    return VisionConfig("siglip2", positions=positions, last_is_normed=True, **common)


def _one_grid(image: tuple[int, int], patch: int) -> PositionConfig:
    """Positions of images of one size; transformers resamples these where it is told to alone."""
    if min(image) < patch:
        raise ValueError(f"image_size is {image}; allowed: at least patch_size {patch}")
    return PositionConfig((image[0] // patch, image[1] // patch))


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
