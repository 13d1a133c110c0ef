"""Vision checkpoints that are damaged, incomplete or something else."""

from __future__ import annotations

import pytest
import transformers as tf
from safetensors.torch import load_file, save_file

from atb_modules.convert.vision import load_vision_tower


def test_a_directory_that_is_none_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json does not exist"):
        load_vision_tower(tmp_path)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 24, "patch_size": 8}
    tf.CLIPVisionModel(tf.CLIPVisionConfig(**sizes, intermediate_size=48)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = tensors.pop("encoder.layers.1.mlp.fc2.bias")
    save_file(tensors, file)
    with pytest.raises(ValueError, match="1 tensor missing: encoder.layers.1.mlp.fc2.bias"):
        load_vision_tower(tmp_path)
    save_file({**tensors, "encoder.layers.1.mlp.fc2.bias": gone[:5].clone()}, file)
    with pytest.raises(ValueError, match=r"fc2.bias' has shape \(5,\); the configuration makes it \(32,\)"):
        load_vision_tower(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="model_type is 'bert'; allowed: clip_vision_model"):
        load_vision_tower(tmp_path)
