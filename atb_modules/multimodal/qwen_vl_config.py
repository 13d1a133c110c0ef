"""QwenVLConfig: how a Qwen-VL model joins its parts."""

from __future__ import annotations

from dataclasses import dataclass

from atb_modules.checks import check_bool, check_int, check_positive
from atb_modules.strategies import parse_enum

from .mrope import MRoPEAdvance


@dataclass(frozen=True)
class QwenVLConfig:
    """How a Qwen-VL model joins its parts.

    Args:
        image_token_id, video_token_id: the placeholders.
        merge_size: patches a side of what becomes one token.
        frames_apart: whether each time step of a video has a run of placeholders of its own, between timestamps
            (Qwen3-VL).
        tokens_per_second: positions a second of a video's time axis (Qwen2.5-VL); None for one a time step.
        mrope_advance: where text resumes behind a video, see ``MRoPEAdvance``.
        deepstack_layers: layers of the tower, from 0, whose tokens join the stream behind the decoder's first layers.
    """

    image_token_id: int
    video_token_id: int
    merge_size: int = 2
    frames_apart: bool = False
    tokens_per_second: float | None = None
    mrope_advance: MRoPEAdvance | str = MRoPEAdvance.MAX
    deepstack_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("image_token_id", "video_token_id"):
            check_int(name, getattr(self, name), 0)
        if self.image_token_id == self.video_token_id:
            raise ValueError(f"image_token_id and video_token_id are {self.image_token_id}; allowed: two ids")
        check_int("merge_size", self.merge_size)
        check_bool("frames_apart", self.frames_apart)
        check_positive("tokens_per_second", self.tokens_per_second, optional=True)
        object.__setattr__(self, "mrope_advance", parse_enum(MRoPEAdvance, self.mrope_advance, "mrope_advance"))
        for index, layer in enumerate(self.deepstack_layers):
            check_int(f"deepstack_layers[{index}]", layer, 0)
        object.__setattr__(self, "deepstack_layers", tuple(self.deepstack_layers))
