"""Llama, and all that is built as it: SmolLM2, Llama 2 and 3, TinyLlama."""

from __future__ import annotations

from atb_modules.models.config import ModelConfig

from .family import Family
from .rotary import gguf_rotary, rotary_setting
from .source import ConfigSource, head_counts, head_size

ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}


def llama_config(source: ConfigSource) -> ModelConfig:
    """ModelConfig of a config.json of transformers' LlamaForCausalLM."""
    num_heads, num_kv_heads = head_counts(source)
    num_layers = source.layers("num_hidden_layers")
    bias = source.flag("attention_bias", False)
    return ModelConfig(
        family="llama",
        vocab_size=source.count("vocab_size"),
        hidden_size=source.count("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_size(source, num_heads),
        intermediate_size=source.count("intermediate_size"),
        windows=(None,) * num_layers,
        rotary=(rotary_setting(source),) * num_layers,
        max_positions=source.count("max_position_embeddings", 2048),
        norm_eps=source.number("rms_norm_eps", 1e-6),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=source.flag("mlp_bias", False),
        mlp_type=source.choice("hidden_act", "silu", ACTIVATIONS),
        tie_word_embeddings=source.flag("tie_word_embeddings", False),
        eos_token_ids=source.token_ids("eos_token_id"),
    )


def llama_gguf_config(source: ConfigSource, arch: str) -> ModelConfig:
    """ModelConfig of the metadata of a GGUF whose architecture is built as Llama."""
    num_heads = source.count(f"{arch}.attention.head_count")
    num_kv_heads = source.count(f"{arch}.attention.head_count_kv", num_heads)
    hidden_size = source.count(f"{arch}.embedding_length")
    if num_heads % num_kv_heads or (hidden_size % num_heads and not source.has(f"{arch}.attention.key_length")):
        raise source.error(
            f"{arch}.embedding_length {hidden_size}, attention.head_count {num_heads} and head_count_kv "
            f"{num_kv_heads} do not divide one another"
        )
    head_dim = source.count(f"{arch}.attention.key_length", hidden_size // num_heads)
    num_layers = source.layers(f"{arch}.block_count")
    max_positions = source.count(f"{arch}.context_length")
    window = None
    if source.has(f"{arch}.attention.sliding_window"):
        window = source.count(f"{arch}.attention.sliding_window") - 1
    return ModelConfig(
        family="llama",
        vocab_size=source.count("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=source.count(f"{arch}.feed_forward_length"),
        windows=(window,) * num_layers,
        rotary=(gguf_rotary(source, arch, head_dim, max_positions),) * num_layers,
        max_positions=max_positions,
        norm_eps=source.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings=source.flag("tied", False),
        eos_token_ids=source.token_ids("eos_token_ids"),
    )


LLAMA = Family(
    name="llama",
    model_types=("llama",),
    config=llama_config,
    gguf_architectures=("llama",),
    gguf_config=llama_gguf_config,
    gguf_permuted=True,
)
