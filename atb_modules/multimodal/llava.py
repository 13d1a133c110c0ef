"""LlavaModel: a tower, a projector, a decoder. Copy it to make a variant."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from atb_modules.attention import KVCacheManager
from atb_modules.checks import check_type
from atb_modules.inference.prompts import PromptLike
from atb_modules.models.decoder import DecoderModel
from atb_modules.models.output import ModelOutput
from atb_modules.overlays import Overlays
from atb_modules.strategies import parse_enum

from .model import ImageAttention, VisionLanguageModel
from .placeholders import merge_features
from .tiling import ImageSizes, Tiles, Tiling, WholeImage
from .vision import VisionTower
from .visuals import Features, check_token_types


class LlavaModel(VisionLanguageModel):
    """LLaVA (Liu et al. 2023, 2024): the projected tokens of an image stand in the place of its placeholders.

    Args:
        vision: a tower for images of one size: (tiles, channels, height, width) -> (tiles, patches, channels).
        projector: (..., channels) -> (..., hidden_size).
        language: the decoder.
        image_token_id: the placeholder; a processor puts one for each token of an image.
        tiling: how an image is cut for the tower and its tokens are put together: ``WholeImage`` (LLaVA 1.5, the
            default: a token a patch) or ``AnyResolution`` (LLaVA-NeXT).
        image_attention: how the tokens of an image see each other in the language model: "causal", or "bidirectional"
            (Gemma 3).

    Forward and ``generate`` take what transformers' processors return.
    """

    def __init__(
        self,
        vision: VisionTower,
        projector: nn.Module,
        language: DecoderModel,
        *,
        image_token_id: int,
        tiling: Tiling | None = None,
        image_attention: ImageAttention | str = ImageAttention.CAUSAL,
    ) -> None:
        super().__init__(vision, projector, language, {"image": image_token_id})
        check_type("tiling", tiling, Tiling, optional=True)
        self.both_ways = parse_enum(ImageAttention, image_attention, "image_attention") is ImageAttention.BIDIRECTIONAL
        self.tiling = tiling if tiling is not None else WholeImage(patch_size=vision.patch_size)

    def encode(self, batch: Tiles) -> Features:
        tokens = self.projector(self.vision(batch.tiles.to(self.vision_dtype)))
        return self.tiling.join(tokens, batch), ()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_sizes: ImageSizes | None = None,
        token_type_ids: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        overlays: Overlays | None = None,
        past_key_values: KVCacheManager | None = None,
        labels: Tensor | None = None,
    ) -> ModelOutput:
        """Logits of every token.

        Args:
            input_ids: integers (batch, seq) with the images' placeholders.
            attention_mask, position_ids, overlays, past_key_values, labels: see ``DecoderModel.forward``.
            pixel_values: (images, channels, height, width), in the order of the rows; with tiles (images, tiles,
                channels, height, width).
            image_sizes: (images, 2), height and width of each image before it was cut into tiles.
            token_type_ids, mm_token_type_ids: what a processor says of each token, 0 text, 1 image; checked against
                input_ids.

        Raises:
            ValueError: placeholders and images that do not agree, image by image, before any vision work; and as
                ``DecoderModel.forward``.
        """
        self._check(input_ids, attention_mask, position_ids, overlays, past_key_values, labels)
        images = self.tiling.cut(pixel_values, image_sizes)
        spans = self._place(input_ids, images.visuals, attention_mask, past_key_values, overlays)
        types = {"token_type_ids": token_type_ids, "mm_token_type_ids": mm_token_type_ids}
        check_token_types(types, spans, images.visuals, input_ids, attention_mask)
        stream = self.language.embed_tokens(input_ids)
        if spans:
            tokens, _ = self._encode(images, past_key_values)
            stream = merge_features(stream, tokens, spans)
            overlays = self._seen(spans, input_ids, overlays)
        return self.language(
            None,
            attention_mask,
            position_ids,
            inputs_embeds=stream,
            overlays=overlays,
            past_key_values=past_key_values,
            labels=labels,
        )

    def generate(
        self,
        input_ids: PromptLike,
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_sizes: ImageSizes | None = None,
        token_type_ids: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        **options: Any,
    ) -> Tensor | list[int] | list[list[int]]:
        """Continues prompts with images; ``options`` are those of ``DecoderModel.generate``.

        With ``cache=``, pages of a prompt are found again by its tokens and the content of its images: a second
        question about an image computes neither.
        """
        images = self.tiling.cut(pixel_values, image_sizes)
        types = {"token_type_ids": token_type_ids, "mm_token_type_ids": mm_token_type_ids}
        return self._generate(input_ids, max_new_tokens, images, attention_mask, types, options)
