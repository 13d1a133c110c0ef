"""GGUF files of every architecture, written from transformers' models as llama.cpp's converter writes them."""

import gguf
import numpy as np
import pytest
import torch

from atb_modules.models.loading import load_inference_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path, model, family, matrix_type):
    """The file; matrices are stored in `matrix_type`, vectors in float32. Returns what the file holds."""
    config = model.config
    names = GEMMA_NAMES if family == "gemma3" else NAMES
    arch = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_rope_freq_base(1e6 if family == "gemma3" else 10000.0)
    if family in ("gemma3", "mistral"):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            part, kind = key.rsplit(".", 1)
            prefix = ""
            if part.startswith("model.layers."):
                _, _, index, part = part.split(".", 3)
                prefix = f"blk.{index}."
            data = parameter.numpy()
            if data.ndim == 2:
                stored = gguf.quants.quantize(data, matrix_type)
                # The model is compared with what the file can hold.
                parameter.copy_(torch.from_numpy(np.array(gguf.quants.dequantize(stored, matrix_type))))
                data = parameter.numpy()
            if arch == "llama" and part in heads:
                data = data.reshape(heads[part], 2, -1, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
            if family == "gemma3" and part.endswith("norm"):
                data = data + 1
            data = np.ascontiguousarray(data)
            if data.ndim == 2:
                writer.add_tensor(
                    f"{prefix}{names[part]}.{kind}", gguf.quants.quantize(data, matrix_type), raw_dtype=matrix_type
                )
            else:
                writer.add_tensor(f"{prefix}{names[part]}.{kind}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_logits_equal(build_tiny_model, tmp_path, family, kind):
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    # A GGUF has no switch for Qwen2's window, and Gemma's scale follows from its head size.
    own = {"qwen2": {"use_sliding_window": False}, "gemma3": {"query_pre_attn_scalar": 16}}
    model = build_tiny_model(family, **sizes, **own.get(family, {}))
    path = tmp_path / "model.gguf"
    write_gguf(path, model, family, gguf.GGMLQuantizationType[kind])
    ids = torch.randint(3, 97, (2, 33), generator=torch.Generator().manual_seed(5))
    expected = model(ids).logits.detach()
    assert expected.std() > 0.3
    ours = load_inference_model(path)
    torch.testing.assert_close(ours(ids).logits, expected, atol=1e-4, rtol=0)
    assert (
        ours.generate(ids, 12, eos_token_ids=[]).tolist()
        == (
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
            )
        ).tolist()
    )
