"""QwenVLModel: images and videos of any size, merged patches, M-RoPE positions. Copy it to make a variant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from atb_modules.attention import KVCacheManager
from atb_modules.checks import check_type
from atb_modules.inference.prompts import PromptLike
from atb_modules.models.decoder import DecoderModel
from atb_modules.models.inputs import Deepstack
from atb_modules.models.output import ModelOutput
from atb_modules.overlays import Overlays

from .model import VisionLanguageModel
from .mrope import MRoPEAdvance
from .packed_visuals import PackedVisuals, Pixels, pack_visuals
from .placeholders import Span, merge_features, span_index
from .qwen_vl_config import QwenVLConfig
from .row_positions import RowPositions, call_positions, given_positions, row_positions
from .vision import PackedTower
from .visuals import Features, Visual, check_token_types

__all__ = ["QwenVLConfig", "QwenVLModel"]


class QwenVLModel(VisionLanguageModel):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL (Wang et al. 2024; Bai et al. 2025), which differ in their parts alone.

    Args:
        vision: a tower for packed patches: (patches, values), grids -> (patches, channels).
        projector: (patches, channels) -> (tokens, hidden_size); a ``PatchMerger``.
        language: the decoder, whose rotary positions have three axes.
        config: a ``QwenVLConfig``.
        deepstack: a projector for each of ``config.deepstack_layers``.

    Forward and ``generate`` take what transformers' processors return.
    """

    def __init__(
        self,
        vision: PackedTower,
        projector: nn.Module,
        language: DecoderModel,
        config: QwenVLConfig,
        deepstack: Sequence[nn.Module] = (),
    ) -> None:
        check_type("config", config, QwenVLConfig)
        super().__init__(vision, projector, language, {"image": config.image_token_id, "video": config.video_token_id})
        if len(deepstack) != len(config.deepstack_layers):
            raise ValueError(
                f"deepstack has {len(deepstack)} projectors; config.deepstack_layers has {len(config.deepstack_layers)}"
            )
        if language.config.position_axes != 3:
            raise ValueError(
                f"language has rotary positions of {language.config.position_axes or 1} axes; allowed: 3, "
                "see RotaryConfig.mrope_section"
            )
        self.config, self.deepstack = config, nn.ModuleList(deepstack)

    @property
    def advance(self) -> MRoPEAdvance:
        """Where text resumes behind a video."""
        return MRoPEAdvance(self.config.mrope_advance)

    def encode(self, batch: PackedVisuals) -> Features:
        patches, layers = batch.patches.to(self.vision_dtype), self.config.deepstack_layers
        tokens, states = self.vision.forward_intermediates(patches, batch.grids, layers)
        joining = zip(self.deepstack, states, strict=True)
        return self.projector(tokens), tuple(projector(state) for projector, state in joining)

    def positions(
        self,
        shape: tuple[int, int],
        spans: Sequence[Span],
        visuals: Sequence[Visual],
        attention_mask: Tensor | None,
        past: Sequence[tuple[int, int]] | None = None,
    ) -> RowPositions:
        return row_positions(shape, spans, visuals, attention_mask, advance=self.advance, past=past)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | Sequence[float] | None = None,
        mm_token_type_ids: Tensor | None = None,
        overlays: Overlays | None = None,
        past_key_values: KVCacheManager | None = None,
        labels: Tensor | None = None,
    ) -> ModelOutput:
        """Logits of every token.

        Args:
            input_ids: integers (batch, seq) with the placeholders of images and videos.
            attention_mask, overlays, past_key_values, labels: see ``DecoderModel.forward``.
            position_ids: (3, batch, seq), or (batch, seq) for text; default those of M-RoPE. With a cache, what comes
                later goes on behind the last token, after the greatest of its axes.
            pixel_values, pixel_values_videos: flattened patches (patches, values), in the order of the rows.
            image_grid_thw, video_grid_thw: int64 (images or videos, 3), time steps, rows and columns of patches.
            second_per_grid_ts: seconds of a time step of each video; default 1.
            mm_token_type_ids: what a processor says of each token, 0 text, 1 image, 2 video; checked against
                input_ids.

        Raises:
            ValueError: placeholders and visuals that do not agree, one by one, before any vision work; and as
                ``DecoderModel.forward``.
        """
        self._check(input_ids, attention_mask, position_ids, overlays, past_key_values, labels)
        images, videos = (pixel_values, image_grid_thw), (pixel_values_videos, video_grid_thw)
        batch = self._pack(images, videos, second_per_grid_ts)
        cache = past_key_values
        spans = self._place(input_ids, batch.visuals, attention_mask, cache, overlays)
        check_token_types({"mm_token_type_ids": mm_token_type_ids}, spans, batch.visuals, input_ids, attention_mask)
        if position_ids is None:
            placed = call_positions(
                input_ids, spans, batch.visuals, attention_mask, overlays, cache, advance=self.advance
            )
        else:
            placed = given_positions(position_ids, input_ids, attention_mask, cache)
        stream, deepstack = self.language.embed_tokens(input_ids), None
        if spans:
            tokens, layers = self._encode(batch, cache)
            stream = merge_features(stream, tokens, spans)
            deepstack = Deepstack(span_index(spans, input_ids.shape[1], input_ids.device), layers) if layers else None
        output = self.language(
            None,
            attention_mask,
            placed.position_ids,
            inputs_embeds=stream,
            deepstack=deepstack,
            overlays=overlays,
            past_key_values=cache,
            labels=labels,
        )
        if cache is not None:
            placed.note(cache)
        return output

    def generate(
        self,
        input_ids: PromptLike,
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | Sequence[float] | None = None,
        mm_token_type_ids: Tensor | None = None,
        **options: Any,
    ) -> Tensor | list[int] | list[list[int]]:
        """Continues prompts with images and videos; ``options`` are those of ``DecoderModel.generate``.

        With ``cache=``, pages of a prompt are found again by its tokens and the content of its images: a second
        question about an image computes neither.
        """
        images, videos = (pixel_values, image_grid_thw), (pixel_values_videos, video_grid_thw)
        batch = self._pack(images, videos, second_per_grid_ts)
        types = {"mm_token_type_ids": mm_token_type_ids}
        return self._generate(input_ids, max_new_tokens, batch, attention_mask, types, options)

    def _pack(self, images: Pixels, videos: Pixels, seconds: Tensor | Sequence[float] | None) -> PackedVisuals:
        config = self.config
        return pack_visuals(
            images,
            videos,
            seconds,
            merge_size=config.merge_size,
            frames_apart=config.frames_apart,
            tokens_per_second=config.tokens_per_second,
        )
