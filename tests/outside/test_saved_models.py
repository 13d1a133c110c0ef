"""A saved model is a directory that transformers reads as the same model, and so do we: every family and setting."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from atb_modules.attention.rope import RotaryConfig
from atb_modules.attention.rope_scaling import RotaryScaling
from atb_modules.mlp import MoEConfig, RouterConfig
from atb_modules.models.config import ModelConfig
from atb_modules.models.decoder import DecoderModel
from atb_modules.models.loading import load_inference_model, load_model
from atb_modules.models.saving import save_model

LAYERS = 4
IDS = torch.randint(3, 97, (2, 41), generator=torch.Generator().manual_seed(5))
QWEN3 = {"qk_norm": True, "head_dim": 16}
FAMILIES = {
    "llama": {},
    "mistral": {"windows": (8,) * LAYERS, "head_dim": 16},
    "qwen2": {"qkv_bias": True, "windows": (None, None, 6, 6)},
    "qwen3": QWEN3,
    "mixtral": {"windows": (8,) * LAYERS, "moe": MoEConfig(5, 2)},
    "qwen3_moe": {
        **QWEN3,
        "moe": MoEConfig(6, 3, router=RouterConfig(normalize=False)),
        "moe_intermediate_size": 24,
        "dense_layers": (0, 2),
    },
    "gemma3": {
        "head_dim": 16,
        "windows": (7, None, 7, None),
        "rotary": (RotaryConfig(), RotaryConfig(base=1e6)) * 2,
        "norm_offset": 1.0,
        "norm_cast_order": "cast_last",
        "qk_norm": True,
        "mlp_type": "geglu_tanh",
        "norm_placement": "sandwich",
        "attention_scale": 24**-0.5,
        "embedding_scale": 48**0.5,
    },
}


def build(family, dtype=torch.float32, **changes):
    """A small random model whose every part shows in the logits."""
    sizes = {
        "family": family,
        "vocab_size": 97,
        "hidden_size": 48,
        "num_layers": LAYERS,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "intermediate_size": 80,
        "windows": (None,) * LAYERS,
        "rotary": (RotaryConfig(),) * LAYERS,
        "max_positions": 128,
        "norm_eps": 1e-5,
        "norm_cast_order": "weight_last",
        "eos_token_ids": (2,),
    }
    torch.manual_seed(0)
    model = DecoderModel(ModelConfig(**{**sizes, **FAMILIES[family], **changes}), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.15)
    return model


def check(model, directory, ids=IDS):
    save_model(model, directory)
    with torch.no_grad():
        expected = model(ids).logits
        assert expected.float().std() > 0.3
        theirs, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert theirs.dtype == model.dtype
        torch.testing.assert_close(theirs.eval()(ids).logits, expected, atol=1e-4, rtol=0)
        ours = load_model(directory)
        torch.testing.assert_close(ours(ids).logits, expected, atol=1e-6, rtol=0)
    assert theirs.config.tie_word_embeddings == model.config.tie_word_embeddings == ours.config.tie_word_embeddings
    ends = theirs.config.eos_token_id
    ends = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
    assert ends == model.config.eos_token_ids == ours.config.eos_token_ids
    return theirs, ours


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family, tied, tmp_path):
    model = build(family, tie_word_embeddings=tied)
    theirs, ours = check(model, tmp_path / "saved")
    assert ours.config == model.config or family == "gemma3"  # its scale comes back from a square
    assert type(theirs).__name__ == json.loads((tmp_path / "saved/config.json").read_text())["architectures"][0]
    greedy = theirs.generate(IDS[:, :9], max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(load_inference_model(tmp_path / "saved").generate(IDS[:, :9], 9, eos_token_ids=[]), greedy)
    # Saved again from what was read, it is the same.
    save_model(ours, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "num_kv_heads": 1}),
        ("llama", {"mlp_type": "geglu", "head_dim": 20, "eos_token_ids": ()}),
        ("llama", {"windows": (8,) * LAYERS, "eos_token_ids": (2, 5)}),  # a GGUF of Mistral says llama
        ("mistral", {"windows": (None,) * LAYERS}),
        ("qwen2", {"windows": (6, None, None, 6)}),
        ("qwen2", {"windows": (None,) * LAYERS}),
        ("qwen3", {"qkv_bias": True, "output_bias": True, "windows": (None, 6, 6, 6)}),
        ("mixtral", {"windows": (None,) * LAYERS}),
        ("qwen3_moe", {"dense_layers": (), "windows": (6,) * LAYERS}),
        ("gemma3", {"attention_scale": None, "logit_softcap": 2.0}),
        ("gemma3", {"windows": (7,) * LAYERS, "rotary": (RotaryConfig(base=5e3),) * LAYERS}),
        ("gemma3", {"windows": (None,) * LAYERS, "rotary": (RotaryConfig(base=5e5),) * LAYERS}),
    ],
)
def test_settings_of_a_family(family, changes, tmp_path):
    check(build(family, **changes), tmp_path)


SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "original_max_positions": 32},
    "yarn": {"factor": 4.0, "original_max_positions": 32, "beta_fast": 16.0, "beta_slow": 2.0},
    "llama3": {"factor": 8.0, "original_max_positions": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "original_max_positions": 32,
        "short_factor": (1.0, 1.1, 1.2, 1.3, 1.4, 1.5),
        "long_factor": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_scaled_rotary(family, kind, tmp_path):
    rotary = RotaryConfig(base=5e5, scaling=RotaryScaling(kind, **SCALINGS[kind]))
    settings = (RotaryConfig(), rotary) * 2 if family == "gemma3" else (rotary,) * LAYERS
    _, ours = check(build(family, rotary=settings, head_dim=12), tmp_path)
    assert ours.config.rotary == settings


def test_frequency_factors_of_a_gguf(tmp_path):
    rotary = RotaryConfig(base=5e5, frequency_factors=(1.0, 1.0, 2.0, 4.0, 8.0, 8.0))
    check(build("llama", rotary=(rotary,) * LAYERS), tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_its_dtype(dtype, tmp_path):
    model = build("llama", dtype)
    save_model(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == load_model(tmp_path).dtype == dtype
    assert torch.equal(theirs.model.embed_tokens.weight, model.embed.weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_comes_back_as_it_was(family, build_tiny_model, tmp_path):
    theirs = build_tiny_model(family)
    theirs.save_pretrained(tmp_path / "theirs")
    save_model(load_model(tmp_path / "theirs"), tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, theirs(IDS).logits, atol=1e-4, rtol=0)
    ours, source = again.config.to_dict(), theirs.config.to_dict()
    for key in ("rope_parameters", "layer_types", "hidden_size", "num_key_value_heads", "rms_norm_eps", "eos_token_id"):
        assert ours.get(key) == source.get(key), key


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"qk_norm": True}, "config.qk_norm is True, .* family 'llama' would read back False"),
        ("llama", {"qkv_bias": True}, "config.qkv_bias is True"),
        ("llama", {"windows": (None, 3, 3, 3)}, "config.windows is .* family 'mistral' would read back"),
        ("llama", {"attention_scale": 0.5}, "config.attention_scale is 0.5"),
        ("llama", {"mlp_type": "relu2"}, "config.mlp_type is 'relu2', .* allowed: swiglu, geglu, geglu_tanh"),
        ("llama", {"logit_softcap": 5.0}, "config.logit_softcap is 5.0"),
        ("llama", {"rotary": (RotaryConfig(), RotaryConfig(base=1e6)) * 2}, r"config.rotary\[1\] is RotaryConfig"),
        ("llama", {"rotary": (RotaryConfig(layout="interleaved"),) * LAYERS}, r"config.rotary\[0\] is RotaryConfig"),
        ("llama", {"rotary": (RotaryConfig(partial_factor=0.5),) * LAYERS}, "transformers rotates whole heads"),
        ("mistral", {"qkv_bias": True, "output_bias": True}, "config.qkv_bias is True"),
        ("qwen3", {"mlp_bias": True}, "config.mlp_bias is True"),
        ("qwen3_moe", {"windows": (None, 6, 6, 6)}, "config.windows is"),
        ("llama", {"moe": MoEConfig(4, 2)}, "config.moe is MoEConfig"),
        ("mixtral", {"moe_intermediate_size": 24}, "config.moe_intermediate_size is 24"),
        ("mixtral", {"moe": None}, "config.moe is None, .*allowed: a MoEConfig"),
        ("mixtral", {"moe": MoEConfig(4, 2, num_shared_experts=1)}, "config.moe is MoEConfig"),
        ("gemma3", {"attention_softcap": 5.0}, "config.attention_softcap is 5.0"),
        ("gemma3", {"windows": (7, None, 5, None)}, "config.windows is"),
        ("gemma3", {"embedding_scale": 2.0}, "config.embedding_scale is 2.0"),
    ],
)
def test_what_no_config_json_can_say_is_refused(family, changes, message, tmp_path):
    model = build(family, **changes)
    with pytest.raises(ValueError, match=message):
        save_model(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_unknown_families_and_other_weights_are_refused(tmp_path):
    model = build("llama")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="model.safetensors.index.json, whose files would be read instead"):
        save_model(model, tmp_path)
    model.config = replace(model.config, family="mine")
    with pytest.raises(ValueError, match="config.family is 'mine'; allowed: llama, mistral, qwen2, qwen3, gemma3"):
        save_model(model, tmp_path / "other")
