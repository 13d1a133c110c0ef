"""What users type, the way they would paste it: building blocks, functions, caches; and what does not exist yet."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import atb_modules as atb


def test_transformer_layer():
    from atb_modules import TransformerLayer

    layer = TransformerLayer(64, 4, 16, 128, num_kv_heads=2, layernorm_type="rmsnorm", attention_type="flash")
    x = torch.randn(2, 10, 64)
    assert layer(x).shape == x.shape
    layer = TransformerLayer(
        hidden_size=64, num_heads=4, head_dim=16, intermediate_size=128, mlp_type="swiglu", norm_placement="sandwich",
        mode="inference", norm=atb.NormConfig(eps=1e-5), mlp=atb.MLPConfig(bias=True), rotary=atb.RotaryConfig(),
    )  # fmt: skip
    hidden_states, cache = layer(x, use_cache=True)
    assert hidden_states.shape == x.shape and isinstance(cache, atb.KVCacheManager)


@pytest.mark.parametrize("word", ["flash", "sdpa", "eager", "reference"])
def test_attention_types_agree(word):
    torch.manual_seed(0)
    layer = atb.TransformerLayer(64, 4, num_kv_heads=2, attention_type=word, rotary=atb.RotaryConfig())
    torch.manual_seed(0)
    reference = atb.TransformerLayer(64, 4, num_kv_heads=2, attention_type="reference", rotary=atb.RotaryConfig())
    x = torch.randn(2, 10, 64)
    torch.testing.assert_close(layer(x), reference(x), atol=1e-5, rtol=1e-5)


def test_sparse_layer():
    from atb_modules import SparseConfig, TransformerLayer

    x = torch.randn(1, 50, 64)
    sparse_config = {"mode": "sliding_window", "window_size": 8, "global_tokens": 2}
    layer = TransformerLayer(64, 4, 16, 128, attention_type="flash_sparse", sparse_config=sparse_config)
    same = TransformerLayer(64, 4, 16, 128, attention_type="flash", sparse_config=SparseConfig(**sparse_config))
    same.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), same(x))
    out, lse = atb.ops.attention(
        torch.randn(50, 4, 16),
        torch.randn(50, 2, 16),
        torch.randn(50, 2, 16),
        atb.AttentionSpec(causal=True),
        cu_seqlens_q=torch.tensor([0, 20, 50], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 20, 50], dtype=torch.int32),
        return_lse=True,
    )
    assert out.shape == (50, 4, 16) and lse.shape == (4, 50)


def test_attention_from_projections():
    q_proj, k_proj, v_proj, o_proj = (torch.nn.Linear(32, 32) for _ in range(4))
    attention = atb.Attention.from_projections(q_proj, k_proj, v_proj, o_proj, num_heads=4)
    cache = atb.KVCacheManager(64, 16, 1, 4, 8, torch.float32)
    x = torch.randn(1, 6, 32)
    dense = attention(hidden_states=x)
    cached = attention(hidden_states=x, attention_mask=None, kv_cache=cache)
    torch.testing.assert_close(cached, dense, atol=1e-5, rtol=1e-5)
    assert attention.qkv.q_proj is q_proj


def test_kv_cache_manager():
    cache = atb.KVCacheManager(
        max_seq_len=100, page_size=16, num_layers=2, num_heads=4, head_dim=8, dtype=torch.float32
    )
    assert cache.num_kv_heads == 4
    cache.begin(1)
    step = cache.step(100)
    for layer in range(2):
        cache.append(step, layer, torch.randn(100, 4, 8), torch.randn(100, 4, 8))
    with pytest.raises((ValueError, atb.OutOfPagesError), match="100"):
        cache.step(1)
    assert cache.lengths == (100,)
    cache.reset()
    assert cache.memory_stats().bytes_used == 0


def test_functions():
    x, w, bias = torch.randn(2, 5, 16), torch.randn(16, 24), torch.randn(24)
    torch.testing.assert_close(atb.fused_layernorm_matmul(x, w, bias), F.layer_norm(x, (16,)) @ w + bias)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) @ w
    torch.testing.assert_close(atb.fused_rmsnorm_matmul(x, w), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(atb.silu_matmul(x, w), F.silu(x) @ w, atol=1e-5, rtol=1e-5)
    gate_w, up_w, down_w = torch.randn(16, 24), torch.randn(16, 24), torch.randn(24, 16)
    expected = (F.silu(x @ gate_w) * (x @ up_w)) @ down_w
    torch.testing.assert_close(atb.fused_mlp(x, gate_w, up_w, down_w), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(atb.matmul(x, w), x @ w, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(atb.matmul(x, w.t().contiguous(), trans_b=True), x @ w, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(atb.matmul(x, x, trans_b=True), x @ x.mT)
    torch.testing.assert_close(atb.softmax(x, axis=1), x.softmax(1))
    assert torch.equal(atb.softmax(torch.full((2, 3), float("-inf"))), torch.zeros(2, 3))


def test_fused_attention_between_split_and_merged_heads():
    qkv = torch.randn(2, 7, 3 * 32)
    q, k, v = atb.split_heads(qkv, num_heads=4)
    assert q.shape == k.shape == v.shape == (2, 4, 7, 8)
    out = atb.fused_attention(q, k, v, scale=0.25)
    expected = torch.softmax(0.25 * q @ k.mT, -1) @ v
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(atb.fused_attention(q, k.mT, v, 0.25, k_layout="bhds"), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(atb.fused_attention(q, k, v, inv_scale=4.0), expected, atol=1e-5, rtol=1e-5)
    merged = atb.merge_heads(out, num_heads=4)
    assert torch.equal(merged, out.transpose(1, 2).reshape(2, 7, 32))


@pytest.mark.parametrize("mode", ["text_see_vision", "vision_see_text", "both", "none"])
@pytest.mark.parametrize("strategy", ["auto", "three_call", "prefix", "unified"])
def test_multimodal_attention_as_its_users_type_it(mode, strategy):
    try:
        mma = atb.MultiModalAttention(36, 48, 4, 16, cross_attention_mode=mode, strategy=strategy)
        vision, text = mma(torch.randn(2, 36, 64), torch.randn(2, 48, 64))
    except ValueError as error:  # a form that a mode has not is refused by name
        assert strategy == "prefix" and mode != "text_see_vision" and "prefix" in str(error)
        return
    assert vision.shape == (2, 36, 64) and text.shape == (2, 48, 64)
    fewer = mma(torch.randn(2, 9, 64), torch.randn(2, 5, 64))
    assert fewer[0].shape == (2, 9, 64) and fewer[1].shape == (2, 5, 64)


def test_functions_differentiate():
    x = torch.randn(2, 5, 16, requires_grad=True)
    w = torch.randn(16, 48, requires_grad=True)
    q, k, v = atb.split_heads(atb.fused_rmsnorm_matmul(x, w), num_heads=2)
    atb.merge_heads(atb.fused_attention(q, k, v, causal=True), num_heads=2).square().sum().backward()
    assert x.grad.abs().sum() > 0 and w.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: atb.fused_attention(q, q, q, 0.5, inv_scale=2.0), "scale is 0.5 and inv_scale 2.0"),
        (lambda q: atb.fused_attention(q, q, q, inv_scale=0.0), "inv_scale is 0"),
        (lambda q: atb.fused_attention(q, q, q, k_layout="bshd"), "k_layout is 'bshd'; allowed: bhsd, bhds"),
        (lambda q: atb.split_heads(q, 2), "qkv has shape"),
        (lambda q: atb.merge_heads(q, 3), "allowed: \\(batch, 3, seq, head_dim\\)"),
        (lambda q: atb.matmul(q, torch.randn(5, 5)), "a has shape .*, 8 features; b of shape .* takes 5"),
        (lambda q: atb.explain("nothing"), "op is 'nothing'; allowed: attention"),
    ],
)
def test_functions_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(1, 2, 3, 8))


@pytest.mark.parametrize("what", [None, 3, torch.zeros(2)])
def test_only_names_and_callables_are_explained(what):
    with pytest.raises(TypeError, match="what is .*; allowed: an op's name, a module or a function"):
        atb.explain(what, torch.zeros(2))


def test_every_public_name_is_there_and_those_of_later_releases_are_not():
    for name in atb.__all__:
        assert getattr(atb, name) is not None
    for name in ("SequenceParallel", "OptimizationConfig", "Profiler", "LlamaRunner"):
        assert not hasattr(atb, name)


def test_importing_the_package_imports_neither_transformers_nor_timm():
    code = (
        "import sys, time, torch; start = time.perf_counter(); import atb_modules; "
        "assert not {'transformers', 'timm', 'gguf', 'torch_npu'} & set(sys.modules); "
        "print(time.perf_counter() - start)"
    )
    seconds = min(
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(2)
    )
    assert seconds < 2.0  # half a second on an idle machine; this guards against a heavy import, not against noise


def test_optimised_models_of_other_libraries():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
    x = torch.randn(1, 3, 32, 32)
    before = model(x)
    torch.testing.assert_close(atb.apply_optimizations(model)(x), before, atol=1e-4, rtol=1e-4)
    assert torch.equal(atb.restore(model)(x), before)
