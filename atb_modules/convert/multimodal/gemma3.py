"""Gemma 3 with its vision tower: a LLaVA whose images see both ways."""

from __future__ import annotations

import math

from torch import Tensor

from atb_modules.convert.source import ConfigSource
from atb_modules.convert.vision import vision_family_of
from atb_modules.multimodal.llava import LlavaModel
from atb_modules.multimodal.model import ImageAttention, VisionLanguageModel
from atb_modules.multimodal.projectors import PooledProjector
from atb_modules.multimodal.tiling import WholeImage
from atb_modules.multimodal.vision import ImageTower
from atb_modules.norm import NormCastOrder, NormConfig

from .family import Build, MultimodalFamily, WeightGroup, language_groups, nested, text_config
from .llava import TOWER_ROOTS, projector_group


def _build(source: ConfigSource, build: Build) -> LlavaModel:
    language = build.decoder(text_config(source, "gemma3_text"))
    values = nested(source, "vision_config")
    family = vision_family_of("siglip_vision_model")
    assert family is not None
    vision = family.build(values, device="meta", dtype=build.dtype)
    assert isinstance(vision, ImageTower) and vision.config.image_size is not None
    tokens = source.count("mm_tokens_per_image", 256)
    side, patches = math.isqrt(tokens), vision.config.image_size[0] // vision.patch_size
    if side * side != tokens or patches % side:
        raise source.error(f"mm_tokens_per_image is {tokens}; allowed: a square whose side divides {patches} patches")
    shortest = min((window + 1 for window in language.config.windows if window is not None), default=tokens)
    if tokens > shortest:
        raise source.error(
            f"mm_tokens_per_image is {tokens} and sliding_window {shortest}; allowed: images that a window holds whole"
        )
    projector = PooledProjector(
        vision.out_channels,
        language.config.hidden_size,
        patches // side,
        norm=NormConfig(eps=vision.config.norm_eps, weight_offset=1.0, cast_order=NormCastOrder.CAST_LAST),
        device="meta",
        dtype=build.dtype,
    )
    return LlavaModel(
        vision,
        projector,
        language,
        image_token_id=source.count("image_token_index", source.count("image_token_id", 262144)),
        tiling=WholeImage(tokens),
        image_attention=ImageAttention.BIDIRECTIONAL,
    )


def _groups(model: VisionLanguageModel) -> list[WeightGroup]:
    family = vision_family_of("siglip_vision_model")
    assert family is not None
    projector: dict[str, Tensor] = {
        "mm_soft_emb_norm.weight": model.projector.norm.weight.detach(),
        "mm_input_projection_weight": model.projector.proj.weight.detach().t(),
    }
    return [
        WeightGroup(TOWER_ROOTS, family.slots(model.vision)),
        projector_group(projector),
        *language_groups(model, ("language_model.model.", "model.language_model."), ("language_model.", "")),
    ]


GEMMA3 = MultimodalFamily("gemma3", ("gemma3",), _build, _groups)
