"""Gated cross attention: text reads images through a gate that starts closed (Flamingo, Llama 3.2 Vision)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.attention import Attention, AttentionConfig
from atb_modules.checks import check_bool, check_number, check_tensor, check_type
from atb_modules.mlp import MLPConfig, MLPType, build_mlp
from atb_modules.norm import NormConfig, build_norm
from atb_modules.strategies import parse_enum

from .placeholders import Span


class ImageReach(StrEnum):
    """Which images a token reads: the one before it alone (Flamingo), or all before it."""

    IMMEDIATE_PREVIOUS = "immediate_previous"
    ALL_PREVIOUS = "all_previous"


def image_reach(
    spans: Sequence[Span], batch: int, seq_len: int, reach: ImageReach | str = ImageReach.IMMEDIATE_PREVIOUS
) -> Tensor:
    """bool (batch, seq, images): which images each token reads; ``images`` are the most that a row has.

    An image is read from its first placeholder on; row r's images count from 0 in the order of its tokens::

        tokens                 a <img> b c <img> d
        immediate_previous     -   0   0 0   1   1
        all_previous           -   0   0 0  0,1 0,1
    """
    reach = parse_enum(ImageReach, reach, "reach")
    starts = [sorted(span.start for span in spans if span.row == row) for row in range(batch)]
    images = max(map(len, starts), default=0)
    begun = torch.zeros(batch, seq_len, images, dtype=torch.bool)
    for row, begins in enumerate(starts):
        for number, start in enumerate(begins):
            begun[row, start:, number] = True
    if reach is ImageReach.ALL_PREVIOUS:
        return begun
    # the newest that has begun: begun, while the next has not
    return begun & ~torch.nn.functional.pad(begun, (0, 1))[..., 1:]


@dataclass(frozen=True)
class GateConfig:
    """Options of the gates.

    Args:
        vector: whether a gate has a factor a channel, else one in all.
        initial: what tanh is taken of at the start; 0 leaves the language model as it was.
        mlp_needs_image: whether the feed-forward too is 0 for a token that reads no image (Llama 3.2 Vision).
    """

    vector: bool = False
    initial: float = 0.0
    mlp_needs_image: bool = False

    def __post_init__(self) -> None:
        check_bool("vector", self.vector)
        check_number("initial", self.initial)
        check_bool("mlp_needs_image", self.mlp_needs_image)


class GatedCrossAttention(nn.Module):
    """A layer between those of a language model::

        x = x + tanh(attention_gate) * attn(norm(x), images)
        x = x + tanh(mlp_gate) * mlp(norm(x))

    A token that reads no image gets exactly 0 from the images.

    Args:
        hidden_size, num_heads, head_dim, intermediate_size, num_kv_heads: as in ``TransformerLayer``.
        kv_hidden_size: channels of the images' tokens; default hidden_size.
        layernorm_type, mlp_type: as in ``TransformerLayer``.
        qk_norm: None, or "rmsnorm" or "layernorm" of each head's queries and keys.
        gate: a ``GateConfig``.
        norm: a ``NormConfig``.
        mlp: a ``MLPConfig``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        *,
        num_kv_heads: int | None = None,
        kv_hidden_size: int | None = None,
        layernorm_type: str = "rmsnorm",
        mlp_type: str = MLPType.SWIGLU,
        qk_norm: str | None = None,
        gate: GateConfig | None = None,
        norm: NormConfig | None = None,
        mlp: MLPConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_type("gate", gate, GateConfig, optional=True)
        self.gate = gate if gate is not None else GateConfig()
        norm = norm if norm is not None else NormConfig()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        config = AttentionConfig(
            qk_norm=None if qk_norm is None else "before_rotary", qk_norm_type=qk_norm or "rmsnorm", qk_norm_config=norm
        )
        heads: dict[str, Any] = {"num_kv_heads": num_kv_heads, "kv_hidden_size": kv_hidden_size, "config": config}
        self.attention_norm = build_norm(layernorm_type, hidden_size, norm, **where)
        self.attention = Attention(hidden_size, num_heads, head_dim, cross=True, **heads, **where)
        self.mlp_norm = build_norm(layernorm_type, hidden_size, norm, **where)
        width = 4 * hidden_size if intermediate_size is None else intermediate_size
        self.mlp = build_mlp(hidden_size, width, mlp_type, mlp if mlp is not None else MLPConfig(), **where)
        size = hidden_size if self.gate.vector else 1
        self.attention_gate = nn.Parameter(torch.full((size,), float(self.gate.initial), **where))
        self.mlp_gate = nn.Parameter(torch.full((size,), float(self.gate.initial), **where))

    def forward(
        self, hidden_states: Tensor, images: Tensor | tuple[Tensor, Tensor], reach: Tensor | None = None
    ) -> Tensor:
        """Text with what it reads of the images.

        Args:
            hidden_states: (batch, seq, hidden_size).
            images: (batch, images * tokens, kv_hidden_size), or the keys and values that ``project_images`` made.
            reach: bool (batch, seq, images), see ``image_reach``; or (batch, seq, images * tokens), a token of an image
                by itself. None: every token reads all.

        Returns:
            (batch, seq, hidden_size).

        Raises:
            ValueError, TypeError: shapes that do not go together.
        """
        keys = images[0] if isinstance(images, tuple) and len(images) == 2 else images
        check_tensor("images", keys, "a tensor (batch, images * tokens, kv_hidden_size), or what project_images made")
        assert isinstance(keys, Tensor)
        mask, reads = self._reach(reach, hidden_states, keys.shape[1])
        attended = self.attention(self.attention_norm(hidden_states), mask, key_value_states=images)
        hidden_states = hidden_states + self._gated(self.attention_gate, attended, reads)
        mixed = self.mlp(self.mlp_norm(hidden_states))
        return hidden_states + self._gated(self.mlp_gate, mixed, reads if self.gate.mlp_needs_image else None)

    def project_images(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of images (batch, tokens, kv_hidden_size), to be computed once and read by every step."""
        return self.attention.project_keys_values(images)

    def _gated(self, gate: Tensor, branch: Tensor, reads: Tensor | None) -> Tensor:
        branch = gate.tanh().to(branch.dtype) * branch
        return branch if reads is None else branch.masked_fill(~reads, 0.0)

    def _reach(self, reach: Tensor | None, x: Tensor, tokens: int) -> tuple[Tensor | None, Tensor | None]:
        """The mask (batch, seq, tokens), and which tokens read anything, (batch, seq, 1)."""
        if reach is None:
            return (None, None) if tokens else (None, torch.zeros(*x.shape[:2], 1, dtype=torch.bool, device=x.device))
        check_tensor("reach", reach, "a bool tensor (batch, seq, images)")
        images = reach.shape[-1]
        if reach.dtype != torch.bool or reach.dim() != 3 or reach.shape[:2] != x.shape[:2]:
            raise ValueError(
                f"reach is {reach.dtype} {tuple(reach.shape)}; allowed: torch.bool {tuple(x.shape[:2])} and images"
            )
        if (images == 0) != (tokens == 0) or (images and tokens % images):
            raise ValueError(f"reach has {images} images; images has {tokens} tokens, not a multiple of them")
        mask = reach.repeat_interleave(tokens // images, dim=2) if images else reach
        return mask, reach.any(-1, keepdim=True)
