"""What projectors, resamplers and gates refuse, by the name of the argument."""

import pytest
import torch

from atb_modules.multimodal.gated_cross_attention import GateConfig, GatedCrossAttention
from atb_modules.multimodal.projectors import (
    CAbstractor,
    MLPProjector,
    PatchMerger,
    PerceiverResampler,
    PooledProjector,
    QFormer,
)


def resampled(mask):
    return PerceiverResampler(16, 4, 1, num_heads=4)(torch.randn(2, 3, 16), mask)


def pooled(grid):
    return PooledProjector(8, 8, 2)(torch.randn(1, 16, 8), grid=grid)


def gated(images):
    return GatedCrossAttention(16, 4, kv_hidden_size=8)(torch.randn(2, 3, 16), images)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: resampled(torch.ones(1, 5)), ValueError, r"attention_mask has shape \(1, 5\); x has \(2, 3\) tokens"),
        (lambda: resampled("a"), TypeError, "attention_mask is str"),
        (lambda: pooled(5), ValueError, "grid is 5; allowed: "),
        (lambda: pooled((4, 4, 1)), ValueError, r"grid is \(4, 4, 1\); allowed: "),
        (lambda: pooled((2.0, 8)), TypeError, "grid's rows is 2.0"),
        (lambda: pooled((-4, -4)), ValueError, "grid's rows is -4"),
        (lambda: pooled((2, 4)), ValueError, r"x has 16 patches, not those of grid \(2, 4\)"),
        (lambda: PooledProjector(8, 8, 2, mode="sum"), ValueError, "mode is 'sum'; allowed: "),
        (lambda: PooledProjector(8, 0, 2), ValueError, "out_features is 0"),
        (lambda: PatchMerger(8, 8, eps="a"), TypeError, "eps is 'a'"),
        (lambda: QFormer("a", in_features=3), TypeError, "hidden_size is 'a'"),
        (lambda: CAbstractor(8, 8, 5), ValueError, "num_tokens is 5; allowed: a square"),
        (lambda: MLPProjector(8, 8, kind=3), ValueError, "kind is 3"),
        (lambda: gated(None), TypeError, "images is NoneType; allowed: a tensor"),
        (lambda: gated((torch.randn(2, 3, 8),)), TypeError, "images is tuple; allowed: a tensor"),
        (lambda: gated(torch.randn(3, 3, 8)), ValueError, r"has shape \(3, 3, 8\)"),
        (lambda: GateConfig(initial="a"), TypeError, "initial is 'a'"),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_grid_may_be_a_list():
    assert pooled([2, 8]).shape == (1, 4, 8)
