"""What a TransformerLayer gives to its parts: options that its own arguments complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from atb_modules.attention import Attention, AttentionConfig, SparseConfig
from atb_modules.attention.checking import check_key_values
from atb_modules.attention.masking import check_mask
from atb_modules.attention.qkv import SeparateQKV, in_features
from atb_modules.norm import NormConfig
from atb_modules.residual import ResidualConfig


def attention_options(
    config: AttentionConfig | None,
    causal: bool,
    qk_norm: str | None,
    bias: bool,
    norm: NormConfig,
    sparse: SparseConfig | Mapping[str, Any] | None = None,
) -> AttentionConfig:
    """The attention options with what the layer's own arguments say where they leave it open."""
    if config is None:
        own: dict[str, Any] = {"causal": causal, "qk_norm": qk_norm, "qk_norm_config": norm, "sparse": sparse}
        return AttentionConfig(qkv_bias=bias, out_bias=bias, **own)
    if sparse is not None and config.sparse is not None:
        raise ValueError("sparse_config is given, and attention.sparse too; give one")
    if qk_norm is not None and config.qk_norm is not None and config.qk_norm != qk_norm:
        raise ValueError(f"qk_norm is {qk_norm!r}, but attention.qk_norm is {str(config.qk_norm)!r}; give one")
    changes: dict[str, Any] = {}
    if config.causal is None:
        changes["causal"] = causal
    if qk_norm is not None:
        changes["qk_norm"] = qk_norm
    if sparse is not None:
        changes["sparse"] = sparse
    if bias:
        changes.update(qkv_bias=True, out_bias=True)
    return dataclasses.replace(config, **changes)


def stream_scale(residual: ResidualConfig, placement: str) -> float:
    """What the stream is multiplied with where a branch joins it; only a post-norm layer has another than 1."""
    if residual.residual_scale != 1.0 and placement != "post":
        raise ValueError(f"residual_scale is {residual.residual_scale}; norm_placement {str(placement)!r} allows 1.0")
    return residual.residual_scale


def check_across(attention: nn.Module, hidden_states: Tensor, states: Any, mask: Any) -> None:
    """Raises where a cross decoder's encoder_hidden_states or encoder_attention_mask do not go with hidden_states."""
    if states is None:
        raise ValueError("layer_type is 'cross_decoder', which needs encoder_hidden_states")
    if type(attention) is not Attention or hidden_states.dim() != 3:
        return  # a module of the user's own takes what it takes; packed tokens are refused with what they lack
    assert isinstance(attention.qkv, SeparateQKV)
    width = in_features(attention.qkv.k_proj)
    sizes = attention.num_kv_heads, attention.head_dim
    check_key_values(states, hidden_states, *sizes, width, "encoder_hidden_states")
    keys = states if isinstance(states, Tensor) else states[0]
    check_mask("encoder_attention_mask", mask, hidden_states, keys.shape[1], attention.num_heads)
