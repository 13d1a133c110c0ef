"""timm's models as towers, alone and fused with ours."""

from __future__ import annotations

import pytest
import timm
import torch

from atb_modules.multimodal.vision import FusedTower, PositionConfig, TimmTower, VisionConfig, build_tower
from atb_modules.testing import fresh_generator

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 0}


def vit(**options):
    torch.manual_seed(0)
    return timm.models.VisionTransformer(**{**VIT, **options}).eval()


KINDS = {
    "class token": {},
    "registers": {"reg_tokens": 4, "no_embed_class": True},
    "no prefix": {"class_token": False, "global_pool": "avg"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_forward_features_without_prefix_tokens(kind):
    model = vit(**KINDS[kind])
    tower = TimmTower(model)
    assert tower.num_prefix_tokens == {"class token": 1, "registers": 5, "no prefix": 0}[kind]
    assert (tower.patch_size, tower.hidden_size, tower.out_channels) == (8, 24, 24)
    pixels = torch.randn(2, 3, 32, 32, generator=fresh_generator(), requires_grad=True)
    ours, theirs = tower(pixels), model.forward_features(pixels)[:, tower.num_prefix_tokens :]
    assert ours.shape == (2, 16, 24) and torch.equal(ours, theirs)
    (mine,) = torch.autograd.grad(ours.square().sum(), pixels, retain_graph=True)
    (its,) = torch.autograd.grad(theirs.square().sum(), pixels)
    assert torch.equal(mine, its)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("select", "blocks"), [(-2, [1]), (3, [2]), ([1, -1, 1], [0, 2, 0])])
@pytest.mark.parametrize("norm", [None, True])
def test_selected_layers_are_blocks_outputs(kind, select, blocks, norm):
    model = vit(**KINDS[kind])
    tower = TimmTower(model, select_layer=select, final_norm=norm)
    pixels = torch.randn(2, 3, 32, 32, generator=fresh_generator())
    outputs = []
    handles = [block.register_forward_hook(lambda _, __, out: outputs.append(out)) for block in model.blocks]
    model.forward_features(pixels)
    for handle in handles:
        handle.remove()
    finish = model.norm if norm else torch.nn.Identity()
    theirs = torch.cat([finish(outputs[index]) for index in blocks], dim=-1)[:, tower.num_prefix_tokens :]
    assert tower.out_channels == theirs.shape[-1]
    torch.testing.assert_close(tower(pixels), theirs, rtol=1e-5, atol=1e-5)


def test_blocks_behind_the_last_one_selected_do_not_run():
    tower = TimmTower(vit(), select_layer=[2, 1])
    ran = []
    for index, block in enumerate(tower.model.blocks):
        block.register_forward_hook(lambda *_, i=index: ran.append(i))
    tower(torch.randn(1, 3, 32, 32))
    assert ran == [0, 1]


def test_intermediates_come_in_the_order_asked_for():
    tower = TimmTower(vit())
    pixels = torch.randn(1, 3, 32, 32, generator=fresh_generator())
    tokens, (second, first) = tower.forward_intermediates(pixels, [1, 0])
    assert torch.equal(tokens, tower(pixels))
    torch.testing.assert_close(second, TimmTower(tower.model, select_layer=2)(pixels))
    torch.testing.assert_close(first, TimmTower(tower.model, select_layer=1)(pixels))


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_resnet"])
def test_models_by_name_with_maps_of_any_layout(name):
    tower = TimmTower(name).eval().requires_grad_(False)
    pixels = torch.randn(2, 3, 160, 160, generator=fresh_generator())
    grid = tower.grid_of(pixels)
    out = tower(pixels)
    assert out.shape == (2, grid[0] * grid[1], tower.out_channels) and not out.requires_grad
    features = tower.model.forward_features(pixels)
    if features.dim() == 4:
        assert torch.equal(out[:, grid[1] + 2], features[:, :, 1, 2])


def test_swin_has_its_channels_last():
    model = timm.models.SwinTransformer(
        img_size=32, patch_size=2, window_size=4, embed_dim=8, depths=(1, 1), num_heads=(1, 2), num_classes=0
    ).eval()
    tower = TimmTower(model)
    pixels = torch.randn(2, 3, 32, 32, generator=fresh_generator())
    features = model.forward_features(pixels)  # (B, H, W, C)
    assert tower(pixels).shape == (2, 64, 16) and tower.grid_of(pixels) == (8, 8)
    assert torch.equal(tower(pixels).unflatten(1, (8, 8)), features)


def test_what_timm_cannot_give_is_refused():
    with pytest.raises(ValueError, match="select_layer is 0, the embeddings"):
        TimmTower(vit(), select_layer=0)
    with pytest.raises(ValueError, match="select_layer is -5; a tower of 3 layers allows -4 to 3"):
        TimmTower(vit(), select_layer=-5)
    with pytest.raises(TypeError, match="model is Linear; allowed: a timm model"):
        TimmTower(torch.nn.Linear(2, 2))


def ours(side, patch=8):
    config = VisionConfig(
        "siglip", 16, 2, 2, 20, patch, image_size=(side, side), positions=PositionConfig((side // patch,) * 2)
    )
    return build_tower(config).eval()


def test_fused_towers_stand_side_by_side_with_grids_equal_or_resampled():
    first, second = TimmTower(vit()), ours(24)
    large, small = torch.randn(2, 3, 32, 32, generator=fresh_generator()), torch.randn(2, 3, 24, 24)
    same = FusedTower([first, ours(32)])
    assert same.out_channels == 40
    out = same(large)
    assert torch.equal(out, torch.cat([first(large), same.towers[1](large)], dim=-1))
    with pytest.raises(ValueError, match=r"towers\[1\] has a grid \(3, 3\) and towers\[0\] \(4, 4\); give grid="):
        FusedTower([first, second])([large, small])
    fused = FusedTower([first, second], grid=(4, 4))
    out = fused([large, small])
    assert out.shape == (2, 16, 40) and torch.equal(out[..., :24], first(large))
    image = second(small).unflatten(1, (3, 3)).permute(0, 3, 1, 2)
    resampled = torch.nn.functional.interpolate(image, (4, 4), mode="bilinear", antialias=True)
    torch.testing.assert_close(out[..., 24:], resampled.flatten(2).transpose(1, 2))
    out.sum().backward()
    assert all(p.grad is not None for p in second.layers.parameters())
    with pytest.raises(ValueError, match="pixel_values has 3 tensors; there are 2 towers"):
        fused([large, small, small])
    with pytest.raises(ValueError, match="towers is empty"):
        FusedTower([])


def timm_tower(name="test_vit", **options):
    torch.manual_seed(0)
    return TimmTower(timm.create_model(name, num_classes=0).eval(), **options)


def test_a_timm_tower_takes_pixels_of_any_dtype():
    """A processor gives float32 whatever the model is in; fused with another tower, both see the same tensor."""
    tower = timm_tower(dtype=torch.bfloat16)
    images = torch.rand(1, 3, 160, 160)
    assert torch.equal(tower(images), tower(images.bfloat16()))
    own = VisionConfig("test", 16, 1, 4, 24, 16, image_size=(160, 160))
    fused = FusedTower([tower, build_tower(own, dtype=torch.bfloat16)])
    assert fused(images).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_a_timm_tower_takes_no_image(name):
    tower = timm_tower(name)
    images = torch.rand(1, 3, 160, 160)
    assert tower(images[:0]).shape == (0, *tower(images).shape[1:])


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "eva02_tiny_patch14_224"])
def test_no_image_where_timm_itself_raises(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=0)
    tower = TimmTower(model)
    images = torch.zeros(0, 3, 224, 224, device="meta")
    rows, columns = tower.grid_of(images)
    assert tower(images).shape == (0, rows * columns, tower.out_channels)
    if tower.num_layers:
        assert tower.forward_intermediates(images, [0])[1][0].shape == (0, rows * columns, tower.hidden_size)


def test_a_timm_tower_names_what_it_refuses():
    tower = timm_tower()
    image = torch.zeros(1, 3, 160, 160)
    for pixels in (None, 3, image[0], image.byte(), image[:, :2], image.to("meta")):
        for call in (tower, tower.grid_of, lambda given: tower.forward_intermediates(given, [0])):
            with pytest.raises((ValueError, TypeError), match="pixel_values"):
                call(pixels)
    with pytest.raises(TypeError, match="layers is 3"):
        tower.forward_intermediates(image, 3)
    for images in (torch.zeros(1, 3, 161, 160), torch.zeros(1, 3, 15, 15)):
        for call in (tower, tower.grid_of):
            with pytest.raises(ValueError, match="pixel_values"):
                call(images)
    for options, error in (
        ({"model": "no_such_model"}, ValueError),
        ({"model": 3}, TypeError),
        ({"model": "test_vit", "dtype": torch.int8}, ValueError),
        ({"model": "test_vit", "device": "nowhere"}, ValueError),
        ({"model": "test_resnet", "select_layer": -2}, ValueError),
    ):
        with pytest.raises(error, match=list(options)[-1]):
            TimmTower(**options)
