"""Options of multimodal attention and layers, grouped: what the modalities share, and their positions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from atb_modules.attention import AttentionConfig, RotaryConfig
from atb_modules.checks import check_type
from atb_modules.strategies import parse_enum


class Sharing(StrEnum):
    """Whether both modalities go through the same parameters or each through its own (visual experts)."""

    SHARED = "shared"
    PER_MODALITY = "per_modality"


class TextStart(StrEnum):
    """Where the default positions of text begin; those of vision begin at 0."""

    AFTER_VISION = "after_vision"  # at the number of vision tokens of the sample
    ZERO = "zero"


@dataclass(frozen=True)
class MultiModalConfig:
    """Options of ``MultiModalAttention`` and ``MultiModalTransformerLayer``.

    Args:
        projections: "shared", or "per_modality" for a visual expert (CogVLM, Wang et al., 2023): own qkv and output
            projections and own norms of queries and keys.
        norms, mlps: the same choice for the norms of a layer, and for its feed-forwards with their layer scales.
        vision_rotary, text_rotary: a ``RotaryConfig`` for each modality, None for no rotary positions.
        text_start: a ``TextStart`` or its word.
    """

    projections: Sharing | str = Sharing.SHARED
    norms: Sharing | str = Sharing.SHARED
    mlps: Sharing | str = Sharing.SHARED
    vision_rotary: RotaryConfig | None = None
    text_rotary: RotaryConfig | None = None
    text_start: TextStart | str = TextStart.AFTER_VISION

    def __post_init__(self) -> None:
        for name in ("projections", "norms", "mlps"):
            object.__setattr__(self, name, parse_enum(Sharing, getattr(self, name), name))
        object.__setattr__(self, "text_start", parse_enum(TextStart, self.text_start, "text_start"))
        check_type("vision_rotary", self.vision_rotary, RotaryConfig, optional=True)
        check_type("text_rotary", self.text_rotary, RotaryConfig, optional=True)


def parts_of(sharing: Sharing | str) -> tuple[str, ...]:
    """The names under which a block of such sharing keeps its parameters."""
    return ("shared",) if sharing is Sharing.SHARED else ("vision", "text")


def check_attention_options(config: AttentionConfig) -> None:
    """Raises where ``config`` asks for structure that attention of two modalities has no place for."""
    for name, plain in (("window", None), ("sparse", None), ("sinks", False), ("alibi", False)):
        value = getattr(config, name)
        if value != plain:
            raise ValueError(f"config.{name} is {value!r:.80}; multimodal attention allows {plain}")
