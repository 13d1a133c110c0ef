"""Every tower against transformers' own module with the same weights: tokens and gradients, packed and alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from atb_modules.convert.source import ConfigSource
from atb_modules.convert.vision import load_vision_tower, vision_family_of
from atb_modules.multimodal.vision import (
    Interpolation,
    PositionConfig,
    build_tower,
    pack_images,
    unpad_patches,
)
from atb_modules.testing import fresh_generator

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 24, "patch_size": 8}
QWEN = {"depth": 4, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}

FIXED = {
    "clip": (tf.CLIPVisionConfig, tf.CLIPVisionModel, {**SMALL, "intermediate_size": 48}),
    "dinov2": (tf.Dinov2Config, tf.Dinov2Model, {**SMALL, "mlp_ratio": 2}),
    "dinov2_registers": (tf.Dinov2WithRegistersConfig, tf.Dinov2WithRegistersModel, {**SMALL, "mlp_ratio": 2}),
    "dinov2_swiglu": (
        tf.Dinov2WithRegistersConfig,
        tf.Dinov2WithRegistersModel,
        {**SMALL, "mlp_ratio": 2, "use_swiglu_ffn": True, "num_register_tokens": 2, "qkv_bias": False},
    ),
    "siglip": (tf.SiglipVisionConfig, tf.SiglipVisionModel, {**SMALL, "image_size": 29, "intermediate_size": 48}),
}


def _qwen_models():
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as M25
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionConfig as C25
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel as M2
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionConfig as C2
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionConfig as C3
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel as M3

    wide = {"hidden_size": 32, "intermediate_size": 44, "out_hidden_size": 16}
    return {
        "qwen2_vl": (C2, M2, {**QWEN, "embed_dim": 32, "hidden_size": 16, "mlp_ratio": 2}),
        "qwen2_5_vl": (C25, M25, {**QWEN, **wide, "window_size": 16, "fullatt_block_indexes": [1, 3]}),
        "qwen3_vl": (
            C3,
            M3,
            {**QWEN, **wide, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
        ),
    }


QWENS = _qwen_models()


def build(entry, seed=0):
    config_class, model_class, options = entry
    torch.manual_seed(seed)
    model = model_class(config_class(**options)).eval()
    for parameter in model.parameters():  # transformers starts some at 0, which would hide a wrong place
        torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 0.5)
    return model


def tower_of(model, tmp_path, **options):
    model.save_pretrained(tmp_path)
    return load_vision_tower(tmp_path, **options)


def packed_images(generator, factor=8, channels=3):
    sizes = [(2, 3), (1, 1), (4, 2), (5, 5)]
    images = [torch.randn(channels, factor * h, factor * w, generator=generator) for h, w in sizes]
    images.insert(2, torch.randn(3, channels, factor, 2 * factor, generator=generator))  # a video of 3 frames
    return images


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


DINO_FILES = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value"}
DINO_FILES |= {"o_proj": "output.dense", "down_proj": "weights_out"}


def by_file_name(model, tensors):
    """What belongs to a model's parameters under the names of its file: DINOv2 has others than its own there."""
    if "dinov2" not in model.config.model_type:
        return tensors
    named = {}
    for name, tensor in tensors.items():
        *_, part, kind = name.split(".")
        if part == "up_proj":
            continue
        if part == "gate_proj":
            both = (tensor, tensors[name.replace("gate_proj", "up_proj")])
            named[name.replace("gate_proj", "weights_in")] = torch.cat(both)
        else:
            named[name.replace(f".{part}.", f".{DINO_FILES.get(part, part)}.")] = tensor
    return named


def same_gradients(model, tower, family):
    """Gradients of all parameters that the tower keeps, by the file's names."""
    with torch.no_grad():  # the slots are views of the parameters, so gradients put there come out under their names
        for parameter in tower.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    theirs = by_file_name(model, given)
    for name, grad in family.slots(tower).items():
        if name not in theirs:
            assert not grad.any(), name
        else:
            torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_tower_gives_the_last_hidden_state_without_prefix_tokens(name, tmp_path):
    model = build(FIXED[name])
    tower = tower_of(model, tmp_path)
    size = model.config.image_size
    pixels = torch.randn(2, 3, size, size, generator=fresh_generator())
    theirs = model(pixels).last_hidden_state[:, tower.num_prefix_tokens :]
    ours = tower(pixels)
    assert ours.shape == theirs.shape == (2, (size // 8) ** 2, tower.out_channels)
    close(ours, theirs)
    weight = torch.randn(ours.shape, generator=fresh_generator())
    (theirs * weight).sum().backward()
    (ours * weight).sum().backward()
    same_gradients(model, tower, vision_family_of(model.config.model_type))


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("select", [-1, -2, 0, 2, [-2, 1], -4])
def test_selected_layers_are_those_of_transformers_hidden_states(name, select, tmp_path):
    model = build(FIXED[name])
    tower = tower_of(model, tmp_path, select_layer=select)
    pixels = torch.randn(2, 3, model.config.image_size, model.config.image_size, generator=fresh_generator())
    states = model(pixels, output_hidden_states=True).hidden_states
    chosen = [select] if isinstance(select, int) else select
    theirs = torch.cat([states[i] for i in chosen], dim=-1)[:, tower.num_prefix_tokens :]
    assert tower.out_channels == theirs.shape[-1]
    close(tower(pixels), theirs)
    normed = tower_of(model, tmp_path, select_layer=select, final_norm=True)
    norm = model.layernorm if hasattr(model, "layernorm") else model.post_layernorm
    theirs = torch.cat([norm(states[i]) for i in chosen], dim=-1)
    close(normed(pixels), theirs[:, tower.num_prefix_tokens :])


def fed_order(model, theirs, grid):
    """Qwen2.5-VL returns its tokens window after window."""
    if not hasattr(model, "window_size"):
        return theirs
    from transformers.vision_utils import get_vision_window_index

    index, _ = get_vision_window_index(grid, model.spatial_merge_size, model.window_size, model.patch_size)
    unit = model.spatial_merge_unit
    return theirs.unflatten(0, (-1, unit))[index.argsort()].flatten(0, 1)


@pytest.mark.parametrize("name", QWENS)
def test_a_packed_tower_gives_the_tokens_before_the_merger(name, tmp_path):
    model = build(QWENS[name])
    tower = tower_of(model, tmp_path)
    pixels, grid = pack_images(packed_images(fresh_generator()), 4, merge_size=2, temporal_patch_size=2)
    theirs = fed_order(model, model(pixels, grid).last_hidden_state, grid)
    ours = tower(pixels, grid)
    assert ours.shape == theirs.shape == (pixels.shape[0], 32)
    close(ours, theirs)
    weight = torch.randn(ours.shape, generator=fresh_generator())
    (theirs * weight).sum().backward()
    (ours * weight).sum().backward()
    same_gradients(model, tower, vision_family_of(model.config.model_type))
    assert tower.unused_tensors and all("merger" in unused for unused in tower.unused_tensors)


@pytest.mark.parametrize("name", QWENS)
def test_packed_images_equal_the_same_images_alone_and_leave_each_other_alone(name, tmp_path):
    tower = tower_of(build(QWENS[name]), tmp_path).requires_grad_(False)
    images = packed_images(fresh_generator())
    pixels, grid = pack_images(images, 4, merge_size=2, temporal_patch_size=2)
    together = tower(pixels, grid)
    counts = grid.prod(-1).tolist()
    for image, part in zip(images, together.split(counts), strict=True):
        close(part, tower(*pack_images([image], 4, merge_size=2, temporal_patch_size=2)))
    changed = pixels.split(counts)
    other = tower(torch.cat([changed[0], changed[1] + 1.0, *changed[2:]]), grid)
    for index, (before, after) in enumerate(zip(together.split(counts), other.split(counts), strict=True)):
        assert torch.equal(before, after) == (index != 1)


def test_deepstack_layers_are_those_that_qwen3_vl_merges(tmp_path):
    model = build(QWENS["qwen3_vl"])
    tower = tower_of(model, tmp_path)
    pixels, grid = pack_images(packed_images(fresh_generator()), 4, merge_size=2, temporal_patch_size=2)
    output = model(pixels, grid)
    tokens, kept = tower.forward_intermediates(pixels, grid, model.config.deepstack_visual_indexes)
    close(tokens, output.last_hidden_state)
    for merger, state, theirs in zip(model.deepstack_merger_list, kept, output.deepstack_features, strict=True):
        close(merger(state), theirs)


@pytest.mark.parametrize("name", [*FIXED, *QWENS])
def test_slots_are_views_in_the_files_shapes_and_cover_every_parameter(name):
    entry = FIXED.get(name) or QWENS[name]
    model = build(entry)
    family = vision_family_of(model.config.model_type)
    tower = family.build(ConfigSource(model.config.to_dict(), "config.json"))
    slots = family.slots(tower)
    theirs = by_file_name(model, dict(model.named_parameters()))
    assert all(slot.shape == theirs[key].shape for key, slot in slots.items())
    for slot in slots.values():
        slot.fill_(3.0)
    assert all(bool((parameter == 3.0).all()) for parameter in tower.parameters())
    assert sum(slot.numel() for slot in slots.values()) == sum(p.numel() for p in tower.parameters())
    unused = {key.removeprefix("embeddings.").split(".")[0] for key in theirs if key not in slots}
    assert unused <= {"head", "merger", "deepstack_merger_list", "mask_token"}


@pytest.mark.parametrize("name", [*FIXED, *QWENS])
def test_what_slots_write_transformers_reads(name, tmp_path):
    entry = FIXED.get(name) or QWENS[name]
    tower = tower_of(build(entry), tmp_path)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.mul_(0.9)
    file = tmp_path / "model.safetensors"
    slots = vision_family_of(tower.config.family).slots(tower)
    save_file(load_file(file) | {key: slot.contiguous() for key, slot in slots.items()}, file, {"format": "pt"})
    model = entry[1].from_pretrained(tmp_path).eval()
    if name in QWENS:
        pixels, grid = pack_images(packed_images(fresh_generator()), 4, merge_size=2, temporal_patch_size=2)
        close(tower(pixels, grid), fed_order(model, model(pixels, grid).last_hidden_state, grid))
    else:
        pixels = torch.randn(1, 3, model.config.image_size, model.config.image_size, generator=fresh_generator())
        close(tower(pixels), model(pixels).last_hidden_state[:, tower.num_prefix_tokens :])


@pytest.mark.parametrize("name", ["dinov2", "dinov2_registers"])
@pytest.mark.parametrize("size", [(24, 24), (16, 40), (8, 8), (56, 48)])
def test_dinov2_positions_are_resampled_as_its_two_checkpoints_were_trained(name, size, tmp_path):
    model = build(FIXED[name])
    tower = tower_of(model, tmp_path)
    pixels = torch.randn(1, 3, *size, generator=fresh_generator())
    close(tower(pixels), model(pixels).last_hidden_state[:, tower.num_prefix_tokens :])
    assert tower.unused_tensors == ("embeddings.mask_token",)


def naflex_batch(generator):
    """Three images of different shapes as transformers pads them."""
    shapes = torch.tensor([[2, 5], [4, 4], [3, 1]])
    pixels = torch.randn(3, 18, 48, generator=generator)
    mask = (torch.arange(18) < shapes.prod(-1, keepdim=True)).int()
    return pixels * mask.unsqueeze(-1), mask, shapes


def siglip2(tmp_path, **options):
    sizes = {**SMALL, "patch_size": 4, "num_patches": 9, "intermediate_size": 48}
    sizes.pop("image_size")
    model = build((tf.Siglip2VisionConfig, tf.Siglip2VisionModel, sizes))
    return model, tower_of(model, tmp_path, **options)


def test_naflex_gives_the_real_tokens_of_transformers_padded_batch(tmp_path):
    model, tower = siglip2(tmp_path)
    pixels, mask, shapes = naflex_batch(fresh_generator())
    theirs = model(pixels, mask, shapes).last_hidden_state[mask.bool()]
    packed, grid = unpad_patches(pixels, mask, shapes)
    ours = tower(packed, grid)
    close(ours, theirs)
    weight = torch.randn(ours.shape, generator=fresh_generator())
    (theirs * weight).sum().backward()
    (ours * weight).sum().backward()
    same_gradients(model, tower, vision_family_of("siglip2_vision_model"))
    assert all(name.startswith("head.") for name in tower.unused_tensors)


def test_naflex_layers_are_those_of_hidden_states(tmp_path):
    model, tower = siglip2(tmp_path, select_layer=[-2, 0])
    pixels, mask, shapes = naflex_batch(fresh_generator())
    states = model(pixels, mask, shapes, output_hidden_states=True).hidden_states
    theirs = torch.cat([states[-2], states[0]], dim=-1)[mask.bool()]
    close(tower(*unpad_patches(pixels, mask, shapes)), theirs)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_the_vision_part_of_a_full_model_is_found(name, tmp_path):
    config_class, model_class = (tf.CLIPConfig, tf.CLIPModel) if name == "clip" else (tf.SiglipConfig, tf.SiglipModel)
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = build((config_class, model_class, {"text_config": text, "vision_config": FIXED[name][2]}))
    tower = tower_of(model, tmp_path)
    size = FIXED[name][2]["image_size"]
    pixels = torch.randn(2, 3, size, size, generator=fresh_generator())
    close(tower(pixels), model.vision_model(pixels).last_hidden_state[:, tower.num_prefix_tokens :])
    assert not any("text" in unused for unused in tower.unused_tensors)


FULL = {
    "qwen2_vl": tf.Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": tf.Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": tf.Qwen3VLForConditionalGeneration,
}


@pytest.mark.parametrize("name", FULL)
def test_the_tower_of_a_full_qwen_is_found(name, tmp_path):
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "vocab_size": 50, "head_dim": 8, "pad_token_id": 0}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config_class = FULL[name].config_class
    model = build((config_class, FULL[name], {"text_config": text, "vision_config": QWENS[name][2]}))
    tower = tower_of(model, tmp_path)
    pixels, grid = pack_images(packed_images(fresh_generator()), 4, merge_size=2, temporal_patch_size=2)
    visual = model.model.visual
    close(tower(pixels, grid), fed_order(visual, visual(pixels, grid).last_hidden_state, grid))
    assert tower.unused_tensors and all("merger" in unused for unused in tower.unused_tensors)


def test_the_tower_of_a_llava_is_found(tmp_path):
    text = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "vocab_size": 50, "pad_token_id": 0}
    vision = {"model_type": "clip_vision_model", **FIXED["clip"][2]}
    options = {"text_config": text, "vision_config": vision, "image_token_index": 40}
    model = build((tf.LlavaConfig, tf.LlavaForConditionalGeneration, options))
    tower = tower_of(model, tmp_path, select_layer=-2)
    pixels = torch.randn(2, 3, 24, 24, generator=fresh_generator())
    states = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
    close(tower(pixels), states[-2][:, 1:])
    assert not tower.unused_tensors


def test_a_frozen_tower_keeps_nothing_for_backward(tmp_path):
    tower = tower_of(build(FIXED["siglip"]), tmp_path).requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t), lambda t: t):
        out = tower(torch.randn(2, 3, 29, 29))
    assert not kept and not out.requires_grad
    pixels = torch.randn(2, 3, 29, 29, requires_grad=True)  # frozen, but asked for the gradient of its input
    tower(pixels).sum().backward()
    assert pixels.grad is not None and pixels.grad.abs().sum() > 0


@pytest.mark.parametrize("name", QWENS)
def test_packed_bfloat16_is_as_near_to_float32_as_transformers_is(name, tmp_path):
    model = build(QWENS[name])
    tower = tower_of(model, tmp_path).requires_grad_(False)
    pixels, grid = pack_images(packed_images(fresh_generator()), 4, merge_size=2, temporal_patch_size=2)
    exact = tower(pixels, grid)
    theirs = fed_order(model, model.bfloat16()(pixels, grid).last_hidden_state, grid).float()
    ours = load_vision_tower(tmp_path, dtype=torch.bfloat16)(pixels, grid)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 2**-8 * exact.abs().max()


@pytest.mark.parametrize("size", [(16, 40), (24, 24), (8, 8)])
def test_clip_takes_any_size_where_a_config_names_an_interpolation(size, tmp_path):
    model = build(FIXED["clip"])
    tower = tower_of(model, tmp_path)
    grid = PositionConfig(tower.config.positions.grid, Interpolation("bicubic"))
    other = build_tower(replace(tower.config, positions=grid))
    other.load_state_dict(tower.state_dict())
    pixels = torch.randn(1, 3, *size, generator=fresh_generator())
    theirs = model(pixels, interpolate_pos_encoding=True).last_hidden_state[:, 1:]
    close(other(pixels), theirs)


@pytest.mark.parametrize("name", ["siglip", "dinov2_registers"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name, tmp_path):
    model = build(FIXED[name])
    tower = tower_of(model, tmp_path)
    size = model.config.image_size
    pixels = torch.randn(2, 3, size, size, generator=fresh_generator())
    exact = tower(pixels).detach()
    theirs = model.bfloat16()(pixels.bfloat16()).last_hidden_state[:, tower.num_prefix_tokens :].float()
    ours = tower.bfloat16()(pixels.bfloat16()).float()
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 2**-8 * exact.abs().max()
