"""Mutating ops on two views of one pool do the same compiled as in eager mode (pytorch #153389, #130487)."""

from __future__ import annotations

import pytest
import torch

import atb_modules as atb
from atb_modules.ops import cache_append


def append_twice(pool, k, v, slots):
    """Two pages of one pool as views, written, read back, and written again from what was read."""
    first, second = pool[0], pool[1]
    cache_append(k, v, first, second, slots)
    read = first[0, :, :1].sum() + second[0, :, :1].sum()
    cache_append(v + read, k, second, first, slots)
    return read, first.sum() + second.sum()


@pytest.mark.parametrize("strategy", ["cpu", "torch"])
def test_two_views_of_one_pool(strategy):
    torch._dynamo.reset()
    compiled = torch.compile(append_twice, fullgraph=True, backend="aot_eager")
    with atb.use_strategy(cache=strategy):
        for batch in (1, 3, 3):
            k, v = torch.randn(2, batch, 2, 8)
            slots = torch.randperm(8)[:batch]
            pools = [torch.zeros(2, 2, 2, 4, 8) for _ in range(2)]
            eager = append_twice(pools[0], k, v, slots)
            traced = compiled(pools[1], k, v, slots)
            assert torch.equal(pools[0], pools[1])
            for a, b in zip(eager, traced, strict=True):
                assert torch.equal(a, b)
