"""LLaVA 1.5 and LLaVA-NeXT."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from atb_modules.convert.source import ConfigSource
from atb_modules.convert.vision import vision_family_of
from atb_modules.convert.vision.families import vision_families_text
from atb_modules.convert.vision.family import VisionFamily
from atb_modules.models.decoder import DecoderModel
from atb_modules.multimodal.llava import LlavaModel
from atb_modules.multimodal.model import VisionLanguageModel
from atb_modules.multimodal.projectors import MLPProjector
from atb_modules.multimodal.tiling import AnyResolution, Tiling
from atb_modules.multimodal.vision import ImageTower, VisionTower

from .family import Build, MultimodalFamily, WeightGroup, language_groups, nested, parameters, text_config

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "relu": "relu",
}
#: What may stand before a tower's names.
TOWER_ROOTS = ("vision_tower.", "vision_tower.vision_model.", "model.vision_tower.", "model.vision_tower.vision_model.")
_PROJECTOR = {"layers.0": "linear_1", "layers.1": "linear_2"}


def _build(source: ConfigSource, build: Build) -> LlavaModel:
    language = build.decoder(text_config(source))
    vision = _tower(source, build)
    projector = MLPProjector(
        vision.out_channels,
        language.config.hidden_size,
        kind=source.choice("projector_hidden_act", "gelu", _ACTIVATIONS),
        bias=source.flag("multimodal_projector_bias", True),
        device="meta",
        dtype=build.dtype,
    )
    token_id = source.count("image_token_index", source.count("image_token_id", 32000))
    return LlavaModel(
        vision, projector, language, image_token_id=token_id, tiling=_tiling(source, build, vision, language)
    )


def _family(source: ConfigSource) -> tuple[VisionFamily, ConfigSource]:
    vision = nested(source, "vision_config")
    family = vision_family_of(vision.word("model_type", "clip_vision_model"))
    if family is None:
        raise vision.error(f"model_type is {vision.values.get('model_type')!r}; allowed: {vision_families_text()}")
    return family, vision


def _tower(source: ConfigSource, build: Build) -> VisionTower:
    family, vision = _family(source)
    layer: Any = source.values.get("vision_feature_layer", -2)
    tower = family.build(vision, select_layer=layer, final_norm=False, device="meta", dtype=build.dtype)
    if not isinstance(tower, ImageTower):
        raise vision.error(f"family {family.name!r} takes patches of any size; LLaVA allows towers of one size")
    strategy = source.word("vision_feature_select_strategy", "default")
    allowed = {"default": 1, "full": 0}
    if strategy not in allowed:
        raise source.error(f"vision_feature_select_strategy is {strategy!r}; allowed: default, full")
    if allowed[strategy] != tower.num_prefix_tokens:
        raise source.error(
            f"vision_feature_select_strategy is {strategy!r}, which drops the first {allowed[strategy]} tokens; the "
            f"tower has {tower.num_prefix_tokens} before the patches, and gives the patches alone"
        )
    return tower


def _tiling(source: ConfigSource, build: Build, vision: VisionTower, language: DecoderModel) -> Tiling | None:
    pinpoints = source.values.get("image_grid_pinpoints")
    if pinpoints is None:
        return None
    size = vision.config.image_size
    assert size is not None
    return AnyResolution(
        language.config.hidden_size, pinpoints, size[0], vision.patch_size, device="meta", dtype=build.dtype
    )


def projector_group(slots: dict[str, Tensor]) -> WeightGroup:
    """The weights of a projector."""
    return WeightGroup(("multi_modal_projector.", "model.multi_modal_projector."), slots)


def _groups(model: VisionLanguageModel) -> list[WeightGroup]:
    family = vision_family_of(model.vision.config.family)
    assert family is not None and isinstance(model, LlavaModel)
    newline: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.tiling.named_parameters()}
    return [
        WeightGroup(TOWER_ROOTS, family.slots(model.vision)),
        projector_group(parameters(model.projector, _PROJECTOR)),
        WeightGroup(("", "model."), newline),
        *language_groups(model, ("language_model.model.", "model.language_model."), ("language_model.", "")),
    ]


LLAVA = MultimodalFamily("llava", ("llava", "llava_next"), _build, _groups)
