"""DINOv2, with and without registers, under the names of its files (which transformers renames when it reads them)."""

from __future__ import annotations

from atb_modules.convert.source import ConfigSource
from atb_modules.multimodal.vision import Interpolation, PositionConfig, VisionConfig

from .family import ACTIVATIONS, VisionFamily, depth, no_dropout, one_size, square
from .names import VisionNames


def _dinov2(
    config: ConfigSource, family: str, patch_default: int, registers: int, interpolation: Interpolation
) -> VisionConfig:
    image, patch = square(config, "image_size", 224), one_size(config, "patch_size", patch_default)
    no_dropout(config, "hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
    hidden = config.count("hidden_size", 768)
    width = int(hidden * config.positive("mlp_ratio", 4))
    gated = config.flag("use_swiglu_ffn", False)
    if gated:  # two thirds of the width, so that three matrices hold as much as two, in whole eights
        width = -(-int(width * 2 / 3) // 8) * 8
    return VisionConfig(
        family=family,
        hidden_size=hidden,
        num_layers=depth(config, "num_hidden_layers", 12),
        num_heads=config.count("num_attention_heads", 12),
        intermediate_size=width,
        patch_size=patch,
        in_channels=config.count("num_channels", 3),
        image_size=image,
        qkv_bias=config.flag("qkv_bias", True),
        mlp_type="swiglu" if gated else config.choice("hidden_act", "gelu", ACTIVATIONS),
        norm_eps=config.positive("layer_norm_eps", 1e-6),
        layer_scale=True,
        class_token=True,
        num_registers=registers,
        post_norm=True,
        last_is_normed=True,
        positions=PositionConfig((image[0] // patch, image[1] // patch), interpolation),
    )


def _plain(config: ConfigSource) -> VisionConfig:
    return _dinov2(config, "dinov2", 14, 0, Interpolation("bicubic"))


def _registers(config: ConfigSource) -> VisionConfig:
    registers = config.count("num_register_tokens", 4)
    return _dinov2(config, "dinov2_with_registers", 16, registers, Interpolation("bicubic", antialias=True))


def _names(config: VisionConfig) -> VisionNames:
    gated = {"gate_up": "mlp.weights_in", "down": "mlp.weights_out"}
    plain = {"up": "mlp.fc1", "down": "mlp.fc2"}
    return VisionNames(
        layers="encoder.layer.{}.",
        tower={
            "patch_embed": "embeddings.patch_embeddings.projection",
            "class_token": "embeddings.cls_token",
            "registers": "embeddings.register_tokens",
            "positions": "embeddings.position_embeddings",
            "post_norm": "layernorm",
        },
        layer={
            "attention_norm": "norm1",
            "q": "attention.attention.query",
            "k": "attention.attention.key",
            "v": "attention.attention.value",
            "o": "attention.output.dense",
            "attention_scale": "layer_scale1.lambda1",
            "mlp_norm": "norm2",
            "mlp_scale": "layer_scale2.lambda1",
            **(gated if config.mlp_type == "swiglu" else plain),
        },
        bare=frozenset({"class_token", "registers", "positions", "attention_scale", "mlp_scale"}),
        leading={"class_token": 2, "registers": 1, "positions": 1},
    )


DINOV2 = VisionFamily("dinov2", ("dinov2",), _plain, _names)
DINOV2_REGISTERS = VisionFamily("dinov2_with_registers", ("dinov2_with_registers",), _registers, _names)
