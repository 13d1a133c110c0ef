"""Learned positions resampled to any grid, against torch, timm and transformers; 2-D rotary tables."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from atb_modules.multimodal.vision import (
    Interpolation,
    LearnedPositions,
    PositionConfig,
    interpolate_positions,
    rotary_tables_2d,
)
from atb_modules.testing import fresh_generator

TIMM = Interpolation("bicubic", antialias=True)
ALL = [
    Interpolation(mode, antialias, corners)
    for mode in ("bilinear", "bicubic")
    for antialias, corners in ((False, False), (True, False), (False, True))
]
TARGETS = [(3, 7), (7, 3), (61, 61), (1, 5), (5, 1), (1, 1)]


def table_of(grid):
    """100 * row + column, and a channel of the row alone."""
    rows = torch.arange(grid[0], dtype=torch.float32)[:, None].expand(grid)
    columns = torch.arange(grid[1], dtype=torch.float32)[None].expand(grid)
    return torch.stack((100 * rows + columns, rows), dim=-1).flatten(0, 1)


@pytest.mark.parametrize("interpolation", ALL, ids=str)
@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (14, 14)])
@pytest.mark.parametrize("target", TARGETS)
def test_resampling_is_torchs_by_size_with_the_axes_in_place(interpolation, grid, target):
    table = table_of(grid)
    ours = interpolate_positions(table, grid, target, interpolation)
    image = table.unflatten(0, grid).permute(2, 0, 1)[None]
    options = {"align_corners": interpolation.align_corners, "antialias": interpolation.antialias}
    theirs = F.interpolate(image, size=target, mode=interpolation.mode.value, **options)
    assert ours.shape == (target[0] * target[1], 2)
    expected = table if target == grid else theirs[0].permute(1, 2, 0).flatten(0, 1)
    assert torch.equal(ours, expected)
    rows = ours.unflatten(0, target)[..., 1]  # depends on the row only: constant along columns
    torch.testing.assert_close(rows, rows[:, :1].expand_as(rows), rtol=1e-5, atol=1e-4)


def test_its_own_grid_returns_the_table_itself():
    table = table_of((3, 7))
    assert interpolate_positions(table, (3, 7), (3, 7), TIMM) is table


@pytest.mark.parametrize("target", TARGETS)
def test_timm(target):
    table = torch.randn(1 + 25, 8, generator=fresh_generator())
    theirs = resample_abs_pos_embed(table[None], list(target), num_prefix_tokens=1)[0]
    positions = LearnedPositions(8, PositionConfig((5, 5), TIMM), num_prefix=1)
    positions.weight.data.copy_(table)
    torch.testing.assert_close(torch.cat((positions.prefix(), positions(target))), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_qwen3_vl_gathers_the_same_with_gradients(target):
    table = torch.randn(25, 8, generator=fresh_generator(), requires_grad=True)
    grid = torch.tensor([[1, *target]])
    index, weight = get_vision_interpolation_indices_and_weights(grid, 5, align_corners=True)
    theirs = (table[index] * weight.unsqueeze(-1)).sum(1)
    ours = interpolate_positions(table, (5, 5), target, Interpolation("bilinear", align_corners=True))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    factor = torch.randn(ours.shape, generator=fresh_generator())
    (mine,) = torch.autograd.grad((ours * factor).sum(), table, retain_graph=True)
    (its,) = torch.autograd.grad((theirs * factor).sum(), table)
    # sums of up to 600 float32 terms each: against float64 both are off by up to 5e-5
    torch.testing.assert_close(mine, its, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_siglip2_weighs_the_same(target):
    table = torch.randn(25, 8, generator=fresh_generator())
    resize = Siglip2VisionEmbeddings.resize_positional_embeddings
    theirs = resize(table.view(5, 5, 8), torch.tensor([target]), target[0] * target[1])[0]
    ours = interpolate_positions(table, (5, 5), target, Interpolation("bilinear", antialias=True))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_half_precision_tables_are_resampled_in_float32():
    table = torch.randn(25, 8, generator=fresh_generator()).bfloat16()
    ours = interpolate_positions(table, (5, 5), (3, 4), TIMM)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, interpolate_positions(table.float(), (5, 5), (3, 4), TIMM).bfloat16())


def test_what_cannot_be_resampled_says_so():
    positions = LearnedPositions(8, PositionConfig((5, 4)))
    assert positions((5, 4)).shape == (20, 8)
    with pytest.raises(ValueError, match="the grid has 4 x 5 patches; the positions are for 5 x 4"):
        positions((4, 5))
    with pytest.raises(ValueError, match=r"table has shape \(19, 8\); grid \(5, 4\) takes \(20, channels\)"):
        interpolate_positions(torch.zeros(19, 8), (5, 4), (2, 2), TIMM)
    with pytest.raises(ValueError, match="target's rows is 0"):
        interpolate_positions(torch.zeros(20, 8), (5, 4), (0, 2), TIMM)
    with pytest.raises(ValueError, match="antialias and align_corners are both True"):
        Interpolation("bilinear", antialias=True, align_corners=True)
    with pytest.raises(ValueError, match="mode is 'nearest'; allowed: 'bilinear', 'bicubic'"):
        Interpolation("nearest")


def test_rotary_angles_turn_a_quarter_by_row_and_a_quarter_by_column():
    places = torch.tensor([[0, 0], [3, 0], [0, 5], [2, 7]])
    cos, sin = rotary_tables_2d(places, 12, base=100.0)
    frequencies = 100.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    angles = torch.cat((places[:, :1] * frequencies, places[:, 1:] * frequencies), dim=-1)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="head_dim is 10; allowed: a multiple of 4"):
        rotary_tables_2d(places, 10)
