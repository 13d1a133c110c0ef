"""Rotary settings of foreign configurations: config.json's rope_parameters and rope_scaling, GGUF's rope
keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atb_modules.attention.rope import RotaryConfig
from atb_modules.attention.rope_scaling import RotaryScaling

from .source import ConfigSource

# "mrope" is an old word for plain frequencies whose positions have several axes.
_TYPES = ("default", "mrope", "linear", "dynamic", "yarn", "llama3", "longrope")


def rotary_by_kind(
    source: ConfigSource, kinds: tuple[str, ...], defaults: Mapping[str, float]
) -> dict[str, RotaryConfig]:
    """The rotary setting of each kind of layer ("full_attention", "sliding_attention") of a config.json.

    The nested values of `rope_parameters` (or the older `rope_scaling`) win over `rope_theta` beside them.
    They are one object for all layers, or one object a kind.

    Args:
        kinds: the kinds that the model has.
        defaults: base of each kind when the file names none.
    """
    nested = source.mapping("rope_scaling") or source.mapping("rope_parameters")
    by_kind = any(kind in nested for kind in ("full_attention", "sliding_attention"))
    rotary = {}
    for kind in kinds:
        values = nested.get(kind) if by_kind else nested
        if by_kind and not isinstance(values, Mapping):
            raise source.error(f"rope_parameters has no object for {kind!r}, which some layers are")
        base = source.number("rope_theta", defaults[kind])
        rotary[kind] = _rotary(source, dict(values or {}), base)
    return rotary


def rotary_setting(source: ConfigSource, default_base: float = 10000.0) -> RotaryConfig:
    """The one rotary setting of a config.json whose layers share it."""
    return rotary_by_kind(source, ("full_attention",), {"full_attention": default_base})["full_attention"]


def _rotary(source: ConfigSource, values: dict[str, Any], base: float) -> RotaryConfig:
    nested = ConfigSource(values, source.path)
    kind = nested.word("rope_type", nested.word("type", "default"))
    if kind not in _TYPES:
        raise source.error(f"rope_type is {kind!r}; allowed: {', '.join(_TYPES)}")
    rotary = RotaryConfig(
        base=nested.number("rope_theta", base),
        partial_factor=nested.number("partial_rotary_factor", source.number("partial_rotary_factor", 1.0)),
    )
    if kind in ("default", "mrope"):
        return rotary
    return replace(rotary, scaling=_scaling(source, nested, kind))


def _scaling(source: ConfigSource, nested: ConfigSource, kind: str) -> RotaryScaling:
    if kind == "linear":
        return RotaryScaling("linear", factor=nested.number("factor"))
    max_positions = source.count("max_position_embeddings")
    original = source.count(
        "original_max_position_embeddings", nested.count("original_max_position_embeddings", max_positions)
    )
    if kind == "dynamic":
        return RotaryScaling("dynamic", factor=nested.number("factor"), original_max_positions=max_positions)
    if kind == "llama3":
        return RotaryScaling(
            "llama3",
            factor=nested.number("factor"),
            original_max_positions=original,
            low_freq_factor=nested.number("low_freq_factor"),
            high_freq_factor=nested.number("high_freq_factor"),
        )
    attention_factor = nested.optional_number("attention_factor")
    if kind == "yarn":
        return RotaryScaling(
            "yarn",
            factor=nested.number("factor", max_positions / original),
            original_max_positions=original,
            attention_factor=attention_factor,
            mscale=nested.optional_number("mscale"),
            mscale_all_dim=nested.optional_number("mscale_all_dim"),
            beta_fast=nested.number("beta_fast", 32.0),
            beta_slow=nested.number("beta_slow", 1.0),
            truncate=nested.flag("truncate", True),
        )
    return RotaryScaling(
        "longrope",
        factor=nested.number("factor", max_positions / original),
        original_max_positions=original,
        attention_factor=attention_factor,
        short_factor=_numbers(nested, "short_factor"),
        long_factor=_numbers(nested, "long_factor"),
    )


def _numbers(nested: ConfigSource, key: str) -> tuple[float, ...]:
    values = nested.values.get(key)
    if not isinstance(values, list) or not all(isinstance(v, int | float) for v in values):
        raise nested.error(f"{key} is {values!r}; allowed: a list of numbers")
    return tuple(float(v) for v in values)


def gguf_rotary(
    source: ConfigSource, arch: str, head_dim: int, max_positions: int, default_base: float = 10000.0
) -> RotaryConfig:
    """The rotary setting in the metadata of a GGUF (`rope_freqs.weight` is a tensor and comes later)."""
    prefix = f"{arch}.rope."
    rotary = RotaryConfig(
        base=source.number(prefix + "freq_base", default_base),
        partial_factor=source.count(prefix + "dimension_count", head_dim) / head_dim,
    )
    kind = source.word(prefix + "scaling.type", "none")
    factor = source.number(prefix + "scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return rotary
    if kind == "linear":
        return replace(rotary, scaling=RotaryScaling("linear", factor=factor))
    if kind != "yarn":
        raise source.error(f"{prefix}scaling.type is {kind!r}; allowed: none, linear, yarn")
    original = source.count(prefix + "scaling.original_context_length", max_positions)
    # llama.cpp multiplies its attn_factor with YaRN's own temperature; ours stands for both.
    temperature = 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0
    attention_factor = temperature * source.number(prefix + "scaling.attn_factor", 1.0)
    return replace(
        rotary,
        scaling=RotaryScaling(
            "yarn",
            factor=factor,
            original_max_positions=original,
            attention_factor=attention_factor,
            beta_fast=source.number(prefix + "scaling.yarn_beta_fast", 32.0),
            beta_slow=source.number(prefix + "scaling.yarn_beta_slow", 1.0),
        ),
    )
