"""Towers: which layers run and are returned, what they refuse, and windows that cost what their patches cost."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import pytest
import torch

from atb_modules import explain
from atb_modules.multimodal.vision import (
    Interpolation,
    PositionConfig,
    VisionConfig,
    build_tower,
    pack_images,
    window_partition,
)
from atb_modules.ops import attention
from atb_modules.testing import fresh_generator

IMAGE = VisionConfig(
    "clip",
    16,
    3,
    2,
    24,
    4,
    image_size=(8, 12),
    class_token=True,
    num_registers=2,
    post_norm=True,
    last_is_normed=True,
    positions=PositionConfig((2, 3), Interpolation("bicubic")),
)
PACKED = VisionConfig("qwen", 16, 3, 2, 24, 4, temporal_patch_size=2, merge_size=2, rotary_base=10000.0)
WINDOWED = VisionConfig(
    "qwen", 16, 4, 2, 24, 4, merge_size=2, rotary_base=10000.0, window=16, full_attention_layers=(1, 3)
)


def images(*sizes, channels=3):
    generator = fresh_generator()
    return [torch.randn(channels, *size, generator=generator) for size in sizes]


def ran(tower, *inputs):
    """Numbers of the layers that a call runs."""
    seen = []
    for index, layer in enumerate(tower.layers):
        layer.register_forward_hook(lambda *_, i=index: seen.append(i))
    tower(*inputs)
    return seen


@pytest.mark.parametrize(("select", "last"), [(None, 3), (-1, 3), (-2, 2), (0, 0), (-4, 0), ([1, 2], 2), ([-3, 0], 1)])
def test_layers_behind_the_last_one_selected_do_not_run_but_are_saved(select, last):
    tower = build_tower(IMAGE, select_layer=select)
    assert ran(tower, torch.randn(1, 3, 8, 12)) == list(range(last))
    assert len(tower.layers) == 3 and any(key.startswith("layers.2.") for key in tower.state_dict())


def test_a_selection_is_the_states_side_by_side_in_the_order_given():
    tower = build_tower(IMAGE, select_layer=[2, 0, -1], final_norm=False)
    pixels = torch.randn(2, 3, 8, 12, generator=fresh_generator())
    parts = []
    for state in (2, 0, 3):
        one = build_tower(IMAGE, select_layer=state)
        one.load_state_dict(tower.state_dict())
        parts.append(one(pixels))
    assert tower.out_channels == 48 and tower.hidden_size == 16 and tower.num_prefix_tokens == 3
    torch.testing.assert_close(tower(pixels), torch.cat(parts, dim=-1))
    tokens, (first, last) = tower.forward_intermediates(pixels, [0, 2])
    torch.testing.assert_close(tokens, tower(pixels))
    torch.testing.assert_close(last, parts[2])
    assert first.shape == (2, 6, 16)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"select_layer": 4}, ValueError, "select_layer is 4; a tower of 3 layers allows -4 to 3"),
        ({"select_layer": [1, -5]}, ValueError, "select_layer is -5"),
        ({"select_layer": []}, ValueError, "select_layer is empty"),
        ({"select_layer": True}, TypeError, "select_layer is True"),
        ({"select_layer": "last"}, TypeError, "select_layer is 'last'"),
        ({"final_norm": 1}, TypeError, "final_norm is 1"),
        ({"dtype": torch.int8}, ValueError, "dtype is torch.int8"),
    ],
)
def test_options_that_are_none(options, error, message):
    with pytest.raises(error, match=message):
        build_tower(IMAGE, **options)


def test_a_norm_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="final_norm is True; this tower has no norm"):
        build_tower(PACKED, final_norm=True)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 8, 12), "pixel_values has 1 channels; the tower has 3"),
        ((1, 3, 8, 13), "pixel_values is 13 pixels wide; allowed: multiples of patch_size 4"),
        ((1, 3, 3, 12), "pixel_values is 3 pixels high"),
        ((3, 8, 12), r"pixel_values has shape \(3, 8, 12\); allowed: \(images, 3, height, width\)"),
    ],
)
def test_images_that_do_not_fit(shape, message):
    with pytest.raises(ValueError, match=message):
        build_tower(IMAGE)(torch.randn(shape))


def test_a_tower_of_one_size_takes_that_size_alone_even_with_pixels_left_over():
    config = VisionConfig("siglip", 16, 1, 2, 24, 4, image_size=(9, 9), positions=PositionConfig((2, 2)))
    tower = build_tower(config)
    pixels = torch.randn(1, 3, 9, 9, generator=fresh_generator())
    cut = copy.deepcopy(pixels)
    cut[..., 8, :] = cut[..., 8] = 7.0  # a convolution without padding never sees them
    assert torch.equal(tower(pixels), tower(cut))
    with pytest.raises(ValueError, match=r"pixel_values is 8 x 8 pixels; the tower takes \(9, 9\)"):
        tower(torch.randn(1, 3, 8, 8))


def test_patches_that_are_not_their_grids():
    tower = build_tower(PACKED)
    pixels, grid = pack_images(images((8, 8), (16, 8)), 4, merge_size=2, temporal_patch_size=2)
    with pytest.raises(ValueError, match="pixel_values has 11 patches; grid_thw makes 12"):
        tower(pixels[:11], grid)
    with pytest.raises(ValueError, match="which merge_size 2 does not divide"):
        tower(pixels[:4], torch.tensor([[1, 1, 4]]))
    with pytest.raises(ValueError, match=r"pixel_values has shape \(12, 95\); allowed: \(patches, 96\)"):
        tower(pixels[:, :95], grid)
    with pytest.raises(ValueError, match="layers has 3; a tower of 3 layers allows 0 to 2"):
        tower.forward_intermediates(pixels, grid, [3])


def test_no_images_give_no_tokens():
    assert build_tower(IMAGE)(torch.randn(0, 3, 8, 12)).shape == (0, 6, 16)
    empty = build_tower(WINDOWED, select_layer=[1, 2])(torch.randn(0, 48), torch.zeros(0, 3, dtype=torch.int64))
    assert empty.shape == (0, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads is 3; it must divide hidden_size 16"),
        ({"hidden_size": 12, "num_heads": 2}, "head_dim is 6; 2-D rotary positions need a multiple of 4"),
        ({"window": 7}, "window is 7 pixels; allowed: at least patch_size x merge_size, 8"),
        ({"full_attention_layers": (1, 4)}, r"full_attention_layers has \[4\]; allowed: 0 to 3"),
        ({"image_size": (8, 8)}, "windows and rotary positions need a packed tower"),
        ({"class_token": True}, "image_size is None, a packed tower"),
        ({"last_is_normed": True}, "last_is_normed is True and post_norm False"),
    ],
)
def test_configs_that_do_not_go_together(changes, message):
    from dataclasses import replace

    with pytest.raises(ValueError, match=message):
        replace(WINDOWED, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_and_frames_equal_each_other_packed_alone_and_strided(dtype):
    tower = build_tower(WINDOWED, dtype=dtype).requires_grad_(False)
    pixels, grid = pack_images(images((16, 24), (8, 8), (40, 16)), 4, merge_size=2)
    together = tower(pixels, grid)
    wide = torch.zeros(pixels.shape[0], 96)
    wide[:, ::2] = pixels
    assert torch.equal(tower(wide[:, ::2], grid), together)
    start = 0
    for row, part in zip(grid, together.split(grid.prod(-1).tolist()), strict=True):
        alone = tower(pixels[start : start + part.shape[0]], row[None])
        tolerance = 1e-5 if dtype is torch.float32 else 5e-2
        torch.testing.assert_close(part, alone, rtol=tolerance, atol=tolerance)
        start += part.shape[0]


def test_a_tower_is_saved_and_loaded_to_the_same():
    tower = build_tower(WINDOWED)
    file = io.BytesIO()
    torch.save(tower.state_dict(), file)
    file.seek(0)
    other = build_tower(WINDOWED)
    other.load_state_dict(torch.load(file))
    pixels, grid = pack_images(images((16, 24), (8, 8)), 4, merge_size=2)
    assert torch.equal(tower(pixels, grid), other(pixels, grid))
    assert set(tower.state_dict()) == set(dict(tower.named_parameters()))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_fixed_tower_compiles_to_one_graph(frozen):
    tower = build_tower(IMAGE, select_layer=[-2, 1], final_norm=True).requires_grad_(not frozen)
    pixels = torch.randn(2, 3, 8, 12, generator=fresh_generator())
    compiled = torch.compile(tower, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(pixels), tower(pixels))


@pytest.mark.parametrize("config", [PACKED, WINDOWED], ids=["whole", "windowed"])
def test_a_frozen_packed_tower_keeps_nothing_for_backward(config):
    tower = build_tower(config).requires_grad_(False)
    frames = config.temporal_patch_size
    pixels, grid = pack_images(images((8, 8), (16, 8)), 4, merge_size=2, temporal_patch_size=frames)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t), lambda t: t):
        out, (middle,) = tower.forward_intermediates(pixels, grid, [1])
    assert not kept and not out.requires_grad and not middle.requires_grad


@pytest.mark.parametrize("config", [IMAGE, PACKED, WINDOWED], ids=["fixed", "whole", "windowed"])
def test_states_kept_on_the_way_are_not_overwritten_by_later_layers(config):
    """Without gradients the layers work in place."""
    tower = build_tower(config, select_layer=[0, 1, 2, -1])
    inputs = (torch.randn(2, 3, 8, 12, generator=fresh_generator()),)
    if config is not IMAGE:
        frames = config.temporal_patch_size
        inputs = pack_images(images((8, 8), (16, 8)), 4, merge_size=2, temporal_patch_size=frames)
    before = [tensor.clone() for tensor in inputs]
    tokens, kept = tower.forward_intermediates(*inputs, [0, 1])
    frozen_tokens, frozen_kept = tower.requires_grad_(False).forward_intermediates(*inputs, [0, 1])
    for ours, theirs in zip((frozen_tokens, *frozen_kept), (tokens, *kept), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))


def ragged(patches=4096, window=64, last=40):
    """Two images in one pack: windows of 64 patches, the last one of each cut off."""
    half = patches // 2
    lengths = [window] * (half // window - 1) + [last]
    return torch.tensor([0, *lengths, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("strategy", ["auto", "cpu", "blocked"])
def test_window_attention_equals_the_loop_over_windows(strategy):
    starts = ragged(1024)
    total = int(starts[-1])
    q, k, v = torch.randn(3, 1, 2, total, 16, generator=fresh_generator())
    out, _ = attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, strategy=strategy)
    for begin, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        alone, _ = attention(q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end], strategy="reference")
        torch.testing.assert_close(out[:, :, begin:end], alone, rtol=1e-6, atol=1e-6)


def test_the_kernel_of_window_attention_is_named():
    starts = ragged()
    q = torch.randn(1, 2, int(starts[-1]), 16)
    table = explain("attention", q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts)
    assert table.chosen in ("cpu", "blocked")
    layers = explain(build_tower(WINDOWED), *pack_images(images((64, 64)), 4, merge_size=2))
    assert set(layers.chosen()["attention"]) <= {"cpu", "blocked", "sdpa"}


PROGRAM = """
import torch
from atb_modules.ops import attention

def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

starts = torch.tensor([0, *([64] * 31 + [40]) * 2]).cumsum(0).int()
total = int(starts[-1])
q, k, v = torch.randn(3, 1, 2, total, 16)
few = dict(cu_seqlens_q=starts[:3], cu_seqlens_k=starts[:3])
attention(q[:, :, :128], k[:, :, :128], v[:, :, :128], **few)
before = status("VmRSS")
out, _ = attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts)
print((status("VmHWM") - before) * 1024 - out.numel() * 4)
"""


def test_window_attention_never_makes_a_mask():
    printed = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    assert int(printed) < 32 * 2**20


def test_windows_are_permuted_once_a_forward(monkeypatch):
    import atb_modules.multimodal.vision.packing as packing

    calls = []
    original = packing._by_blocks
    monkeypatch.setattr(packing, "_by_blocks", lambda *a: calls.append(a[0].shape) or original(*a))
    tower = build_tower(WINDOWED)
    pixels, grid = pack_images(images((16, 24)), 4, merge_size=2)
    tower(pixels, grid)
    assert len(calls) == 3  # tokens in, their places, tokens back; however many layers
    assert window_partition([(1, 4, 6)], 2, 2).cu_seqlens.tolist() == [0, 16, 24]
