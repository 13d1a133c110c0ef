"""transformers' models with attn_implementation="atb" against their own SDPA path: a forward of every family."""

from __future__ import annotations

import copy

import torch
import transformers

from atb_modules.integrations.transformers import register
from benchmarks.timing import Row, interleave, row

TOKENS, PICTURES = 2048, 4
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
}
HALVES = ["sliding_attention", "full_attention"]
VISION = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 6}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
#: family -> config class and what differs from SIZES or VISION
TEXT = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 1024}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 64}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 64, "sliding_window": 512, "attn_logit_softcapping": None}),
    "gemma3": (transformers.Gemma3TextConfig, {"head_dim": 64, "sliding_window": 512, "layer_types": HALVES}),
    "llama4": (
        transformers.Llama4TextConfig,
        {"head_dim": 64, "intermediate_size_mlp": 1408, "attention_chunk_size": 512, "num_local_experts": 2},
    ),
    "gpt_oss": (transformers.GptOssConfig, {"head_dim": 64, "sliding_window": 128, "layer_types": HALVES} | EXPERTS),
    "phi3": (transformers.Phi3Config, {"sliding_window": 1024}),
    "cohere2": (transformers.Cohere2Config, {"sliding_window": 512, "layer_types": HALVES}),
    "olmo2": (transformers.Olmo2Config, {}),
    "bert": (transformers.BertConfig, {"is_decoder": False}),
}
PICTURE = {
    "vit": (transformers.ViTConfig, transformers.AutoModel, {}),
    "siglip": (transformers.SiglipVisionConfig, transformers.SiglipVisionModel, {}),
    "clip": (transformers.CLIPVisionConfig, transformers.CLIPVisionModel, {}),
}


@torch.inference_mode()
def rows() -> list[Row]:
    """All families, and Mistral's window over a long prompt."""
    register()
    found = []
    for family, (config_class, own) in TEXT.items():
        ids = torch.randint(3, SIZES["vocab_size"], (1, TOKENS))
        found.append(_compare(family, transformers.AutoModel, config_class(**{**SIZES, **own}), {"input_ids": ids}))
    for family, (config_class, model_class, own) in PICTURE.items():
        pixels = torch.randn(PICTURES, 3, 224, 224)
        config = config_class(**{**VISION, "image_size": 224, "patch_size": 16, **own})
        found.append(_compare(family, model_class, config, {"pixel_values": pixels}))
    ids = torch.randint(3, SIZES["vocab_size"], (1, 8192))
    config = transformers.MistralConfig(**{**SIZES, "sliding_window": 1024})
    found.append(_compare("mistral, window 1,024", transformers.AutoModel, config, {"input_ids": ids}, ">= 2"))
    return found


def _compare(family: str, model_class: type, config, inputs: dict, goal: str = ">= 1.0") -> Row:
    make = getattr(model_class, "from_config", None) or model_class._from_config
    try:
        theirs, peer = make(config, attn_implementation="sdpa").eval(), "their SDPA"
    except ValueError:  # gpt-oss: sinks
        theirs, peer = make(config, attn_implementation="eager").eval(), "their eager"
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation("atb")
    times = interleave({"ours": lambda: ours(**inputs), peer: lambda: theirs(**inputs)}, 9)
    size = f"{inputs['input_ids'].shape[1]} tokens" if "input_ids" in inputs else f"{PICTURES} pictures"
    return row(f"transformers {family}, {size}", times, peer, goal)
