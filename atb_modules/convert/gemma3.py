"""Gemma 3, text: norms of 1 + w before and after each block, local and global layers with a rotary base of
their own.
"""

from __future__ import annotations

import math
from dataclasses import replace

from atb_modules.attention.rope import RotaryConfig
from atb_modules.models.config import ModelConfig
from atb_modules.norm import NormCastOrder

from .family import GGUF_LAYER, HF_LAYER, Family
from .llama import ACTIVATIONS, llama_gguf_config
from .qwen2 import layer_kinds
from .rotary import rotary_by_kind
from .source import ConfigSource, head_counts, head_size

_GLOBAL_BASE, _LOCAL_BASE = 1_000_000.0, 10_000.0
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def gemma3_config(source: ConfigSource) -> ModelConfig:
    """ModelConfig of a config.json of transformers' Gemma3ForCausalLM."""
    if source.flag("use_bidirectional_attention", False):
        raise source.error("use_bidirectional_attention is true; allowed: false (a causal model)")
    num_heads, num_kv_heads = head_counts(source)
    num_layers = source.layers("num_hidden_layers")
    pattern = source.count("sliding_window_pattern", 6)
    kinds = layer_kinds(source, num_layers)
    if kinds is None:
        kinds = [_GLOBAL if (layer + 1) % pattern == 0 else _LOCAL for layer in range(num_layers)]
    window = source.count("sliding_window", 4096) - 1
    rotary = _rotary(source, kinds)
    bias = source.flag("attention_bias", False)
    hidden_size = source.count("hidden_size")
    return ModelConfig(
        family="gemma3",
        vocab_size=source.count("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_size(source, num_heads, 256),
        intermediate_size=source.count("intermediate_size"),
        windows=tuple(window if kind == _LOCAL else None for kind in kinds),
        rotary=tuple(rotary[kind] for kind in kinds),
        max_positions=source.count("max_position_embeddings", 131_072),
        norm_eps=source.number("rms_norm_eps", 1e-6),
        norm_offset=1.0,
        norm_cast_order=NormCastOrder.CAST_LAST,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_type=source.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
        norm_placement="sandwich",
        attention_scale=source.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=source.optional_number("attn_logit_softcapping"),
        logit_softcap=source.optional_number("final_logit_softcapping"),
        embedding_scale=math.sqrt(hidden_size),
        tie_word_embeddings=source.flag("tie_word_embeddings", True),
        eos_token_ids=source.token_ids("eos_token_id"),
    )


def _rotary(source: ConfigSource, kinds: list[str]) -> dict[str, RotaryConfig]:
    """Global and local setting; files written before `rope_parameters` scale the global layers alone."""
    if any(kind in source.mapping("rope_parameters") for kind in (_LOCAL, _GLOBAL)):
        defaults = {_GLOBAL: _GLOBAL_BASE, _LOCAL: _LOCAL_BASE}
        # The keys beside it are the older form of the same thing, and must not serve as defaults of both
        # kinds.
        values = {k: v for k, v in source.values.items() if k not in ("rope_theta", "rope_scaling")}
        return rotary_by_kind(ConfigSource(values, source.path), tuple(sorted(set(kinds))), defaults)
    rotary = rotary_by_kind(source, (_GLOBAL,), {_GLOBAL: _GLOBAL_BASE})
    rotary[_LOCAL] = RotaryConfig(base=source.number("rope_local_base_freq", _LOCAL_BASE))
    return rotary


def gemma3_gguf_config(source: ConfigSource, arch: str) -> ModelConfig:
    """ModelConfig of the metadata of a GGUF of architecture "gemma3"."""
    config = llama_gguf_config(source, arch)
    pattern = source.count(f"{arch}.attention.sliding_window_pattern", 6)
    window = source.count(f"{arch}.attention.sliding_window") - 1
    local = RotaryConfig(base=source.number(f"{arch}.rope.freq_base_swa", _LOCAL_BASE))
    full = config.rotary[0]
    if not source.has(f"{arch}.rope.freq_base"):
        full = replace(full, base=_GLOBAL_BASE)
    is_global = [(layer + 1) % pattern == 0 for layer in range(config.num_layers)]
    # As llama.cpp has it: only the 27B model (62 layers) does not scale by its head size.
    scalar = config.hidden_size / config.num_heads if config.num_layers == 62 else config.head_dim
    return replace(
        config,
        family="gemma3",
        windows=tuple(None if here else window for here in is_global),
        rotary=tuple(full if here else local for here in is_global),
        norm_offset=1.0,
        norm_cast_order=NormCastOrder.CAST_LAST,
        qk_norm=True,
        mlp_type="geglu_tanh",
        norm_placement="sandwich",
        attention_scale=scalar**-0.5,
        logit_softcap=source.optional_number(f"{arch}.final_logit_softcapping"),
        embedding_scale=math.sqrt(config.hidden_size),
    )


GEMMA3 = Family(
    name="gemma3",
    model_types=("gemma3_text",),
    config=gemma3_config,
    gguf_architectures=("gemma3",),
    gguf_config=gemma3_gguf_config,
    hf_layer={
        **HF_LAYER,
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    gguf_layer={
        **GGUF_LAYER,
        "attention_post_norm": "post_attention_norm",
        "mlp_post_norm": "post_ffw_norm",
    },
    gguf_norm_offset=1.0,
)
