"""What a TransformerLayer gives to its parts: options that its own arguments complete."""

from __future__ import annotations

import dataclasses
from typing import Any

from atb_modules.attention import AttentionConfig
from atb_modules.norm import NormConfig


def attention_options(
    config: AttentionConfig | None, causal: bool, qk_norm: str | None, bias: bool, norm: NormConfig
) -> AttentionConfig:
    """The attention options with what the layer's own arguments say where they leave it open."""
    if config is None:
        return AttentionConfig(causal=causal, qkv_bias=bias, out_bias=bias, qk_norm=qk_norm, qk_norm_config=norm)
    if qk_norm is not None and config.qk_norm is not None and config.qk_norm != qk_norm:
        raise ValueError(f"qk_norm is {qk_norm!r}, but attention.qk_norm is {str(config.qk_norm)!r}; give one")
    changes: dict[str, Any] = {}
    if config.causal is None:
        changes["causal"] = causal
    if qk_norm is not None:
        changes["qk_norm"] = qk_norm
    if bias:
        changes.update(qkv_bias=True, out_bias=True)
    return dataclasses.replace(config, **changes)
