"""prefetch: one operator on the emulated NPU, nothing elsewhere, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from atb_modules.kernels.ascend.availability import assume_soc
from atb_modules.kernels.ascend.prefetch import prefetch

from .helpers import DEVICE

OPERATOR = "npu::npu_prefetch"


@pytest.mark.parametrize("most,expected", [(None, 96 * 64 * 2), (100, 100), (10**9, 96 * 64 * 2)])
def test_it_is_launched_once_and_changes_nothing(npu, monkeypatch, most, expected):
    sizes, launch = [], torch.ops.npu.npu_prefetch
    seen = SimpleNamespace(npu_prefetch=lambda *given: sizes.append(given[2:]) or launch(*given))
    monkeypatch.setattr("atb_modules.kernels.ascend.prefetch._NPU", seen)
    weight, x = torch.ones(96, 64, dtype=torch.half, device=DEVICE), torch.ones(3, 64, device=DEVICE)
    assert prefetch(weight, x, most) is None
    prefetch(weight.t(), x, most)
    assert npu.log.names.count(OPERATOR) == 2 and sizes == [(expected,)] * 2
    assert (weight.cpu() == 1).all() and (x.cpu() == 1).all()


def test_nothing_elsewhere(npu):
    weight = torch.ones(4, 4, device=DEVICE)
    prefetch(torch.ones(4, 4), torch.ones(2))
    prefetch(torch.ones(4, 4, device="meta"), torch.ones(2, device="meta"))
    prefetch(weight[:0], weight)
    with assume_soc("ascend310p"):
        prefetch(weight, weight)
    assert OPERATOR not in npu.log.names


@pytest.mark.parametrize(
    "arguments,error,message",
    [
        (([1], torch.ones(1)), TypeError, "tensor is list"),
        ((torch.ones(1), None), TypeError, "after is NoneType"),
        ((torch.ones(1), torch.ones(1, device="meta")), ValueError, "after is on meta; tensor is on cpu"),
        ((torch.ones(4, 4)[:, :2], torch.ones(1)), ValueError, r"strides \(4, 1\); allowed: a dense one"),
        ((torch.ones(1), torch.ones(1), 0), ValueError, "max_bytes is 0; allowed: a positive int"),
        ((torch.ones(1), torch.ones(1), 1.5), TypeError, "max_bytes is 1.5"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        prefetch(*arguments)
