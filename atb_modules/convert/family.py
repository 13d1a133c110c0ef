"""Family: what the converter must know of one model family. The canonical names of weights are drawn here.

Canonical names are what our model's state dict accepts (projections unfused)::

    embed.weight  norm.weight  lm_head.weight
    layers.{i}.attention.qkv.{q_proj,k_proj,v_proj}.{weight,bias}
    layers.{i}.attention.o_proj.{weight,bias}
    layers.{i}.attention.{q_norm,k_norm}.weight
    layers.{i}.mlp.{gate_proj,up_proj,down_proj}.{weight,bias}
    layers.{i}.mlp.router.weight, layers.{i}.mlp.experts.{e}.{gate_proj,up_proj,down_proj}.weight    a mixture
    layers.{i}.{attention_norm,mlp_norm}.weight            before a block
    layers.{i}.{attention_post_norm,mlp_post_norm}.weight  after a block (sandwich)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from atb_modules.models.config import ModelConfig

from .source import ConfigSource

_EXPERT = re.compile(r"\.(\d+)\.")
HF_MODEL = {"embed": "embed_tokens", "norm": "norm"}
HF_LAYER = {
    "attention.qkv.q_proj": "self_attn.q_proj",
    "attention.qkv.k_proj": "self_attn.k_proj",
    "attention.qkv.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
GGUF_MODEL = {"embed": "token_embd", "norm": "output_norm", "lm_head": "output"}
GGUF_LAYER = {
    "attention.qkv.q_proj": "attn_q",
    "attention.qkv.k_proj": "attn_k",
    "attention.qkv.v_proj": "attn_v",
    "attention.o_proj": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
}


@dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    Args:
        name: as `ModelConfig.family`.
        model_types: `model_type` words of config.json that it reads.
        config: ModelConfig from a config.json.
        gguf_architectures: `general.architecture` words of GGUF files that it reads.
        gguf_config: ModelConfig from the metadata of a GGUF; None where no such file is read.
        hf_layer, gguf_layer: foreign names of the parts of a layer; `*` stands for the number of an expert.
        gguf_permuted: GGUF files hold q and k for the interleaved rotary layout.
        gguf_norm_offset: what GGUF files have added to every norm weight.
    """

    name: str
    model_types: tuple[str, ...]
    config: Callable[[ConfigSource], ModelConfig]
    gguf_architectures: tuple[str, ...] = ()
    gguf_config: Callable[[ConfigSource, str], ModelConfig] | None = None
    hf_layer: Mapping[str, str] = field(default_factory=lambda: HF_LAYER)
    gguf_layer: Mapping[str, str] = field(default_factory=lambda: GGUF_LAYER)
    gguf_permuted: bool = False
    gguf_norm_offset: float = 0.0


def canonical_names(config: ModelConfig) -> list[str]:
    """Every weight of the model in canonical names; the head only where it is not tied."""
    names = ["embed.weight"]
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        names.append(prefix + "attention_norm.weight")
        for part in ("qkv.q_proj", "qkv.k_proj", "qkv.v_proj", "o_proj"):
            names.append(f"{prefix}attention.{part}.weight")
            if config.output_bias if part == "o_proj" else config.qkv_bias:
                names.append(f"{prefix}attention.{part}.bias")
        if config.qk_norm:
            names += [f"{prefix}attention.q_norm.weight", f"{prefix}attention.k_norm.weight"]
        if config.norm_placement == "sandwich":
            names.append(prefix + "attention_post_norm.weight")
        names.append(prefix + "mlp_norm.weight")
        names += [prefix + name for name in _mlp_names(config, layer)]
        if config.norm_placement == "sandwich":
            names.append(prefix + "mlp_post_norm.weight")
    names.append("norm.weight")
    if not config.tie_word_embeddings:
        names.append("lm_head.weight")
    return names


def _mlp_names(config: ModelConfig, layer: int) -> list[str]:
    moe = config.moe_of(layer)
    parts = [""] if moe is None else [f"experts.{number}." for number in range(moe.num_experts)]
    kinds = ("weight", "bias") if config.mlp_bias else ("weight",)
    names = [
        f"mlp.{part}{name}.{kind}" for part in parts for name in ("gate_proj", "up_proj", "down_proj") for kind in kinds
    ]
    return names if moe is None else ["mlp.router.weight", *names]


def canonical_shape(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Shape of a weight by its canonical name."""
    part, kind = name.rsplit(".", 1)
    part = part.rsplit(".", 1)[-1]
    hidden, head = config.hidden_size, config.head_dim
    width = config.expert_size if ".experts." in name else config.intermediate_size
    q, kv = config.num_heads * head, config.num_kv_heads * head
    shapes = {
        "embed": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "q_norm": (head,),
        "k_norm": (head,),
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
        "router": (0 if config.moe is None else config.moe.num_experts, hidden),
    }
    shape: tuple[int, ...] = shapes.get(part, (hidden,))
    return shape[:1] if kind == "bias" else shape


def hf_name(family: Family, name: str) -> str:
    """A canonical name in the names of transformers' model of the family."""
    return _foreign(name, "model.", {**HF_MODEL, "lm_head": "lm_head"}, "model.layers.", family.hf_layer)


def gguf_name(family: Family, name: str) -> str:
    """A canonical name in the names of a GGUF."""
    return _foreign(name, "", GGUF_MODEL, "blk.", family.gguf_layer)


def _foreign(name: str, prefix: str, model: Mapping[str, str], layers: str, layer: Mapping[str, str]) -> str:
    part, kind = name.rsplit(".", 1)
    if part.startswith("layers."):
        _, index, part = part.split(".", 2)
        expert = _EXPERT.search(part)
        if expert is None:
            return f"{layers}{index}.{layer[part]}.{kind}"
        theirs = layer[_EXPERT.sub(".*.", part)].replace("*", expert[1])
        return f"{layers}{index}.{theirs}.{kind}"
    return f"{'' if part == 'lm_head' else prefix}{model[part]}.{kind}"
