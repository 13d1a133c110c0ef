"""Packing: order, segments, windows and padding of patches, against loops over images and windows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from atb_modules.multimodal.vision import (
    PatchEmbed,
    cut_patches,
    frame_starts,
    pack_images,
    pad_frames,
    patch_positions,
    read_grids,
    unpad_patches,
    window_partition,
)
from atb_modules.testing import fresh_generator


@pytest.mark.parametrize(("size", "patch"), [((8, 12), 4), ((9, 14), 4), ((4, 4), 4), ((6, 6), 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patch_embed_is_a_convolution(size, patch, dtype):
    images = torch.randn(3, 2, *size, generator=fresh_generator()).to(dtype)
    images = images.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()  # columns first in memory
    embed = PatchEmbed(patch, 5, in_channels=2, dtype=dtype)
    kernel = embed.proj.weight.detach().view(5, 2, patch, patch)
    theirs = F.conv2d(images, kernel, embed.proj.bias, stride=patch).flatten(2).transpose(1, 2)
    ours = embed(images)
    assert ours.shape == theirs.shape and ours.dtype == dtype
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    weight = torch.randn(ours.shape, generator=fresh_generator()).to(dtype)
    (mine,) = torch.autograd.grad((ours * weight).sum(), images, retain_graph=True)
    (its,) = torch.autograd.grad((theirs * weight).sum(), images)
    torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


def test_flattened_patches_and_temporal_ones_are_a_3d_convolution():
    frames = torch.randn(4, 3, 8, 16, generator=fresh_generator())
    embed = PatchEmbed(4, 6, temporal_patch_size=2, bias=False)
    patches, grid = pack_images([frames], 4, merge_size=2, temporal_patch_size=2)
    assert grid.tolist() == [[2, 2, 4]]
    kernel = embed.proj.weight.detach().view(6, 3, 2, 4, 4)
    theirs = F.conv3d(frames.transpose(0, 1).unsqueeze(0), kernel, stride=(2, 4, 4))[0]  # (6, 2, 2, 4)
    places = patch_positions(read_grids(grid), 2)
    frame = torch.arange(16) // 8
    expected = theirs[:, frame, places[:, 0], places[:, 1]].transpose(0, 1)
    torch.testing.assert_close(embed(patches), expected, rtol=1e-5, atol=1e-6)


def test_order_of_merge_blocks_is_the_drawing():
    places = patch_positions([(1, 4, 4)], 2)
    drawn = torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])
    assert torch.equal(drawn[places[:, 0], places[:, 1]], torch.arange(16))


def test_images_without_merging_are_cut_row_by_row():
    image = torch.randn(3, 8, 12, generator=fresh_generator())
    patches, grid = pack_images([image], 4)
    assert grid.tolist() == [[1, 2, 3]]
    assert torch.equal(patches, cut_patches(image.unsqueeze(0), 4)[0])


@pytest.mark.parametrize(
    ("frames", "depth", "padded"), [(1, 2, 2), (2, 2, 2), (3, 2, 4), (1, 3, 3), (4, 3, 6), (5, 3, 6), (6, 4, 8)]
)
def test_the_last_frame_fills_the_last_temporal_patch(frames, depth, padded):
    video = torch.randn(frames, 3, 4, 4, generator=fresh_generator())
    out = pad_frames(video, depth)
    assert out.shape[0] == padded
    assert torch.equal(out[:frames], video) and all(torch.equal(frame, video[-1]) for frame in out[frames:])


def test_frames_are_the_segments():
    assert frame_starts([(2, 2, 4), (1, 6, 2)]).tolist() == [0, 8, 16, 28]
    assert frame_starts([]).tolist() == [0]


def window_loop(grids, merge, window):
    """The partition block by block."""
    order, lengths, begin = [], [], 0
    for t, h, w in grids:
        rows, columns = h // merge, w // merge
        for frame in range(t):
            for top in range(0, rows, window):
                for left in range(0, columns, window):
                    inside = [
                        begin + (frame * rows + r) * columns + c
                        for r in range(top, min(top + window, rows))
                        for c in range(left, min(left + window, columns))
                    ]
                    order += inside
                    lengths.append(len(inside) * merge**2)
        begin += t * rows * columns
    return order, lengths


@pytest.mark.parametrize(
    "grids", [[(1, 4, 4)], [(1, 2, 2), (3, 6, 10)], [(2, 14, 2), (1, 8, 8)], [(1, 16, 18), (1, 2, 20), (1, 6, 6)]]
)
@pytest.mark.parametrize(("merge", "window"), [(2, 2), (1, 3), (2, 4)])
def test_windows_equal_the_loop_and_come_back(grids, merge, window):
    windows = window_partition(grids, merge, window)
    order, lengths = window_loop(grids, merge, window)
    assert windows.order.tolist() == order
    assert windows.cu_seqlens.diff().tolist() == lengths and min(lengths) > 0
    tokens = torch.randn(sum(t * h * w for t, h, w in grids), 3)
    assert torch.equal(windows.scatter(windows.gather(tokens)), tokens)


def test_window_partition_equals_transformers():
    from transformers.vision_utils import get_vision_window_index

    grids = torch.tensor([[1, 16, 18], [2, 6, 4], [1, 8, 8]])
    index, starts = get_vision_window_index(grids, spatial_merge_size=2, window_size=64, patch_size=8)
    windows = window_partition(read_grids(grids), 2, 4)
    assert torch.equal(windows.order, index) and torch.equal(windows.cu_seqlens, starts)


@pytest.mark.parametrize(
    ("grid", "patches", "message"),
    [
        ([[1, 4, 6]], 20, "pixel_values has 20 patches; grid_thw makes 24"),
        ([[1, 4, 4], [1, 3, 4]], 28, r"grid_thw\[1\] has 3 rows, which merge_size 2 does not divide"),
        ([[1, 4, 5]], 20, r"grid_thw\[0\] has 5 columns, which merge_size 2 does not divide"),
        ([[0, 4, 4]], 0, r"grid_thw\[0\] is \(0, 4, 4\); allowed: at least 1"),
        ([[4, 4]], 16, r"grid_thw has shape \(1, 2\); allowed: \(images, 3\)"),
    ],
)
def test_grids_that_do_not_fit_name_both_numbers(grid, patches, message):
    with pytest.raises(ValueError, match=message):
        read_grids(torch.tensor(grid), patches, 2)
    with pytest.raises(TypeError, match="grid_thw is torch.float32"):
        read_grids(torch.tensor([[1.0, 2.0, 2.0]]))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([torch.zeros(3, 8, 12)], r"images\[0\] is 12 pixels wide, which patch_size x merge_size 8 does not divide"),
        ([torch.zeros(3, 8, 8), torch.zeros(1, 8, 8)], r"images\[1\] has 1 channels; images\[0\] has 3"),
        ([torch.zeros(8, 8)], r"images\[0\] has shape \(8, 8\)"),
        ([], "images is empty"),
    ],
)
def test_images_that_cannot_be_packed_are_named(images, message):
    with pytest.raises(ValueError, match=message):
        pack_images(images, 4, merge_size=2)


def test_a_mask_that_is_not_its_shapes_is_refused():
    pixels, mask = torch.zeros(2, 6, 4), torch.ones(2, 6)
    with pytest.raises(
        ValueError, match=r"pixel_attention_mask has \[6, 6\] real patches; spatial_shapes makes \[6, 4"
    ):
        unpad_patches(pixels, mask, torch.tensor([[2, 3], [2, 2]]))
    mask[1, 4:] = 0
    patches, grid = unpad_patches(pixels, mask, torch.tensor([[2, 3], [2, 2]]))
    assert patches.shape == (10, 4) and grid.tolist() == [[1, 2, 3], [1, 2, 2]]


def test_patch_embed_names_channels_and_values():
    embed = PatchEmbed(4, 5)
    with pytest.raises(ValueError, match="pixel_values has 1 channels; the tower has 3"):
        embed(torch.zeros(1, 1, 8, 8))
    with pytest.raises(ValueError, match=r"pixel_values has shape \(7, 47\); allowed: \(patches, 48\), 3 channels x 1"):
        embed(torch.zeros(7, 47))
    with pytest.raises(TypeError, match="pixel_values is torch.uint8"):
        embed(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
