"""Checkpoints that other loaders read wrongly without a word, each against a float64 model written from the
formulas.
"""

import json
import re
from typing import ClassVar

import numpy as np
import pytest
import torch

from atb_modules.attention.rope import RotaryEmbedding
from atb_modules.convert import open_checkpoint
from atb_modules.models.loading import load_inference_model, load_model

GENERATOR = torch.Generator().manual_seed(3)
IDS = torch.randint(0, 61, (1, 120), generator=GENERATOR)


def assert_logits(model, expected, ids=IDS):
    torch.testing.assert_close(model(ids).logits[0].double(), expected, atol=2e-4, rtol=1e-4)


def test_gguf_rotary_factors_are_used(sizes, make_tensors, write_gguf, logits64):
    """Llama 3.1 files carry rope_freqs.weight; without it position 0 is right and position 299 is not."""
    config = {**sizes, "hidden_size": 128, "intermediate_size": 64}
    factors = np.array([1.0] * 8 + [8.0] * 8, dtype=np.float32)
    tensors = make_tensors(config)
    path = write_gguf(config, tensors, extra={"rope_freqs.weight": factors})
    ids = torch.randint(0, 61, (300,), generator=torch.Generator().manual_seed(1))
    plain = torch.tensor([10000 ** (-2 * i / 32) for i in range(16)]).double()
    expected = logits64(config, tensors, ids, inv_freq=plain / torch.from_numpy(factors))
    without = logits64(config, tensors, ids, inv_freq=plain)
    assert (expected - without)[299].abs().max() > 0.05
    model = load_inference_model(path)
    assert_logits(model, expected, ids[None])
    assert model.unused_tensors == ()


class TestHead:
    """The head is the stored one, or the embedding where the file says so, and never anything else."""

    def test_gguf_without_a_head(self, sizes, make_tensors, write_gguf, logits64):
        config = {**sizes, "tie_word_embeddings": True}
        tensors = make_tensors(config)
        model = load_inference_model(write_gguf(config, tensors))
        assert model.lm_head.weight is model.embed.weight
        assert_logits(model, logits64(config, tensors, IDS[0]))

    def test_gguf_with_a_head(self, sizes, make_tensors, write_gguf, logits64):
        tensors = make_tensors(sizes)
        model = load_inference_model(write_gguf(sizes, tensors))
        assert model.lm_head.weight is not model.embed.weight
        assert_logits(model, logits64(sizes, tensors, IDS[0]))

    def test_tied_in_the_config_but_stored(self, write_checkpoint, make_tensors, sizes, logits64):
        tensors = make_tensors(sizes)
        directory, config, _ = write_checkpoint({"tie_word_embeddings": True}, tensors)
        model = load_inference_model(directory)
        assert not model.config.tie_word_embeddings
        assert_logits(model, logits64(config, tensors, IDS[0]))

    def test_tied_and_stored_twice_is_kept_once(self, write_checkpoint, make_tensors, sizes):
        tensors = make_tensors(sizes)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        directory, _, _ = write_checkpoint({"tie_word_embeddings": True}, tensors)
        model = load_inference_model(directory)
        assert model.lm_head.weight is model.embed.weight

    def test_untied_and_missing(self, write_checkpoint, make_tensors, sizes):
        tensors = make_tensors(sizes)
        del tensors["lm_head.weight"]
        directory, _, _ = write_checkpoint({}, tensors)
        with pytest.raises(ValueError, match=r"'lm_head.weight' is missing, and tie_word_embeddings is false"):
            load_inference_model(directory)


def test_the_rotary_base_is_found_where_it_stands(write_checkpoint, make_tensors, sizes, logits64):
    tensors = make_tensors(sizes)
    expected = logits64({**sizes, "rope_theta": 5e5}, tensors, IDS[0])
    nested = {"rope_type": "default", "rope_theta": 5e5}
    variants = [
        {"rope_theta": 5e5},
        {"rope_parameters": nested},
        {"rope_parameters": nested, "rope_theta": 1e4},
    ]
    for index, changes in enumerate(variants):
        assert_logits(load_inference_model(write_checkpoint(changes, tensors, f"base{index}")[0]), expected)
    halved = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    inv_freq = torch.tensor([5e5 ** (-2 * i / 8) / 2 for i in range(4)]).double()
    expected = logits64(sizes, tensors, IDS[0], inv_freq=inv_freq)
    assert_logits(load_inference_model(write_checkpoint(halved, tensors, "halved")[0]), expected)


class TestWindowSwitch:
    """Qwen2's window: off means off, on means the layers that the file names."""

    base: ClassVar = {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 8}

    @pytest.mark.parametrize(
        ("changes", "windows"),
        [
            ({"use_sliding_window": False}, [None] * 4),
            ({}, [None] * 4),
            ({"use_sliding_window": True, "max_window_layers": 2}, [None, None, 7, 7]),
            ({"use_sliding_window": True}, [None] * 4),
            (
                {
                    "use_sliding_window": True,
                    "max_window_layers": 2,
                    "layer_types": ["sliding_attention", "full_attention"] * 2,
                },
                [7, None, 7, None],
            ),
        ],
    )
    def test_layers(self, write_checkpoint, logits64, changes, windows):
        directory, config, tensors = write_checkpoint({**self.base, **changes})
        model = load_inference_model(directory)
        assert list(model.config.windows) == windows
        expected = logits64(config, tensors, IDS[0, :40], windows=windows)
        assert_logits(model, expected, IDS[:, :40])

    def test_contradiction(self, write_checkpoint):
        changes = {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}
        directory, _, _ = write_checkpoint({**self.base, **changes})
        with pytest.raises(ValueError, match="use_sliding_window is false, but layer_types has sliding"):
            load_inference_model(directory)


@pytest.mark.parametrize(
    ("extra", "factor"),
    [
        ({}, 1.27726),
        ({"attention_factor": 1.0}, 1.0),
        ({"mscale": 1, "mscale_all_dim": 1}, 1.0),
        ({"mscale": 1, "mscale_all_dim": 0.5}, 1.12175),
    ],
)
def test_yarns_attention_factor(write_checkpoint, logits64, extra, factor):
    scaling = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, **extra}
    changes = {"hidden_size": 128, "max_position_embeddings": 1024, "rope_scaling": scaling}
    directory, config, tensors = write_checkpoint(changes)
    model = load_inference_model(directory)
    rotary = RotaryEmbedding(32, model.config.rotary[0])
    cos, _ = rotary(torch.tensor([0]))
    assert cos[0].tolist() == pytest.approx([factor] * 16, abs=1e-5)
    inv_freq = torch.tensor(rotary.frequencies(120)).double()
    assert_logits(model, logits64(config, tensors, IDS[0], inv_freq, attention_factor=factor))


class TestKeyLayouts:
    """The same weights under other names give the same model; what is missing or has no place is named."""

    @pytest.mark.parametrize(
        ("old", "new"),
        [("", "_orig_mod."), ("model.", "model._orig_mod."), ("model.", ""), ("model.", "model.language_model.")],
    )
    def test_renamed(self, write_checkpoint, make_tensors, sizes, old, new):
        tensors = make_tensors(sizes)
        expected = load_inference_model(write_checkpoint({}, tensors)[0])(IDS).logits
        renamed = {new + key.removeprefix(old) if key.startswith(old) else key: value for key, value in tensors.items()}
        assert set(renamed) != set(tensors)
        directory, _, _ = write_checkpoint({}, renamed, "renamed")
        assert torch.equal(load_inference_model(directory)(IDS).logits, expected)

    @pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
    def test_missing(self, write_checkpoint, make_tensors, sizes, name):
        tensors = make_tensors(sizes)
        del tensors[name]
        with pytest.raises(ValueError, match="1 tensor missing: " + re.escape(name)):
            load_inference_model(write_checkpoint({}, tensors)[0])

    def test_unused_are_listed(self, write_checkpoint, make_tensors, sizes, caplog):
        tensors = {**make_tensors(sizes), "score.weight": torch.zeros(3), "model.extra": torch.zeros(1)}
        model = load_inference_model(write_checkpoint({}, tensors)[0])
        assert model.unused_tensors == ("model.extra", "score.weight")
        assert "2 tensors not used: model.extra, score.weight" in caplog.text


class TestBiases:
    """All seven biases of a layer count; biases without a place are an error."""

    flags: ClassVar = {"attention_bias": True, "mlp_bias": True}

    def test_all_are_used(self, write_checkpoint, logits64):
        directory, config, tensors = write_checkpoint(self.flags)
        biases = [name for name in tensors if name.endswith(".bias")]
        assert len(biases) == 14
        model = load_inference_model(directory)
        assert_logits(model, logits64(config, tensors, IDS[0]))
        before = model(IDS).logits
        for index, name in enumerate(biases):
            changed = {**tensors, name: torch.zeros_like(tensors[name])}
            again = load_inference_model(write_checkpoint(self.flags, changed, f"zero{index}")[0])
            change = (again(IDS).logits - before).abs().max()
            # A constant added to every key moves all scores of a query alike, but for the rotation.
            assert change > 1e-3, name

    def test_without_the_flags(self, write_checkpoint, make_tensors, sizes):
        tensors = make_tensors({**sizes, **self.flags})
        with pytest.raises(ValueError, match=r"no place for 14 tensors of its layers: .*k_proj.bias"):
            load_inference_model(write_checkpoint({}, tensors)[0])


class TestEndTokens:
    """Every end token counts, wherever the file lists it."""

    def free_run(self, model):
        """A prompt of three tokens and what follows without end tokens, where the third new token is new."""
        for start in range(61):
            prompt = [start, 2, 3]
            free = model.generate(prompt, 8, eos_token_ids=[])
            assert len(free) == 3 + 8
            if free[5] not in free[3:5]:
                return prompt, free
        raise AssertionError("no prompt is answered with three different tokens")

    def test_generation_config(self, write_checkpoint, make_tensors, sizes):
        tensors = make_tensors(sizes)
        prompt, free = self.free_run(load_inference_model(write_checkpoint({}, tensors)[0]))
        first, third = next(token for token in range(61) if token not in free), free[5]
        changes = {"eos_token_id": first}
        generation = {"eos_token_id": [first, third]}
        directory, _, _ = write_checkpoint(changes, tensors, "listed", generation)
        model = load_inference_model(directory)
        assert model.config.eos_token_ids == (first, third)
        assert model.generate(prompt, 8) == free[:6]
        assert model.generate(prompt, 8, eos_token_ids=first) == free
        plain = load_inference_model(write_checkpoint(changes, tensors, "plain")[0])
        assert plain.generate(prompt, 8) == free
        assert plain.generate(prompt, 8, eos_token_ids=[third]) == free[:6]

    def test_gguf(self, sizes, make_tensors, write_gguf):
        tensors = make_tensors(sizes)
        prompt, free = self.free_run(load_inference_model(write_gguf(sizes, tensors)))
        first = next(token for token in range(61) if token not in free)
        ends = {"tokenizer.ggml.eos_token_id": first, "tokenizer.ggml.eot_token_id": free[5]}
        model = load_inference_model(write_gguf(sizes, tensors, metadata=ends, name="ends.gguf"))
        assert model.config.eos_token_ids == (first, free[5])
        assert model.generate(prompt, 8) == free[:6]


def test_unknown_architectures_are_named(write_checkpoint, tmp_path):
    directory, _, _ = write_checkpoint({"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    allowed = "allowed: llama, mistral, qwen2, qwen3, gemma3_text"
    with pytest.raises(ValueError, match=rf"model_type 'mamba' \(MambaForCausalLM\) is not supported; {allowed}"):
        load_model(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": ...}, "the key 'vocab_size' is missing"),
        ({"num_hidden_layers": ...}, "the key 'num_hidden_layers' is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32'; allowed: a positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'; allowed: gelu"),
        ({"rope_scaling": {"rope_type": "su"}}, "rope_type is 'su'; allowed: default, mrope, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "the key 'factor' is missing"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; allowed: an object"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'; allowed: a token id or a list"),
        ({"attention_bias": 1}, "attention_bias is 1; allowed: true or false"),
        ({"head_dim": 16}, r"q_proj.weight' has shape \(32, 32\); the configuration makes it \(64, 32\)"),
    ],
)
def test_wrong_configurations_are_named(write_checkpoint, make_tensors, sizes, changes, message):
    directory, _, _ = write_checkpoint(changes, make_tensors(sizes))
    with pytest.raises(ValueError, match=message) as raised:
        open_checkpoint(directory)
    assert str(directory) in str(raised.value)


def test_config_that_is_not_json(write_checkpoint):
    directory, _, _ = write_checkpoint()
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: the file is not JSON"):
        load_model(directory)
    (directory / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match=r"config.json: holds a list; allowed: an object"):
        load_model(directory)
    (directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
        load_model(directory)
