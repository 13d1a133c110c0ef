"""Prompts, images and files that do not go together are refused, naming both sides."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import atb_modules as atb
from atb_modules.overlays import Overlays

FAMILIES = ("llava", "llava_next", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
QWEN = FAMILIES[3:]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_image_and_one_too_many(checkpoint, batch_of, family, monkeypatch):
    model = atb.load_model(checkpoint(family)[1])
    monkeypatch.setattr(model, "encode", lambda *_: pytest.fail("no vision work before the counts are checked"))
    batch = batch_of(family, "one")
    with pytest.raises(ValueError, match="placeholders .* left at token 5 of row 0; 0 images with 0 features"):
        model(batch.input_ids)
    with pytest.raises(ValueError, match="placeholders .* left at token 5 of row 0; 0 images with 0 features"):
        model.generate(batch.input_ids, 3)
    more = {key: torch.cat([value, value]) for key, value in batch.visual.items()}
    with pytest.raises(ValueError, match="2 images were given and input_ids has placeholders .* for 1: image 1 has"):
        model(batch.input_ids, **more)
    text = batch.input_ids.masked_fill(batch.input_ids == model.placeholders["image"], 5)
    with pytest.raises(ValueError, match="1 images were given and input_ids has placeholders .* for 0: image 0 has"):
        model(text, **batch.visual)


@pytest.mark.parametrize("family", QWEN)
def test_spans_of_another_image_though_the_totals_agree(checkpoint, family):
    model = atb.load_model(checkpoint(family)[1])
    ids = torch.tensor([[5] + [150] * 8 + [6] + [150] * 4 + [7]])
    grid = torch.tensor([[1, 4, 4], [1, 8, 4]])
    with pytest.raises(ValueError, match=r"row 0, image 1: 4 placeholders, 8 features \(a run of 8 placeholders"):
        model(ids, pixel_values=torch.randn(48, 96), image_grid_thw=grid)
    adjacent = torch.tensor([[5] + [150] * 12 + [7]])
    assert model(adjacent, pixel_values=torch.randn(48, 96), image_grid_thw=grid).logits.shape == (1, 14, 160)


@pytest.mark.parametrize("family", QWEN)
def test_grids_that_do_not_fit(checkpoint, family):
    model = atb.load_model(checkpoint(family)[1])
    ids = torch.tensor([[5, 150, 150, 150, 150, 7]])
    pixels = torch.randn(16, 96)
    for grid, words in (
        ([[1, 5, 4]], r"image_grid_thw\[0\] is \(1, 5, 4\); allowed: .* merge_size 2 divides"),
        ([[1, 4, 6]], r"pixel_values has shape \(16, 96\); image_grid_thw has 24 patches in 1 grids"),
        ([[0, 4, 4]], r"image_grid_thw\[0\] is \(0, 4, 4\)"),
        ([[1, 4]], r"image_grid_thw is torch.int64 \(1, 2\); allowed: integers \(n, 3\)"),
    ):
        with pytest.raises(ValueError, match=words):
            model(ids, pixel_values=pixels, image_grid_thw=torch.tensor(grid))
    with pytest.raises(ValueError, match="image_grid_thw is None; allowed: pixel_values and image_grid_thw"):
        model(ids, pixel_values=pixels)
    kinds = torch.tensor([[0, 1, 1, 2, 1, 0]])
    with pytest.raises(ValueError, match=r"mm_token_type_ids has \[1, 2\] at tokens 1 to 4 of row 0"):
        model(ids, pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]]), mm_token_type_ids=kinds)
    video = {"pixel_values_videos": torch.randn(32, 96), "video_grid_thw": torch.tensor([[2, 4, 4]])}
    for seconds, error, words in (
        ([1.0, 2.0], ValueError, "second_per_grid_ts has 2 numbers; video_grid_thw has 1 videos"),
        (["a"], TypeError, r"second_per_grid_ts\[0\] is 'a'"),
        ([-1.0], ValueError, r"second_per_grid_ts\[0\] is -1.0"),
        (torch.tensor([float("nan")]), ValueError, r"second_per_grid_ts\[0\] is nan"),
        (1.0, TypeError, "second_per_grid_ts is 1.0"),
    ):
        with pytest.raises(error, match=words):
            model(torch.tensor([[151] * 8]), **video, second_per_grid_ts=seconds)
    with pytest.raises(ValueError, match="second_per_grid_ts has 1 numbers; video_grid_thw has 0 videos"):
        model(torch.tensor([[5, 6]]), second_per_grid_ts=[1.0])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_language_model_would_refuse_is_refused_before_vision_work(checkpoint, batch_of, family, monkeypatch):
    model = atb.load_model(checkpoint(family)[1])
    monkeypatch.setattr(model, "encode", lambda *_: pytest.fail("vision work before the arguments are checked"))
    batch = batch_of(family, "one")
    ids = batch.input_ids
    cache = model.new_cache(64, num_pages=4)
    cache.begin(2)
    for name, value, error, words in (
        ("attention_mask", torch.ones(1, 3, dtype=torch.int64), ValueError, "attention_mask has shape"),
        ("attention_mask", torch.ones(ids.shape), TypeError, "attention_mask is torch.float32"),
        ("attention_mask", ids.tolist(), TypeError, "attention_mask is list"),
        ("position_ids", torch.zeros(1, 3, dtype=torch.int64), ValueError, "position_ids has shape"),
        ("labels", torch.zeros(1, 3, dtype=torch.int64), ValueError, "labels has shape"),
        ("labels", torch.full(ids.shape, 160), ValueError, "labels has ids from 160"),
        ("overlays", {}, TypeError, "overlays is {}"),
        ("past_key_values", 3, TypeError, "past_key_values must be a KVCacheManager"),
        ("past_key_values", cache, ValueError, "input_ids has 1 rows; past_key_values has 2 open sequences"),
        ("mm_token_type_ids", ids.tolist(), TypeError, "mm_token_type_ids is list"),
        ("mm_token_type_ids", torch.zeros(1, 3), ValueError, "mm_token_type_ids has shape"),
        (
            "mm_token_type_ids",
            torch.ones_like(ids),
            ValueError,
            "mm_token_type_ids has 1 at token 0 of row 0; no",
        ),
        ("pixel_values", batch.visual["pixel_values"].tolist(), TypeError, "pixel_values is"),
        ("pixel_values", batch.visual["pixel_values"].long(), (TypeError, ValueError), "pixel_values is torch.int64"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            model(**{"input_ids": ids, **batch.visual, name: value})
    with pytest.raises(TypeError, match="mm_token_type_ids is list"):
        model.generate(ids, 2, **batch.visual, mm_token_type_ids=ids.tolist())
    with pytest.raises(TypeError, match="input_ids is list; allowed: a tensor .* with .*mm_token_type_ids"):
        model.generate(ids.tolist(), 2, **batch.visual, mm_token_type_ids=torch.zeros_like(ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_sequence_that_begins_in_an_image(checkpoint, batch_of, family):
    model = atb.load_model(checkpoint(family)[1])
    batch = batch_of(family, "one")
    starts = torch.tensor([0, 8, batch.input_ids.shape[1]], dtype=torch.int32)
    with pytest.raises(ValueError, match="begins at token 8, inside of image 0, which has .* from token 5 on"):
        model(batch.input_ids, **batch.visual, overlays=Overlays(starts, starts))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_is_too_long_and_a_batch_of_no_images(checkpoint, family):
    model = atb.load_model(checkpoint(family)[1])
    with pytest.raises(ValueError, match="input_ids has 600 tokens a row; max_positions is 512"):
        model(torch.full((1, 600), 5))
    none = {"pixel_values": torch.empty(0, 5, 3, 28, 28), "image_sizes": torch.empty(0, 2, dtype=torch.int64)}
    if family == "llava_next":
        assert model(torch.tensor([[5, 6]]), **none).logits.shape == (1, 2, 160)


def test_tiles_that_do_not_fit(checkpoint, batch_of):
    model = atb.load_model(checkpoint("llava_next")[1])
    batch = batch_of("llava_next", "one")
    with pytest.raises(ValueError, match="image_sizes is None"):
        model(batch.input_ids, pixel_values=batch.visual["pixel_values"])
    with pytest.raises(ValueError, match="pixel_values has 2 tiles an image; image 0 of 40 x 90 pixels takes 4"):
        model(batch.input_ids, **{**batch.visual, "pixel_values": batch.visual["pixel_values"][:, :2]})
    for sizes in ([40, 90], "ab", [[40.5, 90.0]], torch.tensor([[40.0, 90.0]]), [[0, 3]], 7):
        with pytest.raises(ValueError, match="image_sizes is .*; allowed: height and width of each image"):
            model(batch.input_ids, pixel_values=batch.visual["pixel_values"], image_sizes=sizes)
    with pytest.raises(ValueError, match="and image_sizes 2 images"):
        model(batch.input_ids, **{**batch.visual, "image_sizes": torch.tensor([[40, 90], [40, 90]])})


def test_an_argument_that_there_is_not(checkpoint, batch_of):
    model = atb.load_inference_model(checkpoint("llava")[1])
    batch = batch_of("llava", "one")
    with pytest.raises(TypeError, match="pixel_value"):
        model(batch.input_ids, pixel_value=batch.visual["pixel_values"])
    with pytest.raises(TypeError, match="max_tokens"):
        model.generate(**batch.ours(), max_new_tokens=2, max_tokens=3)


def renamed(directory, target, rename, drop=()):
    """A copy of a checkpoint whose tensors have other names."""
    target.mkdir()
    shutil.copy(directory / "config.json", target)
    tensors = load_file(directory / "model.safetensors")
    tensors = {rename(name): tensor for name, tensor in tensors.items() if name not in drop}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


LAYOUTS = {
    "qwen2_vl": {
        "newer": lambda name: (
            name.replace("visual.", "model.visual.", 1)
            if name.startswith("visual.")
            else name.replace("model.", "model.language_model.", 1)
        ),
        "compiled": lambda name: "_orig_mod." + name,
    },
    "llava": {
        "vision_model": lambda name: name.replace("vision_tower.", "vision_tower.vision_model.", 1),
        "newer": lambda name: (
            "lm_head.weight"
            if name.endswith("lm_head.weight")
            else "model." + name.replace("language_model.model.", "language_model.")
        ),
        "compiled": lambda name: "_orig_mod." + name,
    },
}


@pytest.mark.parametrize(("family", "layout"), [(family, layout) for family in LAYOUTS for layout in LAYOUTS[family]])
def test_every_layout_of_names_gives_the_same_model(checkpoint, batch_of, tmp_path, family, layout):
    directory = checkpoint(family)[1]
    target = renamed(directory, tmp_path / "copy", LAYOUTS[family][layout])
    batch = batch_of(family, "sizes")
    with torch.no_grad():
        expected = atb.load_model(directory)(**batch.ours(mask=False)).logits
        assert torch.equal(atb.load_model(target)(**batch.ours(mask=False)).logits, expected)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2_vl", "model.norm.weight"),
        ("qwen2_vl", "visual.merger.ln_q.weight"),
        ("llava", "multi_modal_projector.linear_1.bias"),
        ("llava", "vision_tower.encoder.layers.1.layer_norm1.weight"),
        ("qwen3_vl", "model.visual.deepstack_merger_list.0.norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(checkpoint, tmp_path, family, name):
    target = renamed(checkpoint(family)[1], tmp_path / "cut", lambda name: name, drop=(name,))
    with pytest.raises(ValueError, match=f"1 tensor missing: {name}"):
        atb.load_model(target)


def test_tensors_without_a_place(checkpoint, tmp_path):
    directory = checkpoint("llava")[1]
    target = renamed(directory, tmp_path / "more", lambda name: name)
    tensors = load_file(target / "model.safetensors")
    extra = {"vision_tower.embeddings.position_ids": torch.zeros(1, 17)}
    save_file({**tensors, **extra}, target / "model.safetensors", metadata={"format": "pt"})
    assert atb.load_model(target).unused_tensors == ("vision_tower.embeddings.position_ids",)
    extra = {"language_model.model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    save_file({**tensors, **extra}, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="no place for 1 tensor of its layers: .*q_proj.bias"):
        atb.load_model(target)


def test_a_configuration_that_drops_a_patch_is_refused(checkpoint, tmp_path):
    target = renamed(checkpoint("llava")[1], tmp_path / "full", lambda name: name)
    values = json.loads((target / "config.json").read_text())
    values["vision_feature_select_strategy"] = "full"
    (target / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="'full', which drops the first 0 tokens; the tower has 1 before the patches"):
        atb.load_model(target)


def test_a_model_of_ones_own_parts_says_what_saving_lacks(checkpoint, tmp_path):
    model = atb.load_model(checkpoint("llava")[1])
    model.checkpoint_config = None
    with pytest.raises(ValueError, match="model.checkpoint_config is None"):
        model.save_pretrained(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
