"""Qwen3-MoE: Qwen3 whose feed-forwards are mixtures of many narrow experts, in all layers or in some."""

from __future__ import annotations

from dataclasses import replace

from atb_modules.mlp import MoEConfig, RouterConfig
from atb_modules.models.config import ModelConfig

from .family import HF_LAYER, Family
from .llama import llama_config
from .source import ConfigSource

HF_QWEN3_MOE = HF_LAYER | {
    "mlp.router": "mlp.gate",
    "mlp.experts.*.gate_proj": "mlp.experts.*.gate_proj",
    "mlp.experts.*.up_proj": "mlp.experts.*.up_proj",
    "mlp.experts.*.down_proj": "mlp.experts.*.down_proj",
}


def dense_layers(source: ConfigSource, num_layers: int) -> tuple[int, ...]:
    """Layers with a plain feed-forward: those of `mlp_only_layers`, and all but every `decoder_sparse_step`th."""
    only = source.values.get("mlp_only_layers") or []
    if not isinstance(only, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in only):
        raise source.error(f"mlp_only_layers is {only!r:.200}; allowed: a list of layer numbers")
    step = source.count("decoder_sparse_step", 1)
    return tuple(layer for layer in range(num_layers) if layer in only or (layer + 1) % step)


def qwen3_moe_config(source: ConfigSource) -> ModelConfig:
    """ModelConfig of a config.json of transformers' Qwen3MoeForCausalLM."""
    config = llama_config(source)
    # Newer files name the number of experts as Mixtral's do.
    key = "num_local_experts" if source.has("num_local_experts") else "num_experts"
    # One switch for all layers; transformers keeps no kinds of layers here.
    window = None
    if source.flag("use_sliding_window", False) and source.values.get("sliding_window", 4096) is not None:
        window = source.count("sliding_window", 4096) - 1
    router = RouterConfig(normalize=source.flag("norm_topk_prob", False))
    return replace(
        config,
        family="qwen3_moe",
        windows=(window,) * config.num_layers,
        max_positions=source.count("max_position_embeddings", 32768),
        qk_norm=True,
        mlp_bias=False,
        moe=MoEConfig(source.count(key, 128), source.count("num_experts_per_tok", 8), router=router),
        moe_intermediate_size=source.count("moe_intermediate_size", 768),
        dense_layers=dense_layers(source, config.num_layers),
    )


QWEN3_MOE = Family(name="qwen3_moe", model_types=("qwen3_moe",), config=qwen3_moe_config, hf_layer=HF_QWEN3_MOE)
