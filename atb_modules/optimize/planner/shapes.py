"""What the planner must know of a layer and of the call it will serve."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from atb_modules.checks import check_bool, check_int, check_type
from atb_modules.layer import TransformerLayer
from atb_modules.mlp import MLPType
from atb_modules.strategies import parse_enum


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a pre-norm decoder layer, or of an encoder's (no cache), and of one call.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size: of the layer.
        tokens: new tokens of the call, all rows together.
        kv_len: keys that each of them may see, with those of the cache.
        batch: rows; 1 token each is a decode step.
        dtype: of activations and weights.
        mlp_type: of the feed-forward, as ``TransformerLayer`` takes it: whether it has a gate, and how that activates.
        rotary, cached, qk_norm, bias: whether the layer rotates, writes a cache, normalises heads, adds biases to q, k
            and v.
        page_size: tokens of a page; of the call, no plan depends on it.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tokens: int
    kv_len: int
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    mlp_type: str = MLPType.SWIGLU
    rotary: bool = True
    cached: bool = True
    qk_norm: bool = False
    bias: bool = False
    page_size: int = 128

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                check_int(field.name, value)
            elif field.type == "bool":
                check_bool(field.name, value)
        object.__setattr__(self, "mlp_type", parse_enum(MLPType, self.mlp_type, "mlp_type"))
        if self.tokens < self.batch:
            raise ValueError(f"tokens is {self.tokens}; {self.batch} rows take at least one token each")
        if self.cached and self.tokens > self.batch * self.kv_len:
            raise ValueError(f"tokens is {self.tokens}; {self.batch} rows of kv_len {self.kv_len} hold fewer")
        if self.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"dtype is {self.dtype}; allowed: torch.float16, torch.bfloat16, torch.float32")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads {self.num_kv_heads}"
            )

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate beside the up projection."""
        return MLPType(self.mlp_type).is_gated


def shape_of(layer: TransformerLayer, tokens: int, kv_len: int, batch: int = 1, page_size: int = 128) -> LayerShape:
    """The shape of a ``TransformerLayer`` with a plain feed-forward, for calls of such sizes.

    Raises:
        ValueError: for a layer whose steps the planner does not know (mixtures of experts, post-norm, cross decoders).
    """
    check_type("layer", layer, TransformerLayer)
    placement, kind = str(layer.placement), str(layer.layer_type)
    if placement != "pre" or kind == "cross_decoder":
        raise ValueError(f"layer is {kind!r} with norm_placement {placement!r}; the planner knows pre-norm layers")
    down, mlp_type = getattr(layer.mlp, "down_proj", None), getattr(layer.mlp, "mlp_type", None)
    if down is None or mlp_type is None:
        raise ValueError(f"layer.mlp is {type(layer.mlp).__name__}; the planner knows FeedForward")
    attention = layer.attention
    return LayerShape(
        hidden_size=layer.hidden_size,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        intermediate_size=down.in_features,
        tokens=tokens,
        kv_len=kv_len,
        batch=batch,
        dtype=down.weight.dtype,
        mlp_type=mlp_type,
        rotary=attention.rotary is not None,
        cached=str(layer.mode) == "inference",
        qk_norm=attention.q_norm is not None,
        bias=attention.config.qkv_bias,
        page_size=page_size,
    )
