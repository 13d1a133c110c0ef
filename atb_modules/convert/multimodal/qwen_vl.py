"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from atb_modules.convert.qwen2 import qwen2_config
from atb_modules.convert.qwen3 import QWEN3
from atb_modules.convert.source import ConfigSource
from atb_modules.convert.vision import vision_family_of
from atb_modules.models.config import ModelConfig
from atb_modules.multimodal.model import VisionLanguageModel
from atb_modules.multimodal.projectors import PatchMerger
from atb_modules.multimodal.qwen_vl import QwenVLConfig, QwenVLModel
from atb_modules.multimodal.vision import PackedTower

from .family import Build, MultimodalFamily, WeightGroup, language_groups, nested, parameters

_MERGER = {"norm": "ln_q", "mlp.layers.0": "mlp.0", "mlp.layers.1": "mlp.2"}
_MERGER3 = {"norm": "norm", "mlp.layers.0": "linear_fc1", "mlp.layers.1": "linear_fc2"}


def _text_source(source: ConfigSource) -> ConfigSource:
    """Old files have the text configuration beside the vision configuration, not nested."""
    return nested(source, "text_config") if source.has("text_config") else source


def _with_mrope(config: ModelConfig, text: ConfigSource, section: list[int], interleaved: bool) -> ModelConfig:
    values = text.mapping("rope_parameters") or text.mapping("rope_scaling")
    given: Any = values.get("mrope_section", section)
    if not isinstance(given, list) or any(type(count) is not int for count in given):
        raise text.error(f"mrope_section is {given!r}; allowed: a list of integers")
    rotary = replace(config.rotary[0], mrope_section=tuple(given), mrope_interleaved=interleaved)
    return replace(config, rotary=(rotary,) * config.num_layers)


def _tower(source: ConfigSource, build: Build, model_type: str) -> tuple[PackedTower, ConfigSource]:
    vision = nested(source, "vision_config")
    family = vision_family_of(model_type)
    assert family is not None
    tower = family.build(vision, device="meta", dtype=build.dtype)
    assert isinstance(tower, PackedTower)
    return tower, vision


def _token(source: ConfigSource, kind: str, default: int) -> int:
    return source.count(f"{kind}_token_id", default)


def _build2(source: ConfigSource, build: Build) -> QwenVLModel:
    text = _text_source(source)
    language = build.decoder(_with_mrope(qwen2_config(text), text, [16, 24, 24], False))
    newer = source.word("model_type", "") == "qwen2_5_vl"
    vision, values = _tower(source, build, "qwen2_5_vl" if newer else "qwen2_vl")
    merger = PatchMerger(
        vision.out_channels,
        language.config.hidden_size,
        vision.config.merge_size,
        layernorm_type="rmsnorm" if newer else "layernorm",
        device="meta",
        dtype=build.dtype,
    )
    config = QwenVLConfig(
        _token(source, "image", 151655),
        _token(source, "video", 151656),
        merge_size=vision.config.merge_size,
        tokens_per_second=values.positive("tokens_per_second", 4.0) if newer else None,
    )
    return QwenVLModel(vision, merger, language, config)


def _build3(source: ConfigSource, build: Build) -> QwenVLModel:
    text = _text_source(source)
    language = build.decoder(_with_mrope(QWEN3.config(text), text, [24, 20, 20], True))
    vision, values = _tower(source, build, "qwen3_vl")
    layers: Any = values.values.get("deepstack_visual_indexes", [8, 16, 24])
    options: dict[str, Any] = {"merge_size": vision.config.merge_size, "device": "meta", "dtype": build.dtype}
    sizes = vision.hidden_size, language.config.hidden_size
    config = QwenVLConfig(
        _token(source, "image", 151655),
        _token(source, "video", 151656),
        merge_size=vision.config.merge_size,
        frames_apart=True,
        deepstack_layers=tuple(layers),
    )
    deepstack = [PatchMerger(*sizes, norm_joined=True, **options) for _ in layers]
    return QwenVLModel(vision, PatchMerger(*sizes, **options), language, config, deepstack)


def _vision_slots(model: QwenVLModel, names: dict[str, str]) -> dict[str, Tensor]:
    family = vision_family_of(model.vision.config.family)
    assert family is not None
    slots = dict(family.slots(model.vision))
    slots |= parameters(model.projector, names, "merger.")
    for number, projector in enumerate(model.deepstack):
        slots |= parameters(projector, names, f"deepstack_merger_list.{number}.")
    return slots


def _groups2(model: VisionLanguageModel) -> list[WeightGroup]:
    assert isinstance(model, QwenVLModel)
    vision = WeightGroup(("visual.", "model.visual."), _vision_slots(model, _MERGER))
    return [vision, *language_groups(model, ("model.", "model.language_model."), ("",))]


def _groups3(model: VisionLanguageModel) -> list[WeightGroup]:
    assert isinstance(model, QwenVLModel)
    vision = WeightGroup(("model.visual.", "visual."), _vision_slots(model, _MERGER3))
    return [vision, *language_groups(model, ("model.language_model.", "model."), ("",))]


QWEN2_VL = MultimodalFamily("qwen2_vl", ("qwen2_vl", "qwen2_5_vl"), _build2, _groups2)
QWEN3_VL = MultimodalFamily("qwen3_vl", ("qwen3_vl",), _build3, _groups3)
