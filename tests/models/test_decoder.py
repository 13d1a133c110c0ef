"""DecoderModel as a module: what users of PyTorch and transformers take for granted, and its errors."""

import copy
import subprocess
import sys

import pytest
import torch

from atb_modules.attention import KVCacheManager
from atb_modules.attention.rope import RotaryConfig
from atb_modules.models.config import InferenceConfig, ModelConfig
from atb_modules.models.decoder import DecoderModel
from atb_modules.models.loading import load_inference_model, load_model


def build(mode="train", seed=0, **changes):
    sizes = {
        "family": "llama",
        "vocab_size": 53,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "windows": (None, 5),
        "rotary": (RotaryConfig(),) * 2,
        "max_positions": 128,
    }
    torch.manual_seed(seed)
    return DecoderModel(ModelConfig(**{**sizes, **changes}), mode=mode)


IDS = torch.randint(0, 53, (3, 14), generator=torch.Generator().manual_seed(2))


def test_training_learns():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


def test_labels_can_be_ignored():
    model = build()
    labels = IDS.clone()
    labels[:, 5:] = -100
    loss = model(IDS, labels=labels).loss
    torch.testing.assert_close(loss, model(IDS[:, :5], labels=IDS[:, :5]).loss)


def test_inference_records_nothing():
    model = build("inference")
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert not model(IDS).logits.requires_grad


def test_copies_are_apart_and_stay_tied():
    model = build(tie_word_embeddings=True)
    twin = copy.deepcopy(model)
    assert twin.lm_head.weight is twin.embed.weight
    with torch.no_grad():
        twin.embed.weight.zero_()
    assert model(IDS).logits.abs().max() > 0
    assert twin(IDS).logits.abs().max() == 0
    other = build(seed=1, tie_word_embeddings=True)
    state = model.state_dict()
    del state["lm_head.weight"]
    other.load_state_dict(state)
    assert torch.equal(other(IDS).logits, model(IDS).logits)


def test_state_dict_holds_parameters_alone():
    model = build()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert not list(model.buffers())


def test_meta_build_equals_normal_build():
    model = build()
    with torch.device("meta"):
        empty = DecoderModel(model.config)
    empty.to_empty(device="cpu")
    empty.tie_weights()
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty(IDS).logits, model(IDS).logits)


def test_cache_equals_no_cache_and_serves_ragged_steps():
    model = build("inference")
    expected = model(IDS).logits
    cache = model.new_cache(64, page_size=4, num_pages=40)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 6:] = mask[2, :4] = 0
    first = IDS[:, :9].clone()
    first[2, 4:] = IDS[2, :5]
    logits = model(first, attention_mask=mask, past_key_values=cache).logits
    assert cache.lengths == (9, 6, 5)
    torch.testing.assert_close(logits[0], expected[0, :9], atol=1e-5, rtol=0)
    torch.testing.assert_close(logits[1, :6], expected[1, :6], atol=1e-5, rtol=0)
    torch.testing.assert_close(logits[2, 4:], expected[2, :5], atol=1e-5, rtol=0)
    assert logits[1, 6:].abs().max() == 0 and logits[2, :4].abs().max() == 0
    second = torch.stack([IDS[0, 9:12], IDS[1, 6:9], IDS[2, 5:8]])
    logits = model(second, past_key_values=cache).logits
    for row, begin in enumerate((9, 6, 5)):
        torch.testing.assert_close(logits[row], expected[row, begin : begin + 3], atol=1e-5, rtol=0)


def test_explicit_positions():
    model = build("inference")
    shifted = torch.arange(40, 54).expand(3, 14)
    torch.testing.assert_close(model(IDS, position_ids=shifted).logits, model(IDS).logits, atol=1e-5, rtol=0)
    gaps = torch.arange(14).mul(3).expand(3, 14)
    expected = model(IDS, position_ids=gaps).logits
    assert (expected - model(IDS).logits).abs().max() > 1e-4
    cache = model.new_cache(64, num_pages=4)
    cached = model(IDS, position_ids=gaps, past_key_values=cache).logits
    torch.testing.assert_close(cached, expected, atol=1e-5, rtol=0)


def test_compiles_without_a_break():
    model = build()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = compiled(IDS, labels=IDS)
    output.loss.backward()
    gradient = model.embed.weight.grad.clone()
    model.zero_grad()
    expected = model(IDS, labels=IDS)
    expected.loss.backward()
    torch.testing.assert_close(output.logits, expected.logits, atol=1e-6, rtol=0)
    torch.testing.assert_close(gradient, model.embed.weight.grad, atol=1e-6, rtol=0)


def test_exports():
    model = build("inference")
    program = torch.export.export(model, (IDS,))
    torch.testing.assert_close(program.module()(IDS).logits, model(IDS).logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m([1, 2]), TypeError, "input_ids must be a Tensor, got list"),
        (lambda m: m(IDS[0]), ValueError, r"input_ids must be int64 or int32 \(batch, seq\)"),
        (lambda m: m(IDS.float()), ValueError, r"got torch.float32 \(3, 14\)"),
        (lambda m: m(IDS + 50), ValueError, r"input_ids has ids from \d+ to \d+; vocab_size is 53"),
        (lambda m: m(IDS, attention_mask=IDS[:2]), ValueError, r"attention_mask has shape \(2, 14\)"),
        (lambda m: m(IDS, labels=IDS[:2]), ValueError, r"labels has shape \(2, 14\)"),
        (lambda m: m(IDS, use_cache=True), TypeError, "use_cache"),
        (
            lambda m: m(IDS, past_key_values=m.new_cache(10, num_pages=9)),
            ValueError,
            "cannot take 14 more: positions go up to max_seq_len=10",
        ),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call(build("inference"))


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (torch.arange(115, 129), ValueError, "position_ids has positions from 115 to 128; allowed: 0 to .* = 127"),
        (torch.arange(-1, 13), ValueError, "position_ids has positions from -1 to 12; allowed: 0 to"),
        (torch.arange(14.0), ValueError, "position_ids is torch.float32; allowed: int64, int32"),
        (torch.arange(13), ValueError, r"position_ids has shape \(13,\); input_ids has \(3, 14\)"),
        (list(range(14)), TypeError, "position_ids must be a Tensor, got list"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_positions_are_checked(positions, error, message, cached):
    model = build("inference")
    cache = model.new_cache(64, num_pages=9) if cached else None
    with pytest.raises(error, match=message):
        model(IDS, position_ids=positions, past_key_values=cache)
    if cached:
        assert cache.batch_size == 0
    mask = torch.ones_like(IDS)
    mask[:, :1] = 0
    padded = torch.arange(-1, 13).expand(3, 14)
    assert model(IDS, mask, padded, past_key_values=cache).logits.isfinite().all()


def test_input_past_the_positions():
    model = build()
    ids = torch.zeros(1, 129, dtype=torch.long)
    with pytest.raises(ValueError, match="input_ids has 129 tokens a row; max_positions is 128"):
        model(ids)
    assert model(ids[:, :128]).logits.shape == (1, 128, 53)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "has 3 layers; the model has 2"),
        ({"num_kv_heads": 4}, "has 4 key and value heads; the model has 2"),
        ({"head_dim": 16}, "has 16 channels a head; the model has 8"),
        ({"window": 4}, "has window 4 in layer 0; the model has None there"),
        ({"window": (None, 4)}, "has window 4 in layer 1; the model has 5 there"),
    ],
)
def test_a_cache_must_fit(changes, message):
    model = build("inference")
    shape = {"num_layers": 2, "head_dim": 8, "num_kv_heads": 2, "num_pages": 40, **changes}
    cache = KVCacheManager(64, 4, num_heads=4, dtype=torch.float32, **shape)
    with pytest.raises(ValueError, match=f"past_key_values {message}"):
        model(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match=f"cache {message}"):
        model.generate([1, 2], 3, cache=cache)
    assert cache.batch_size == 0
    with pytest.raises(TypeError, match="past_key_values must be a KVCacheManager, got tuple"):
        model(IDS, past_key_values=())
    wide = KVCacheManager(64, 4, 2, 4, 8, torch.float32, num_kv_heads=2, num_pages=40, window=(None, 6))
    assert model.generate([1, 2], 3, cache=wide) == model.generate([1, 2], 3)


class _Refused(Exception):
    pass


def test_a_refused_call_leaves_the_cache_as_it_was():
    model = build("inference")
    expected = model(IDS).logits
    cache = model.new_cache(64, page_size=4, num_pages=40)

    def refuse(*_):
        raise _Refused

    def refused(ids):
        handle = model.layers[1].register_forward_hook(refuse)
        with pytest.raises(_Refused):
            model(ids, past_key_values=cache)
        handle.remove()

    refused(IDS)
    assert cache.batch_size == 0
    model(IDS[:, :9], past_key_values=cache)
    refused(IDS[:, 9:])
    assert cache.lengths == (9, 9, 9)
    logits = model(IDS[:, 9:], past_key_values=cache).logits
    torch.testing.assert_close(logits, expected[:, 9:], atol=1e-5, rtol=0)


def test_a_refused_call_of_a_layer_leaves_its_cache_as_it_was():
    layer = build("inference").layers[0]
    attention = layer.attention
    x = torch.randn(2, 6, 32)
    other = KVCacheManager(64, 4, 2, 4, 16, torch.float32, num_pages=40)
    with pytest.raises(ValueError, match="kv_cache has 4 kv heads of 16 channels; this attention has 2 of 8"):
        layer(x, cache=other)
    assert other.batch_size == 0
    cache = KVCacheManager(64, 4, 2, 4, 8, torch.float32, num_kv_heads=2, num_pages=40)
    layer(x[:, :4], cache=cache)
    handle = attention.o_proj.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(_Refused))
    with pytest.raises(_Refused):
        layer(x[:, 4:], cache=cache)
    handle.remove()
    assert cache.lengths == (4, 4)
    torch.testing.assert_close(layer(x[:, 4:], cache=cache), layer(x)[:, 4:], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads is 4, which num_kv_heads 3 does not divide"),
        ({"windows": (None,)}, "windows has 1 entries; num_layers is 2"),
        ({"vocab_size": 0}, "vocab_size is 0; allowed: a positive int"),
        ({"norm_placement": "pree"}, "norm_placement is 'pree'; allowed"),
        ({"mlp_type": "relu9"}, "mlp_type is 'relu9'; allowed"),
    ],
)
def test_configurations_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("enable_inference_fusion", "yes", TypeError),
        ("prefill_chunk_size", 0, ValueError),
        ("page_size", None, ValueError),
        ("dtype", torch.int8, ValueError),
    ],
)
def test_inference_options_are_checked_when_used(tmp_path, name, value, error):
    config = InferenceConfig()
    setattr(config, name, value)
    with pytest.raises(error, match=f"{name} is "):
        config.validate()


def test_options_of_another_kind(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "none")
    with pytest.raises(TypeError, match="config must be an InferenceConfig, got dict"):
        load_inference_model(tmp_path, {"page_size": 4})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"config": {"vocab_size": 53}}, TypeError, r"config is {'vocab_size': 53} \(dict\); allowed: ModelConfig"),
        ({"config": ModelConfig}, TypeError, r"config is .*ModelConfig.* \(type\); allowed: ModelConfig"),
        ({"config": None}, TypeError, "config is None"),
        ({"dtype": "float32"}, TypeError, r"dtype is 'float32' \(str\)"),
        ({"dtype": torch.int64}, ValueError, "dtype is torch.int64"),
        ({"mode": "eval"}, ValueError, "mode is 'eval'; allowed: 'train', 'inference'"),
        ({"mode": {}}, ValueError, "mode is {}; allowed: 'train', 'inference'"),
        ({"attention_type": "fast"}, ValueError, "attention_type is 'fast'; allowed: 'flash'"),
    ],
)
def test_arguments_of_the_model_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        DecoderModel(**{"config": build().config, **options})


SIZE_CHECK = """
import json, sys
import torch
from safetensors.torch import save_file
from atb_modules.convert.family import canonical_names, canonical_shape, hf_name
from atb_modules.convert.families import FAMILIES
from atb_modules.convert.llama import llama_config
from atb_modules.convert.source import ConfigSource
from atb_modules.models.config import InferenceConfig
from atb_modules.models.loading import load_inference_model

def status(key):
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(key)).split()[1]) / 1024

directory, step = sys.argv[1], sys.argv[2]
values = {"model_type": "llama", "vocab_size": 30000, "hidden_size": 1024, "intermediate_size": 2816,
          "num_hidden_layers": 3, "num_attention_heads": 16, "rms_norm_eps": 1e-5}
if step == "write":
    config = llama_config(ConfigSource(values, ""))
    names = [(hf_name(FAMILIES["llama"], n), canonical_shape(config, n)) for n in canonical_names(config)]
    save_file({n: torch.zeros(s) for n, s in names}, directory + "/model.safetensors")
    open(directory + "/config.json", "w").write(json.dumps(values))
else:
    before = status("VmRSS")
    model = load_inference_model(directory, InferenceConfig(dtype=getattr(torch, step)))
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    print((status("VmHWM") - before) / weights, weights)
"""


def test_loading_needs_little_more_than_the_weights(tmp_path):
    def run(step):
        command = [sys.executable, "-c", SIZE_CHECK, str(tmp_path), step]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    run("write")
    for dtype in ("float32", "bfloat16"):
        ratio, weights = map(float, run(dtype))
        assert weights > 170
        assert ratio < 1.3, (dtype, ratio)
