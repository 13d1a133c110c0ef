"""ModelConfig: what a decoder-only model computes, whatever file it came from. InferenceConfig: how it
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atb_modules.attention.rope import RotaryConfig
from atb_modules.checks import LARGEST_COUNT, check_bool, check_int, check_number, check_positive, check_type
from atb_modules.layer import NormPlacement
from atb_modules.mlp import MLPType, MoEConfig
from atb_modules.norm import NormCastOrder
from atb_modules.strategies import AttentionType, parse_enum

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_dtype(dtype: torch.dtype | None, *more: torch.dtype) -> None:
    """Raises a ValueError unless parameters can have `dtype`: None, or one of three (and `more`)."""
    allowed = (*_DTYPES, *more)
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in allowed):
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
        moe: mixture of experts in the place of each feed-forward, None for none.
        moe_intermediate_size: channels inside of an expert; None for intermediate_size.
        dense_layers: layers whose feed-forward is none all the same.
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
    moe: MoEConfig | None = None
    moe_intermediate_size: int | None = None
    dense_layers: tuple[int, ...] = ()
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
            check_int(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads is {self.num_heads}, which num_kv_heads {self.num_kv_heads} does not divide")
        check_type("family", self.family, str)
        check_number("norm_eps", self.norm_eps, "a finite number of at least 0", lambda eps: eps >= 0)
        check_number("norm_offset", self.norm_offset)
        for name in ("qk_norm", "qkv_bias", "output_bias", "mlp_bias", "tie_word_embeddings"):
            check_bool(name, getattr(self, name))
        parse_enum(NormCastOrder, self.norm_cast_order, "norm_cast_order")
        parse_enum(MLPType, self.mlp_type, "mlp_type")
        if self.norm_placement not in (NormPlacement.PRE, NormPlacement.SANDWICH):
            raise ValueError(f"norm_placement is {self.norm_placement!r}; allowed: 'pre', 'sandwich'")
        for name in ("attention_scale", "embedding_scale"):
            check_number(name, getattr(self, name), optional=True)
        for name in ("attention_softcap", "logit_softcap"):
            check_positive(name, getattr(self, name), optional=True)
        for index, window in enumerate(self._tuple("windows", self.num_layers)):
            check_int(f"windows[{index}]", window, 0, optional=True)
        for index, rotary in enumerate(self._tuple("rotary", self.num_layers)):
            check_type(f"rotary[{index}]", rotary, RotaryConfig)
        check_type("moe", self.moe, MoEConfig, optional=True)
        check_int("moe_intermediate_size", self.moe_intermediate_size, optional=True)
        for index, layer in enumerate(self._tuple("dense_layers")):
            check_int(f"dense_layers[{index}]", layer, 0, self.num_layers - 1)
        for name in ("moe_intermediate_size", "dense_layers"):
            if self.moe is None and getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)} and moe None; allowed: with a MoEConfig")
        for index, token in enumerate(self._tuple("eos_token_ids")):
            check_int(f"eos_token_ids[{index}]", token, 0)

    @property
    def position_axes(self) -> int | None:
        """Axes of a position where all layers turn by several (M-RoPE), else None."""
        counts = {len(rotary.mrope_section) if rotary.mrope_section else None for rotary in self.rotary}
        return counts.pop() if len(counts) == 1 else None

    @property
    def expert_size(self) -> int:
        """Channels inside of an expert."""
        return self.intermediate_size if self.moe_intermediate_size is None else self.moe_intermediate_size

    def moe_of(self, layer: int) -> MoEConfig | None:
        """The mixture of a layer, None for a plain feed-forward."""
        return None if layer in self.dense_layers else self.moe

    def _tuple(self, name: str, entries: int | None = None) -> tuple:
        """The tuple that the field `name` holds from now on; raises unless it is a sequence of `entries` entries."""
        value = getattr(self, name)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError(f"{name} is {value!r:.80} ({type(value).__name__}); allowed: a tuple")
        if entries is not None and len(value) != entries:
            raise ValueError(f"{name} has {len(value)} entries; num_layers is {entries}")
        object.__setattr__(self, name, tuple(value))
        return tuple(value)


@dataclass
class InferenceConfig:
    """How a model runs when it generates. Set attribute by attribute; values are checked when it is used, names at
    once: one that is not below is an AttributeError.

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

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__dataclass_fields__:
            allowed = ", ".join(self.__dataclass_fields__)
            raise AttributeError(f"InferenceConfig has no {name!r}; allowed: {allowed}")
        object.__setattr__(self, name, value)

    def validate(self) -> None:
        """Raises a ValueError or TypeError that names the attribute."""
        for name in ("enable_inference_fusion", "enable_kv_cache_opt"):
            check_bool(name, getattr(self, name))
        for name in ("prefill_chunk_size", "page_size"):
            value = getattr(self, name)
            if value is None and name == "prefill_chunk_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_COUNT:
                raise ValueError(f"{name} is {value!r}; allowed: a positive int")
        check_dtype(self.dtype)
        parse_enum(AttentionType, self.attention_type, "attention_type")
