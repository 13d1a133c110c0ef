"""ModelConfig and InferenceConfig: bad values and misspelt names are refused by name."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

from atb_modules import InferenceConfig, ModelConfig, RotaryConfig

NAN, INF = float("nan"), float("inf")
GOOD = {
    "family": "llama",
    "vocab_size": 11,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "windows": (None, 3),
    "rotary": (RotaryConfig(),) * 2,
    "max_positions": 32,
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"family": 3}, TypeError, "family is 3 .*allowed: str"),
        ({"vocab_size": 0}, ValueError, "vocab_size is 0; allowed: a positive int"),
        ({"hidden_size": 16.0}, TypeError, "hidden_size is 16.0"),
        ({"num_layers": True}, TypeError, "num_layers is True"),
        ({"num_kv_heads": 3}, ValueError, "num_heads is 4, which num_kv_heads 3 does not divide"),
        ({"max_positions": -1}, ValueError, "max_positions is -1"),
        ({"windows": (None,)}, ValueError, "windows has 1 entries; num_layers is 2"),
        ({"windows": 4}, TypeError, "windows is 4"),
        ({"windows": (None, -1)}, ValueError, r"windows\[1\] is -1"),
        ({"windows": (None, True)}, TypeError, r"windows\[1\] is True"),
        ({"rotary": RotaryConfig()}, TypeError, "rotary is RotaryConfig"),
        ({"rotary": (None, RotaryConfig())}, TypeError, r"rotary\[0\] is None .*allowed: RotaryConfig"),
        ({"norm_eps": "a"}, TypeError, "norm_eps is 'a'"),
        ({"norm_eps": NAN}, ValueError, "norm_eps is nan"),
        ({"norm_offset": INF}, ValueError, "norm_offset is inf"),
        ({"norm_cast_order": "first"}, ValueError, "norm_cast_order is 'first'"),
        ({"qk_norm": "before_rotary"}, TypeError, "qk_norm is 'before_rotary' .*allowed: True, False"),
        ({"qkv_bias": 1}, TypeError, "qkv_bias is 1"),
        ({"tie_word_embeddings": None}, TypeError, "tie_word_embeddings is None"),
        ({"mlp_type": "silu_glu"}, ValueError, "mlp_type is 'silu_glu'"),
        ({"norm_placement": "parallel"}, ValueError, "norm_placement is 'parallel'; allowed: 'pre', 'sandwich'"),
        ({"attention_scale": NAN}, ValueError, "attention_scale is nan"),
        ({"attention_softcap": 0.0}, ValueError, "attention_softcap is 0.0"),
        ({"logit_softcap": -1}, ValueError, "logit_softcap is -1"),
        ({"embedding_scale": "4"}, TypeError, "embedding_scale is '4'"),
        ({"eos_token_ids": 3}, TypeError, "eos_token_ids is 3"),
        ({"eos_token_ids": (2.0,)}, TypeError, r"eos_token_ids\[0\] is 2.0"),
        ({"eos_token_ids": (-1,)}, ValueError, r"eos_token_ids\[0\] is -1"),
    ],
)
def test_model_configs_refuse(changes, error, message):
    with pytest.raises(error, match=message):
        ModelConfig(**GOOD | changes)


def test_lists_become_tuples():
    config = ModelConfig(**GOOD | {"windows": [None, 3], "rotary": [RotaryConfig()] * 2, "eos_token_ids": [1]})
    assert config == ModelConfig(**GOOD | {"eos_token_ids": (1,)}) and hash(config) is not None


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("enable_inference_fusion", 1, TypeError),
        ("enable_kv_cache_opt", None, TypeError),
        ("prefill_chunk_size", True, ValueError),
        ("prefill_chunk_size", 2.0, ValueError),
        ("page_size", "64", ValueError),
        ("page_size", NAN, ValueError),
        ("dtype", "float32", ValueError),
        ("dtype", torch.float64, ValueError),
        ("attention_type", "fast", ValueError),
        ("attention_type", None, ValueError),
    ],
)
def test_inference_options_refuse(name, value, error):
    config = InferenceConfig()
    setattr(config, name, value)
    with pytest.raises(error, match=f"{name} is .*allowed: "):
        config.validate()


def test_a_misspelt_option_is_refused_at_once():
    config = InferenceConfig()
    with pytest.raises(
        AttributeError, match="InferenceConfig has no 'prefill_chunksize'; allowed: .*prefill_chunk_size"
    ):
        config.prefill_chunksize = 4
    config.prefill_chunk_size = 4
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert twin == config
