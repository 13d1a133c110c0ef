"""The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, relative to ``visual.``; their mergers are projectors."""

from __future__ import annotations

from atb_modules.convert.source import ConfigSource
from atb_modules.multimodal.vision import Interpolation, PositionConfig, VisionConfig

from .family import ACTIVATIONS, VisionFamily, depth, one_size, square_side
from .names import VisionNames

_TOWER = {"patch_embed": "patch_embed.proj"}
_LAYER = {
    "attention_norm": "norm1",
    "qkv": "attn.qkv",
    "o": "attn.proj",
    "mlp_norm": "norm2",
}


def _rotary_base(config: ConfigSource) -> float:
    """Of the axial rotary positions; files older than the key have the default."""
    parameters = ConfigSource(config.mapping("rope_parameters"), f"{config.path}: rope_parameters")
    kind = parameters.word("rope_type", "axial")
    if kind not in ("axial", "default"):
        raise parameters.error(f"rope_type is {kind!r}; allowed: axial")
    return parameters.positive("rope_theta", 10000.0)


def _indexes(config: ConfigSource, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """A list of layers, from 0."""
    value = config.values.get(key)
    if value is None:
        return default
    if not isinstance(value, (list, tuple)) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
        raise config.error(f"{key} is {value!r}; allowed: a list of layers, from 0")
    return tuple(value)


def _qwen2_vl(config: ConfigSource) -> VisionConfig:
    hidden = config.count("embed_dim", 1280)
    return VisionConfig(
        family="qwen2_vl",
        hidden_size=hidden,
        num_layers=depth(config, "depth", 32),
        num_heads=config.count("num_heads", 16),
        intermediate_size=int(hidden * config.positive("mlp_ratio", 4)),
        patch_size=one_size(config, "patch_size", 14),
        in_channels=config.count("in_channels", 3),
        temporal_patch_size=one_size(config, "temporal_patch_size", 2),
        merge_size=config.count("spatial_merge_size", 2),
        patch_bias=False,
        mlp_type=config.choice("hidden_act", "quick_gelu", ACTIVATIONS),
        rotary_base=_rotary_base(config),
    )


def _qwen2_5_vl(config: ConfigSource) -> VisionConfig:
    return VisionConfig(
        family="qwen2_5_vl",
        hidden_size=config.count("hidden_size", 3584),
        num_layers=depth(config, "depth", 32),
        num_heads=config.count("num_heads", 16),
        intermediate_size=config.count("intermediate_size", 3420),
        patch_size=one_size(config, "patch_size", 14),
        in_channels=config.count("in_channels", 3),
        temporal_patch_size=one_size(config, "temporal_patch_size", 2),
        merge_size=config.count("spatial_merge_size", 2),
        patch_bias=False,
        mlp_type=config.choice("hidden_act", "silu", {"silu": "swiglu", "gelu": "geglu"}),
        norm_type="rmsnorm",
        rotary_base=_rotary_base(config),
        window=config.count("window_size", 112),
        full_attention_layers=_indexes(config, "fullatt_block_indexes", (7, 15, 23, 31)),
    )


def _qwen3_vl(config: ConfigSource) -> VisionConfig:
    side = square_side(config, "num_position_embeddings", 2304)
    return VisionConfig(
        family="qwen3_vl",
        hidden_size=config.count("hidden_size", 1152),
        num_layers=depth(config, "depth", 27),
        num_heads=config.count("num_heads", 16),
        intermediate_size=config.count("intermediate_size", 4304),
        patch_size=one_size(config, "patch_size", 16),
        in_channels=config.count("in_channels", 3),
        temporal_patch_size=one_size(config, "temporal_patch_size", 2),
        merge_size=config.count("spatial_merge_size", 2),
        mlp_type=config.choice("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
        positions=PositionConfig((side, side), Interpolation("bilinear", align_corners=True)),
        rotary_base=_rotary_base(config),
    )


_QWEN2_NAMES = VisionNames("blocks.{}.", _TOWER, {**_LAYER, "up": "mlp.fc1", "down": "mlp.fc2"}, patch_axes=5)
_QWEN2_5_NAMES = VisionNames(
    "blocks.{}.",
    _TOWER,
    {**_LAYER, "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
    patch_axes=5,
)
_QWEN3_NAMES = VisionNames(
    "blocks.{}.",
    {**_TOWER, "positions": "pos_embed"},
    {**_LAYER, "up": "mlp.linear_fc1", "down": "mlp.linear_fc2"},
    patch_axes=5,
)

QWEN2_VL = VisionFamily("qwen2_vl", ("qwen2_vl_vision", "qwen2_vl"), _qwen2_vl, lambda _: _QWEN2_NAMES)
QWEN2_5_VL = VisionFamily("qwen2_5_vl", ("qwen2_5_vl_vision", "qwen2_5_vl"), _qwen2_5_vl, lambda _: _QWEN2_5_NAMES)
QWEN3_VL = VisionFamily(
    "qwen3_vl",
    ("qwen3_vl_vision", "qwen3_vl", "qwen3_vl_moe_vision", "qwen3_vl_moe"),
    _qwen3_vl,
    lambda _: _QWEN3_NAMES,
)
