"""Vision configurations: defaults of the files' keys, and keys that are wrong, named with their file."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from atb_modules.convert.source import ConfigSource
from atb_modules.convert.vision import VISION_FAMILIES, load_vision_tower, vision_family_of

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
QWEN = {"hidden_size": 16, "embed_dim": 16, "num_heads": 2, "depth": 1, "intermediate_size": 8}


def build(family, values):
    return VISION_FAMILIES[family].build(ConfigSource(values, "config.json"), device="meta")


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        (
            "clip",
            {**SMALL, "attention_dropout": 0.1},
            "config.json: attention_dropout is 0.1; a vision tower allows 0.0",
        ),
        ("clip", {**SMALL, "hidden_act": "tanh"}, "config.json: hidden_act is 'tanh'; allowed: gelu"),
        ("clip", {**SMALL, "hidden_size": 15}, "config.json: num_heads is 2; it must divide hidden_size 15"),
        (
            "clip",
            {**SMALL, "image_size": 16},
            r"config.json: image_size is \(16, 16\); allowed: at least patch_size 32",
        ),
        ("siglip", {**SMALL, "image_size": [32, 0]}, r"config.json: image_size is \[32, 0\]"),
        ("siglip", {**SMALL, "patch_size": [8, 16]}, r"config.json: patch_size is \[8, 16\]; allowed: .* equal ones"),
        ("siglip2", {**SMALL, "num_patches": 250}, "config.json: num_patches is 250; allowed: a square number"),
        ("dinov2", {**SMALL, "drop_path_rate": 0.2}, "config.json: drop_path_rate is 0.2"),
        ("qwen2_vl", {**QWEN, "rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'; allowed: axial"),
        ("qwen2_vl", {**QWEN, "embed_dim": 12}, "config.json: head_dim is 6; 2-D rotary positions"),
        ("qwen2_5_vl", {**QWEN, "fullatt_block_indexes": [0, 7]}, r"full_attention_layers has \[7\]; allowed: 0 to 0"),
        ("qwen2_5_vl", {**QWEN, "fullatt_block_indexes": "all"}, "fullatt_block_indexes is 'all'"),
        ("qwen3_vl", {**QWEN, "num_position_embeddings": 7}, "num_position_embeddings is 7"),
        ("qwen3_vl", {**QWEN, "depth": 0}, "depth is 0"),
    ],
)
def test_wrong_keys_are_named(family, values, message):
    with pytest.raises(ValueError, match=message):
        build(family, values)


def test_families_are_found_by_their_own_word_and_by_that_of_the_model_around_them():
    assert vision_family_of("clip_vision_model") is vision_family_of("clip") is VISION_FAMILIES["clip"]
    assert vision_family_of("qwen2_5_vl") is vision_family_of("qwen2_5_vl_vision") is VISION_FAMILIES["qwen2_5_vl"]
    assert vision_family_of("bert") is None


def test_towers_say_what_they_need_to_be_fed():
    tower = build("dinov2_with_registers", {**SMALL, "num_register_tokens": 3})
    assert (tower.num_prefix_tokens, tower.patch_size, tower.out_channels) == (4, 16, 16)
    packed = build("qwen2_5_vl", {**QWEN, "fullatt_block_indexes": []})
    assert (packed.config.merge_size, packed.config.patch_values, packed.num_prefix_tokens) == (2, 3 * 2 * 14 * 14, 0)
    assert packed.config.window == 112 and packed.layers[0].mlp.mlp_type == "swiglu"


def test_arguments_that_are_none(tmp_path):
    with pytest.raises(TypeError, match="directory is 5"):
        load_vision_tower(5)
    with pytest.raises(ValueError, match="dtype is torch.int8"):
        load_vision_tower(tmp_path, dtype=torch.int8)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list; allowed: an object"):
        load_vision_tower(tmp_path)


@pytest.fixture
def checkpoint(tmp_path):
    """A SigLIP of one layer: its directory, its configuration and its tensors."""
    values = {**SMALL, "model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4}
    family = VISION_FAMILIES["siglip"]
    tower = family.build(ConfigSource(values, "config.json"))
    tensors = {name: slot.contiguous() for name, slot in family.slots(tower).items()}
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, values, tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 15}, "num_heads is 2; it must divide hidden_size 15"),
        ({"patch_size": 16}, r"image_size is \(8, 8\); allowed: at least patch_size 16"),
        ({"vision_config": 3}, "vision_config is 3; allowed: an object"),
        ({"vision_config": []}, r"vision_config is \[\]; allowed: an object"),
    ],
)
def test_a_wrong_configuration_is_named_with_its_file(checkpoint, change, message):
    directory, values, _ = checkpoint
    load_vision_tower(directory)
    (directory / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(ValueError, match=f"{re.escape(str(directory))}.config.json: {message}"):
        load_vision_tower(directory)


def test_a_patch_kernel_of_integers_is_named_with_its_file(checkpoint):
    directory, _, tensors = checkpoint
    name = "embeddings.patch_embedding.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors: .*'embeddings.patch_embedding.weight' .* integers"):
        load_vision_tower(directory)
