"""Latent attention against DeepSeek-V2's and V3's of transformers, with their weights: outputs, gradients, caches."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from atb_modules import KVCacheManager, LatentAttention, LatentConfig, RotaryConfig, RotaryScaling

SIZES = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 32.0, "beta_slow": 1.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@pytest.fixture(params=[(v, q, r) for v in ("v2", "v3") for q in (None, 20) for r in ("plain", "yarn")], ids=str)
def pair(request):
    """(their attention, its rotary module, ours with the same weights)"""
    version, q_lora_rank, rope = request.param
    parameters = YARN if rope == "yarn" else PLAIN
    config = (transformers.DeepseekV2Config if version == "v2" else transformers.DeepseekV3Config)(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=q_lora_rank, attention_bias=True,
        max_position_embeddings=128, rope_parameters=dict(parameters), attn_implementation="eager", **SIZES,
    )  # fmt: skip
    module = v2 if version == "v2" else v3
    kind = "DeepseekV2" if version == "v2" else "DeepseekV3"
    theirs = getattr(module, f"{kind}Attention")(config, 0).eval()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    scaling = None
    if rope == "yarn":
        scaling = RotaryScaling("yarn", factor=4.0, original_max_positions=32, mscale=1.0, mscale_all_dim=0.707)
    rotary = RotaryConfig(base=parameters["rope_theta"], layout="interleaved", scaling=scaling)
    ours = LatentAttention(48, 4, q_lora_rank=q_lora_rank, rotary=rotary, config=LatentConfig(bias=True), **SIZES)
    ours.load_state_dict(theirs.state_dict())
    return theirs, getattr(module, f"{kind}RotaryEmbedding")(config), ours


def attend(theirs, rotary, x):
    length = x.shape[1]
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    tables = rotary(x, torch.arange(length)[None])
    return theirs(x, attention_mask=mask, position_embeddings=tables)[0]


def test_outputs_and_gradients_equal(pair):
    theirs, rotary, ours = pair
    x = torch.randn(2, 13, 48)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    expected, out = attend(theirs, rotary, leaves[0]), ours(leaves[1])
    assert expected.std() > 0.2
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (out * weight).sum().backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad, atol=1e-4, rtol=1e-4)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert set(gradients) == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-4, rtol=1e-4, msg=name)


def test_decoding_equals_their_prefill(pair):
    theirs, rotary, ours = pair
    x = torch.randn(2, 13, 48)
    with torch.no_grad():
        expected = attend(theirs, rotary, x)
    cache = KVCacheManager(32, 4, 1, 4, ours.head_dim, torch.float32, num_kv_heads=1, num_pages=20)
    pieces = [ours(part, kv_cache=cache) for part in x.split([4, 1, 1, 1, 3, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-5, rtol=1e-5)
