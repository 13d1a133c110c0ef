"""ModelConfig: what a decoder-only model computes, whatever file it came from. InferenceConfig: how it
runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atb_modules.attention.rope import RotaryConfig
from atb_modules.norm import NormCastOrder

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_dtype(dtype: torch.dtype | None, *more: torch.dtype) -> None:
    """Raises a ValueError unless parameters can have `dtype`: None, or one of three (and `more`)."""
    allowed = (*_DTYPES, *more)
    if dtype is not None and dtype not in allowed:
        raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(map(str, allowed))}, None")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder-only model. Made by `atb_modules.convert`, or by hand.

    Args:
        family: name of the family in `atb_modules.convert` whose names a state dict is saved under.
        vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size: sizes.
        windows: left window of each layer: how many earlier keys a query sees, itself not counted; None for
            all.
        rotary: rotary embedding of each layer.
        max_positions: positions that the model was made for.
        norm_eps, norm_offset, norm_cast_order: of every RMSNorm (see `NormConfig`).
        qk_norm: queries and keys are normed, each head by itself, before they are rotated.
        qkv_bias, output_bias, mlp_bias: which projections have biases.
        mlp_type: word of `MLPType`.
        norm_placement: "pre" or "sandwich".
        attention_scale: factor of the scores; None for head_dim ** -0.5.
        attention_softcap, logit_softcap: cap * tanh(x / cap) on scores and on logits; None for none.
        embedding_scale: factor of the embeddings, rounded to their dtype.
        tie_word_embeddings: the head is the embedding.
        eos_token_ids: tokens that end a text.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    windows: tuple[int | None, ...]
    rotary: tuple[RotaryConfig, ...]
    max_positions: int
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_cast_order: NormCastOrder | str = NormCastOrder.WEIGHT_LAST
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    mlp_type: str = "swiglu"
    norm_placement: str = "pre"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_positions",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; allowed: a positive int")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads is {self.num_heads}, which num_kv_heads {self.num_kv_heads} does not divide")
        if not 0 <= self.norm_eps < float("inf"):
            raise ValueError(f"norm_eps is {self.norm_eps!r}; allowed: a finite number of at least 0")
        for name in ("windows", "rotary"):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries; num_layers is {self.num_layers}")


@dataclass
class InferenceConfig:
    """How a model runs when it generates. Set attribute by attribute; checked when it is used.

    Attributes:
        enable_inference_fusion: one native call a layer for one-token steps, where the layer and the machine
            allow it.
        enable_kv_cache_opt: give pages back that slid out of a window, and share the pages of equal prompts
            in a batch.
        prefill_chunk_size: most prompt tokens in one pass through the model; None for whole prompts.
        dtype: of weights and cache; None for that of the checkpoint (float32 for a GGUF).
        attention_type: of every layer; see `TransformerLayer`.
        page_size: tokens a page of the cache.
    """

    enable_inference_fusion: bool = True
    enable_kv_cache_opt: bool = True
    prefill_chunk_size: int | None = None
    dtype: torch.dtype | None = None
    attention_type: str = "flash"
    page_size: int = 64

    def validate(self) -> None:
        """Raises a ValueError or TypeError that names the attribute."""
        for name in ("enable_inference_fusion", "enable_kv_cache_opt"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; allowed: True, False")
        for name in ("prefill_chunk_size", "page_size"):
            value = getattr(self, name)
            if value is None and name == "prefill_chunk_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; allowed: a positive int")
        check_dtype(self.dtype)
