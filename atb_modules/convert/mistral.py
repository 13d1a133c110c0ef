"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from dataclasses import replace

from atb_modules.models.config import ModelConfig

from .family import Family
from .llama import llama_config, llama_gguf_config
from .source import ConfigSource


def mistral_config(source: ConfigSource) -> ModelConfig:
    """ModelConfig of a config.json of transformers' MistralForCausalLM."""
    config = llama_config(source)
    window = None
    # Absent means transformers' default; null means no window.
    if source.values.get("sliding_window", 4096) is not None:
        window = source.count("sliding_window", 4096) - 1
    return replace(
        config,
        family="mistral",
        windows=(window,) * config.num_layers,
        max_positions=source.count("max_position_embeddings", 4096 * 32),
    )


def mistral_gguf_config(source: ConfigSource, arch: str) -> ModelConfig:
    """ModelConfig of a GGUF of architecture "mistral" (most Mistral files say "llama")."""
    return replace(llama_gguf_config(source, arch), family="mistral")


MISTRAL = Family(
    name="mistral",
    model_types=("mistral",),
    config=mistral_config,
    gguf_architectures=("mistral",),
    gguf_config=mistral_gguf_config,
    gguf_permuted=True,
)
