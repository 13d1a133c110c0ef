"""Small checkpoints written file by file: a config.json and random tensors, or a GGUF made with the gguf
package.
"""

import json
import math

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

SIZES = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def llama_tensors(config, seed=0):
    """Random weights in transformers' names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    q, kv = heads * head_dim, kv_heads * head_dim

    def draw(*shape):
        return torch.randn(*shape, generator=generator) * (0.2 if len(shape) > 1 else 1.0)

    tensors = {"model.embed_tokens.weight": draw(vocab, hidden), "model.norm.weight": draw(hidden)}
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }
        for part, shape in parts.items():
            tensors[f"model.layers.{layer}.{part}.weight"] = draw(*shape)
            biased = config["model_type"] == "qwen2" and part[-6:] in ("q_proj", "k_proj", "v_proj")
            biased |= config.get("attention_bias", False) and "self_attn" in part
            biased |= config.get("mlp_bias", False) and "mlp" in part
            if biased:
                tensors[f"model.layers.{layer}.{part}.bias"] = draw(shape[0])
    if not config.get("tie_word_embeddings", False):
        tensors["lm_head.weight"] = draw(vocab, hidden)
    return tensors


def reference_logits(config, tensors, ids, inv_freq=None, attention_factor=1.0, windows=None):
    """A Llama in float64, written from the paper's formulas; `windows` are keys to the left that a query
    sees.
    """
    w = {name: tensor.double() for name, tensor in tensors.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    base = config.get("rope_theta", 10000.0)
    if inv_freq is None:
        inv_freq = torch.tensor([base ** (-2 * i / head_dim) for i in range(head_dim // 2)]).double()
    length = len(ids)
    angles = torch.arange(length).double()[:, None] * inv_freq
    cos, sin = (f.repeat(1, 2) * attention_factor for f in (angles.cos(), angles.sin()))

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * weight

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(())).double()

    def turn(x):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    x = w["model.embed_tokens.weight"][ids]
    age = torch.arange(length)[:, None] - torch.arange(length)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        h = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (linear(h, f"{p}self_attn.{n}_proj").reshape(length, -1, head_dim).transpose(0, 1) for n in "qkv")
        k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
        scores = turn(q) @ turn(k).transpose(1, 2) / math.sqrt(head_dim)
        seen = age >= 0
        if windows is not None and windows[layer] is not None:
            seen &= age <= windows[layer]
        scores = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        x = x + linear((scores @ v).transpose(0, 1).reshape(length, -1), p + "self_attn.o_proj")
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        gated = torch.nn.functional.silu(linear(h, p + "mlp.gate_proj")) * linear(h, p + "mlp.up_proj")
        x = x + linear(gated, p + "mlp.down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, w["model.norm.weight"]) @ head.T


@pytest.fixture
def write_checkpoint(tmp_path):
    """write(config changes, tensors=None) -> (directory, whole config, tensors)"""

    def write(changes=None, tensors=None, name="model", generation=None):
        config = {**SIZES, **(changes or {})}
        config = {key: value for key, value in config.items() if value is not ...}
        tensors = llama_tensors(config) if tensors is None else tensors
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        save_file(tensors, directory / "model.safetensors")
        return directory, config, tensors

    return write


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weight, heads):
    """Rows of a q or k weight in the order in which llama.cpp's converter writes them."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def write_gguf(tmp_path):
    """write(config, tensors, extra tensors=None, extra metadata=None) -> path of a float32 llama GGUF"""

    def write(config, tensors, extra=None, metadata=None, name="model.gguf"):
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        for key, value in (metadata or {}).items():
            writer.add_uint32(key, value)
        for key, tensor in tensors.items():
            part, kind = key.rsplit(".", 1)
            prefix = ""
            if part.startswith("model.layers."):
                _, _, index, part = part.split(".", 3)
                prefix = f"blk.{index}."
            data = tensor.numpy()
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                key_heads = "num_attention_heads" if "q_proj" in part else "num_key_value_heads"
                data = interleaved(data, config[key_heads])
            writer.add_tensor(f"{prefix}{GGUF_NAMES[part]}.{kind}", np.ascontiguousarray(data))
        for key, data in (extra or {}).items():
            writer.add_tensor(key, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def sizes():
    return dict(SIZES)


@pytest.fixture(scope="session")
def make_tensors():
    return llama_tensors


@pytest.fixture(scope="session")
def logits64():
    return reference_logits
