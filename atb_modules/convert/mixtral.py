"""Mixtral: Mistral whose feed-forwards are mixtures of experts (Jiang et al., 2024)."""

from __future__ import annotations

from dataclasses import replace

from atb_modules.mlp import MoEConfig
from atb_modules.models.config import ModelConfig

from .family import HF_LAYER, Family
from .llama import llama_config
from .rotary import rotary_setting
from .source import ConfigSource

HF_MIXTRAL = HF_LAYER | {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
    "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
    "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
}


def mixtral_config(source: ConfigSource) -> ModelConfig:
    """ModelConfig of a config.json of transformers' MixtralForCausalLM."""
    config = llama_config(source)
    window = source.count("sliding_window") - 1 if source.has("sliding_window") else None
    return replace(
        config,
        family="mixtral",
        windows=(window,) * config.num_layers,
        rotary=(rotary_setting(source, 1e6),) * config.num_layers,
        max_positions=source.count("max_position_embeddings", 4096 * 32),
        norm_eps=source.number("rms_norm_eps", 1e-5),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        moe=MoEConfig(source.count("num_local_experts", 8), source.count("num_experts_per_tok", 2)),
    )


MIXTRAL = Family(name="mixtral", model_types=("mixtral",), config=mixtral_config, hf_layer=HF_MIXTRAL)
