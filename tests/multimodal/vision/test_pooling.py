"""Pooling, resampling and joining of token grids, against transformers' projectors and loops."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

from atb_modules.multimodal.vision import join_tiles, pool_tokens, pooled_grid, resample_tokens
from atb_modules.testing import fresh_generator


def draw(*shape, **options):
    return torch.randn(*shape, generator=fresh_generator(), **options)


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize(("grid", "stride"), [((4, 6), 2), ((5, 7), 2), ((3, 3), 3), ((6, 4), 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_equal_the_loop_with_gradients(mode, grid, stride, dtype):
    tokens = draw(2, grid[0] * grid[1], 3).to(dtype).requires_grad_()
    rows, columns = pooled_grid(grid, stride, mode)
    image = tokens.unflatten(1, grid)
    expected = torch.stack(
        [
            window.flatten(1, 2).mean(1) if mode == "avg" else window.flatten(1, 2).amax(1)
            for r in range(rows)
            for c in range(columns)
            for window in [image[:, r * stride : (r + 1) * stride, c * stride : (c + 1) * stride]]
        ],
        dim=1,
    )
    ours = pool_tokens(tokens, grid, stride, mode)
    assert ours.shape == (2, rows * columns, 3)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    if mode == "max" and dtype is torch.bfloat16:
        return  # equal maxima share a gradient or do not
    weight = draw(*ours.shape).to(dtype)
    (mine,) = torch.autograd.grad((ours * weight).sum(), tokens, retain_graph=True)
    (its,) = torch.autograd.grad((expected * weight).sum(), tokens)
    torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


def test_gemma_3_averages_the_same():
    config = Gemma3Config(
        text_config={"hidden_size": 8},
        vision_config={"hidden_size": 8, "image_size": 64, "patch_size": 8, "num_attention_heads": 2},
        mm_tokens_per_image=16,
    )
    projector = Gemma3MultiModalProjector(config)
    torch.nn.init.eye_(projector.mm_input_projection_weight)
    projector.mm_soft_emb_norm = torch.nn.Identity()
    tokens = draw(2, 64, 8)
    torch.testing.assert_close(pool_tokens(tokens, (8, 8), 2, "avg"), projector(tokens))


@pytest.mark.parametrize("side", [27, 4])
def test_llava_onevision_resamples_the_same(side):
    class Self:
        class config:
            class vision_config:
                image_size, patch_size = side * 14, 14

    tokens = draw(3, side * side, 5)
    ours = pool_tokens(tokens, (side, side), 2, "bilinear")
    assert ours.shape[1] == ((side + 1) // 2) ** 2
    torch.testing.assert_close(ours, LlavaOnevisionModel.apply_pooling(Self, tokens))


def test_resampling_keeps_axes_and_returns_its_own_grid_untouched():
    tokens = torch.arange(3.0).repeat_interleave(7).view(1, 21, 1)  # depends on the row only
    out = resample_tokens(tokens, (3, 7), (5, 4)).view(5, 4)
    torch.testing.assert_close(out, out[:, :1].expand_as(out))
    assert out[0, 0] < out[-1, 0]
    assert resample_tokens(tokens, (3, 7), (3, 7)) is tokens


def test_what_does_not_fit_names_both_numbers():
    tokens = torch.zeros(1, 12, 4)
    with pytest.raises(
        ValueError, match=r"tokens has shape \(1, 12, 4\); grid \(3, 5\) takes \(images, 15, channels\)"
    ):
        pool_tokens(tokens, (3, 5))
    with pytest.raises(ValueError, match=r"grid is \(1, 12\); avg pooling with stride 2"):
        pool_tokens(tokens, (1, 12))
    with pytest.raises(ValueError, match="mode is 'mean'; allowed: 'avg', 'bilinear', 'max'"):
        pool_tokens(tokens, (3, 4), 2, "mean")
    options = {"pinpoints": [(4, 8), (8, 4)], "tile_size": 4}
    with pytest.raises(ValueError, match=r"an image of 3 x 9 pixels makes 1 \+ 1 x 2 tiles"):
        join_tiles(torch.zeros(2, 4, 3), (3, 9), **options)
    with pytest.raises(ValueError, match="features has 5 tokens a tile; allowed: a square number"):
        join_tiles(torch.zeros(3, 5, 3), (3, 9), **options)
    with pytest.raises(ValueError, match=r"newline has shape \(4,\); features takes \(3,\)"):
        join_tiles(torch.zeros(3, 4, 3), (3, 9), newline=torch.zeros(4), **options)
