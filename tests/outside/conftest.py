"""Small random models, as transformers builds and saves them: the families that we load, and others."""

import pytest
import torch
import transformers


def tiny_config(family, **changes):
    """A transformers config of a few thousand weights; `changes` override it."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    own = {
        "llama": {},
        "mistral": {"sliding_window": 9, "head_dim": 16},
        "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
        "qwen3": {"head_dim": 16},
        "mixtral": {"sliding_window": 9, "num_local_experts": 5, "num_experts_per_tok": 2},
        "qwen3_moe": {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        "gemma3": {
            "head_dim": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
        },
        "gemma2": {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9},
        "llama4_text": {
            "head_dim": 16,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
        "gpt_oss": {"head_dim": 16, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        "phi3": {"sliding_window": 8},
        "cohere2": {"sliding_window": 8, "logit_scale": 1.0},
        "olmo2": {},
    }
    classes = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mixtral": transformers.MixtralConfig,
        "qwen3_moe": transformers.Qwen3MoeConfig,
        "gemma3": transformers.Gemma3TextConfig,
        "gemma2": transformers.Gemma2Config,
        "llama4_text": transformers.Llama4TextConfig,
        "gpt_oss": transformers.GptOssConfig,
        "phi3": transformers.Phi3Config,
        "cohere2": transformers.Cohere2Config,
        "olmo2": transformers.Olmo2Config,
    }
    return classes[family](**{**sizes, **own[family], **changes})


def tiny_model(family, seed=0, **changes):
    """A transformers model with weights large enough that every part of it shows in the logits."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        tiny_config(family, **changes), attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.15)
    return model.eval()


@pytest.fixture(scope="session")
def build_tiny_model():
    return tiny_model
