"""Checkpoints with other towers, layers, text models and words than the usual ones; configurations as published."""

import dataclasses
import json

import pytest
import torch
import transformers as tf

import atb_modules as atb
from atb_modules.convert.multimodal import multimodal_family_of
from atb_modules.convert.multimodal.family import Build
from atb_modules.convert.source import ConfigSource
from atb_modules.layer import LayerMode
from atb_modules.multimodal.qwen_vl import QwenVLModel

from .conftest import IMAGE, PINPOINTS, QWEN, compose, config_of, stir
from .published_configs import PUBLISHED

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}


def llava(**changes):
    options = {"vision_config": tf.CLIPVisionConfig(**TOWER), "text_config": tf.LlamaConfig(**TEXT)}
    return tf.LlavaConfig(**{**options, "image_token_index": IMAGE, **changes})


def siglip(**changes):
    return llava(vision_config=tf.SiglipVisionConfig(**TOWER), vision_feature_select_strategy="full", **changes)


def tied(family):
    config = config_of(family)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    return config


def windowed():
    values = config_of("qwen2_5_vl").to_dict()
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    values["text_config"] |= {"use_sliding_window": True, "sliding_window": 16, "layer_types": kinds}
    return tf.Qwen2_5_VLConfig.from_dict(values)


def without_tie(values):
    values.pop("tie_word_embeddings", None)
    values["text_config"].pop("tie_word_embeddings", None)


def with_text_on_top(values):
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    kind = values["model_type"]
    values |= {key: value for key, value in text.items() if key != "layer_types"}
    values |= {"model_type": kind, "rope_theta": rope["rope_theta"]}
    values["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}


VARIANTS = {
    "clip_list_of_layers": ("llava", lambda: llava(vision_feature_layer=[0, -2, 2]), None),
    "clip_last_layer": ("llava", lambda: llava(vision_feature_layer=-1), None),
    "siglip": ("llava", siglip, None),
    "siglip_last_layer": ("llava", lambda: siglip(vision_feature_layer=-1), None),
    "qwen2_text": ("llava", lambda: llava(text_config=tf.Qwen2Config(**TEXT)), None),
    "mistral_window": ("llava", lambda: llava(text_config=tf.MistralConfig(**TEXT, sliding_window=16)), None),
    "no_bias_silu": ("llava", lambda: llava(multimodal_projector_bias=False, projector_hidden_act="silu"), None),
    "next_list_of_layers": (
        "llava_next",
        lambda: tf.LlavaNextConfig(
            vision_config=tf.CLIPVisionConfig(**TOWER),
            text_config=tf.MistralConfig(**TEXT, sliding_window=None),
            image_token_index=IMAGE,
            image_grid_pinpoints=PINPOINTS,
            vision_feature_layer=[-2, -1],
        ),
        None,
    ),
    "gemma3_as_published_without_a_word_on_the_head": ("gemma3", lambda: config_of("gemma3"), without_tie),
    "qwen2_5_window": ("qwen2_5_vl", windowed, None),
    "qwen2_text_on_top": ("qwen2_vl", lambda: config_of("qwen2_vl"), with_text_on_top),
    "qwen2_5_text_on_top": ("qwen2_5_vl", lambda: config_of("qwen2_5_vl"), with_text_on_top),
    **{f"{family}_tied": (family, lambda family=family: tied(family), without_tie) for family in QWEN},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(tmp_path, name):
    family, config, edit = VARIANTS[name]
    torch.manual_seed(0)
    theirs = tf.AutoModelForImageTextToText.from_config(config(), attn_implementation="eager").eval()
    stir(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    if edit is not None:
        file = tmp_path / "theirs" / "config.json"
        values = json.loads(file.read_text())
        edit(values)
        file.write_text(json.dumps(values))
    ours = atb.load_model(tmp_path / "theirs")
    if isinstance(ours, QwenVLModel):
        ours.config = dataclasses.replace(ours.config, mrope_advance="spatial")
    image = ("image", (40, 90) if family == "llava_next" else (4, 6))
    batch = compose(family, [[30, image, 5], [3], [image, 2, image, 25]], padding="left")
    real = batch.attention_mask.bool()
    ours.save_pretrained(tmp_path / "ours")
    again = tf.AutoModelForImageTextToText.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    with torch.no_grad():
        found = ours(**batch.ours()).logits[real]
        torch.testing.assert_close(found, theirs(**batch.theirs()).logits[real], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found, again(**batch.theirs()).logits[real], atol=1e-4, rtol=1e-4)
    expected = theirs.generate(**batch.theirs(), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(**batch.ours(), max_new_tokens=6), expected)


def test_a_head_that_is_lost_is_missed(tmp_path, checkpoint):
    from .test_refusals import renamed

    target = renamed(checkpoint("qwen2_vl")[1], tmp_path / "cut", lambda name: name, drop=("lm_head.weight",))
    with pytest.raises(ValueError, match="'lm_head.weight' is missing, and tie_word_embeddings is false"):
        atb.load_model(target)


def test_a_window_that_does_not_hold_an_image_is_refused(tmp_path, checkpoint):
    from .test_refusals import renamed

    target = renamed(checkpoint("gemma3")[1], tmp_path / "copy", lambda name: name)
    values = json.loads((target / "config.json").read_text())
    values["text_config"]["sliding_window"] = 8
    (target / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        ValueError, match="mm_tokens_per_image is 9 and sliding_window 8; allowed: images that a window"
    ):
        atb.load_model(target)


def test_tokens_that_end_an_answer_are_read_beside_the_text(tmp_path, checkpoint):
    from .test_refusals import renamed

    target = renamed(checkpoint("gemma3")[1], tmp_path / "copy", lambda name: name)
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**values, "eos_token_id": [1, 106]}))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    assert atb.load_model(target).language.config.eos_token_ids == (1, 106, 7)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(tmp_path, name):
    """Every weight by name and shape, and what the configuration leaves to defaults; nothing is allocated."""
    values = PUBLISHED[name]
    family = multimodal_family_of(values["model_type"])
    ours = family.build(ConfigSource(values, name), Build(False, LayerMode.TRAIN, "flash", torch.bfloat16))
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = tf.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        theirs = tf.AutoModelForImageTextToText.from_config(config)
    slots = [(name, slot) for group in family.groups(ours) for name, slot in group.slots.items()]
    expected = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    left = dict(expected)
    for ending, slot in slots:
        name = next(name for name in left if name == ending or name.endswith("." + ending))
        assert left.pop(name) == tuple(slot.shape), name
    assert not left
    text, mine = config.text_config, ours.language.config
    assert mine.max_positions == text.max_position_embeddings
    assert mine.norm_eps == text.rms_norm_eps
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * mine.num_layers
    for kind, window, rotary in zip(kinds, mine.windows, mine.rotary, strict=True):
        rope = text.rope_parameters.get(kind, text.rope_parameters)
        assert rotary.base == rope["rope_theta"]
        assert rotary.mrope_section == (tuple(rope["mrope_section"]) if "mrope_section" in rope else None)
        assert (window is None) == (kind == "full_attention")
        assert window is None or window == text.sliding_window - 1
