"""Qwen3: queries and keys are normed a head before the rotation; no biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from atb_modules.models.config import ModelConfig

from .family import Family
from .llama import llama_config, llama_gguf_config
from .qwen2 import switched_windows
from .source import ConfigSource, head_size


def qwen3_config(source: ConfigSource) -> ModelConfig:
    """ModelConfig of a config.json of transformers' Qwen3ForCausalLM."""
    config = llama_config(source)
    return replace(
        config,
        family="qwen3",
        head_dim=head_size(source, config.num_heads, 128),
        windows=switched_windows(source, config.num_layers),
        max_positions=source.count("max_position_embeddings", 32768),
        qk_norm=True,
        mlp_bias=False,
    )


def qwen3_gguf_config(source: ConfigSource, arch: str) -> ModelConfig:
    """ModelConfig of the metadata of a GGUF of architecture "qwen3"."""
    return replace(llama_gguf_config(source, arch), family="qwen3", qk_norm=True)


QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    config=qwen3_config,
    gguf_architectures=("qwen3",),
    gguf_config=qwen3_gguf_config,
)
