"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a window in the upper layers where it is switched
on.
"""

from __future__ import annotations

from dataclasses import replace

from atb_modules.models.config import ModelConfig

from .family import Family
from .llama import llama_config, llama_gguf_config
from .source import ConfigSource


def layer_kinds(source: ConfigSource, num_layers: int) -> list[str] | None:
    """`layer_types` of a config.json, checked; None where it is absent."""
    kinds = source.values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise source.error(f"layer_types is {kinds!r}; allowed: a list of num_hidden_layers={num_layers} entries")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise source.error(f"layer_types has {kind!r}; allowed: full_attention, sliding_attention")
    return kinds


def switched_windows(source: ConfigSource, num_layers: int) -> tuple[int | None, ...]:
    """Left windows of a family with `use_sliding_window`.

    With the switch off there is no window at all; with it on, `layer_types` decides alone, or else the
    layers from `max_window_layers` on have one.
    """
    kinds = layer_kinds(source, num_layers)
    if not source.flag("use_sliding_window", False):
        if kinds is not None and "sliding_attention" in kinds:
            raise source.error("use_sliding_window is false, but layer_types has sliding_attention layers")
        return (None,) * num_layers
    if source.values.get("sliding_window", 4096) is None:
        if kinds is not None and "sliding_attention" in kinds:
            raise source.error("sliding_window is null, but layer_types has sliding_attention layers")
        return (None,) * num_layers
    window = source.count("sliding_window", 4096) - 1
    if kinds is None:
        first = source.values.get("max_window_layers")
        first = 28 if first is None else first
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise source.error(f"max_window_layers is {first!r}; allowed: an integer of at least 0")
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def qwen2_config(source: ConfigSource) -> ModelConfig:
    """ModelConfig of a config.json of transformers' Qwen2ForCausalLM."""
    config = llama_config(source)
    return replace(
        config,
        family="qwen2",
        windows=switched_windows(source, config.num_layers),
        max_positions=source.count("max_position_embeddings", 32768),
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
    )


def qwen2_gguf_config(source: ConfigSource, arch: str) -> ModelConfig:
    """ModelConfig of the metadata of a GGUF of architecture "qwen2"."""
    return replace(llama_gguf_config(source, arch), family="qwen2", qkv_bias=True)


QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2",),
    config=qwen2_config,
    gguf_architectures=("qwen2",),
    gguf_config=qwen2_gguf_config,
)
