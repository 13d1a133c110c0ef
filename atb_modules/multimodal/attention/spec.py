"""What is computed: which modality sees which, and where samples and images begin in a packed batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from atb_modules.checks import LARGEST_COUNT, check_bool, check_device, check_int, check_tensor
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import parse_enum


class CrossAttentionMode(StrEnum):
    """Which modality attends to the other as well as to itself. Three vision tokens and four of text:

    text_see_vision         vision_see_text         both                    none
           v v v t t t t         v v v t t t t         v v v t t t t         v v v t t t t
        v  x x x . . . .      v  x x x x x x x      v  x x x x x x x      v  x x x . . . .
        v  x x x . . . .      v  x x x x x x x      v  x x x x x x x      v  x x x . . . .
        v  x x x . . . .      v  x x x x x x x      v  x x x x x x x      v  x x x . . . .
        t  x x x x . . .      t  . . . x . . .      t  x x x x . . .      t  . . . x . . .
        t  x x x x x . .      t  . . . x x . .      t  x x x x x . .      t  . . . x x . .
        t  x x x x x x .      t  . . . x x x .      t  x x x x x x .      t  . . . x x x .
        t  x x x x x x x      t  . . . x x x x      t  x x x x x x x      t  . . . x x x x
    """

    TEXT_SEE_VISION = "text_see_vision"
    VISION_SEE_TEXT = "vision_see_text"
    BOTH = "both"
    NONE = "none"


@dataclass(frozen=True)
class MultiModalSpec:
    """The static structure of attention of two modalities.

    Args:
        cross: a ``CrossAttentionMode`` or its word. Across modalities every token of the sample is seen.
        text_causal: whether text sees no later text. Vision sees all of its image.
        scale: what the scores are multiplied with; None is ``1 / sqrt(head_dim)``.
        softcap: ``cap * tanh(score / cap)`` on the scaled scores.
    """

    cross: CrossAttentionMode | str = CrossAttentionMode.TEXT_SEE_VISION
    text_causal: bool = True
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "cross", parse_enum(CrossAttentionMode, self.cross, "cross_attention_mode"))
        check_bool("text_causal", self.text_causal)
        plain = AttentionSpec(scale=self.scale, softcap=self.softcap)
        object.__setattr__(self, "scale", plain.scale)
        object.__setattr__(self, "softcap", plain.softcap)

    @property
    def text_sees_vision(self) -> bool:
        return self.cross in (CrossAttentionMode.TEXT_SEE_VISION, CrossAttentionMode.BOTH)

    @property
    def vision_sees_text(self) -> bool:
        return self.cross in (CrossAttentionMode.VISION_SEE_TEXT, CrossAttentionMode.BOTH)

    @property
    def full(self) -> AttentionSpec:
        """The spec of a call in which every query sees every key (of its segment)."""
        return AttentionSpec(scale=self.scale, softcap=self.softcap)

    @property
    def text(self) -> AttentionSpec:
        """The spec of text over text."""
        return replace(self.full, causal=self.text_causal)


@dataclass(frozen=True, eq=False)
class MultiModalLayout:
    """Where the samples of a packed batch begin, and their images; int32, all on one device.

    Sample i owns the vision tokens ``cu_vision[i]`` up to ``cu_vision[i + 1]`` and the text tokens of ``cu_text``
    likewise; either may be none. Image tokens see their own image alone, text sees all images of its sample.

    Args:
        cu_vision, cu_text: (samples + 1,).
        cu_images: (images + 1,), among the vision tokens; every boundary of ``cu_vision`` is one of these too. None
            is one image a sample.
    """

    cu_vision: Tensor
    cu_text: Tensor
    cu_images: Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensor in (("cu_vision", self.cu_vision), ("cu_text", self.cu_text), ("cu_images", self.cu_images)):
            if tensor is None and name == "cu_images":
                continue
            check_tensor(name, tensor)
            assert tensor is not None
            if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.numel():
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; allowed: torch.int32 (segments + 1,)"
                )
            if tensor.device != self.cu_vision.device:
                raise ValueError(f"{name} is on {tensor.device}; cu_vision is on {self.cu_vision.device}")
        if self.cu_vision.shape != self.cu_text.shape:
            raise ValueError(
                f"cu_vision has {self.cu_vision.numel() - 1} samples and cu_text {self.cu_text.numel() - 1}; "
                "they must be equal"
            )
        if self.cu_images is not None and not torch.compiler.is_compiling() and self.cu_images.device.type != "meta":
            missing = set(self.cu_vision.tolist()) - set(self.cu_images.tolist())
            if missing:
                raise ValueError(f"cu_images lacks {sorted(missing)}, where samples begin; an image is of one sample")

    @classmethod
    def from_lengths(
        cls,
        vision_lengths: Sequence[int],
        text_lengths: Sequence[int],
        image_lengths: Sequence[Sequence[int]] | None = None,
        device: torch.device | str | None = None,
    ) -> MultiModalLayout:
        """The layout of samples of so many tokens; ``image_lengths`` says for each sample how long its images are.

        Raises:
            ValueError: not as many of all, or the images of a sample do not add up to its vision tokens.
        """
        check_device(device)
        vision_lengths = checked_lengths("vision_lengths", vision_lengths)
        text_lengths = checked_lengths("text_lengths", text_lengths)
        if len(vision_lengths) != len(text_lengths):
            raise ValueError(f"vision_lengths has {len(vision_lengths)} rows and text_lengths {len(text_lengths)}")
        starts = None
        if image_lengths is not None:
            image_lengths = checked_image_lengths(image_lengths, vision_lengths)
            if any(sum(length > 0 for length in images) > 1 for images in image_lengths):
                starts = _starts(list(itertools.chain.from_iterable(image_lengths)), device)
        return cls(_starts(vision_lengths, device), _starts(text_lengths, device), starts)

    @property
    def samples(self) -> int:
        return self.cu_vision.numel() - 1

    @property
    def images(self) -> Tensor:
        """(images + 1,): where each image begins."""
        return self.cu_vision if self.cu_images is None else self.cu_images

    def check(self, vision_len: int, text_len: int) -> None:
        """Raises unless the layout is that of so many packed tokens."""
        for name, starts, total in (
            ("cu_vision", self.cu_vision, vision_len),
            ("cu_images", self.images, vision_len),
            ("cu_text", self.cu_text, text_len),
        ):
            check_starts(name, starts, total)


def check_starts(name: str, starts: Tensor, total: int) -> None:
    """Raises unless ``starts`` rise from 0 to ``total``; not looked at while tracing."""
    if torch.compiler.is_compiling() or starts.device.type == "meta":
        return
    values = starts.tolist()
    if values[0] != 0 or values[-1] != total or any(a > b for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name} is {values}; allowed: 0, rising, up to {total} tokens")


def readable(name: str, tensor: Tensor) -> Tensor:
    """The tensor, whose numbers decide about shapes; ValueError where it has none to read."""
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        raise ValueError(f"{name} is {tensor.layout} on {tensor.device}; allowed: a dense tensor with data")
    return tensor


def checked_lengths(name: str, lengths: Sequence[int] | Tensor, most: int = LARGEST_COUNT) -> list[int]:
    """Lengths of at most ``most`` as ints; TypeError or ValueError where they are none."""
    values: object = lengths
    if isinstance(lengths, Tensor):
        values = readable(name, lengths).tolist()
    elif isinstance(lengths, Sequence) and not isinstance(lengths, (str, bytes)):
        values = list(lengths)
    if not isinstance(values, list):
        raise TypeError(f"{name} is {lengths!r:.80} ({type(lengths).__name__}); allowed: a list or tensor of ints")
    for index, value in enumerate(values):
        check_int(f"{name}[{index}]", value, least=0, most=most)
    return values


def checked_image_lengths(image_lengths: Sequence[Sequence[int]], vision_lengths: Sequence[int]) -> list[list[int]]:
    """Each row's images, which add up to its vision tokens, as ints."""
    if isinstance(image_lengths, Tensor):
        image_lengths = readable("image_lengths", image_lengths).tolist()
    if not isinstance(image_lengths, Sequence) or isinstance(image_lengths, (str, bytes)):
        raise TypeError(
            f"image_lengths is {image_lengths!r:.80} ({type(image_lengths).__name__}); allowed: a list of ints a row"
        )
    if len(image_lengths) != len(vision_lengths):
        raise ValueError(f"image_lengths has {len(image_lengths)} rows and vision_lengths {len(vision_lengths)}")
    rows = [checked_lengths(f"image_lengths[{row}]", lengths) for row, lengths in enumerate(image_lengths)]
    for row, (lengths, total) in enumerate(zip(rows, vision_lengths, strict=True)):
        if sum(lengths) != total:
            raise ValueError(f"image_lengths[{row}] is {lengths}, {sum(lengths)} tokens; row {row} has {total}")
    return rows


def _starts(lengths: Sequence[int], device: torch.device | str | None) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
