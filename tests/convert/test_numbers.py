"""Numbers in files of models that no computation survives, or that rounding has bent: named, or read as meant."""

from __future__ import annotations

import pytest

from atb_modules.convert.checkpoint import open_checkpoint
from atb_modules.convert.gemma3 import gemma3_config
from atb_modules.convert.rotary import gguf_rotary
from atb_modules.convert.source import ConfigSource


@pytest.mark.parametrize(
    ("changes", "generation", "message"),
    [
        (
            {},
            {"eos_token_id": 2**31},
            "generation_config.json: eos_token_id is 2147483648; allowed: .*0 to 2147483647",
        ),
        ({}, {"eos_token_id": [1, -5]}, r"generation_config.json: eos_token_id is \[1, -5\]"),
        ({"eos_token_id": 2**31}, None, "config.json: eos_token_id is 2147483648"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e300}}, None, "config.json: max_positions is"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1.7e308}}, None, "config.json: max_positions is"),
    ],
)
def test_numbers_out_of_range_name_the_file(write_checkpoint, changes, generation, message):
    directory, _, _ = write_checkpoint(changes, generation=generation)
    with pytest.raises(ValueError, match=message) as raised:
        open_checkpoint(directory)
    assert str(raised.value).startswith(str(directory))


@pytest.mark.parametrize("scalar", [0, 0.0, -256])
def test_scores_of_gemma3_need_a_positive_scale(scalar):
    values = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    values |= {"intermediate_size": 9, "query_pre_attn_scalar": scalar}
    with pytest.raises(ValueError, match="config.json: query_pre_attn_scalar is .*; allowed: a positive number"):
        gemma3_config(ConfigSource(values, "config.json"))


@pytest.mark.parametrize("head_dim", [80, 96, 104, 128, 192])
def test_rotated_channels_of_a_gguf_come_back_as_they_are_written(head_dim):
    for turned in range(2, head_dim + 1, 2):
        source = ConfigSource({"llama.rope.dimension_count": turned}, "model.gguf")
        assert gguf_rotary(source, "llama", head_dim, 64).rotary_dim(head_dim) == turned


def test_rotated_channels_of_a_gguf_reach_the_model(write_gguf, make_tensors, sizes):
    sizes = {**sizes, "hidden_size": 104, "num_attention_heads": 1, "num_key_value_heads": 1}
    path = write_gguf(sizes, make_tensors(sizes), metadata={"llama.rope.dimension_count": 30})
    assert open_checkpoint(path).config.rotary[0].rotary_dim(104) == 30
