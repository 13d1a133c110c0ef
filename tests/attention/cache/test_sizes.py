"""Caches of sizes that no machine has: refused at once, by name, and without a change to what is there."""

from __future__ import annotations

import pytest
import torch

from atb_modules import KVCacheManager
from atb_modules.attention.cache.sizes import MAX_ROWS

SIZES = {"max_seq_len": 64, "page_size": 8, "num_layers": 2, "num_heads": 2, "head_dim": 4, "dtype": torch.float32}


def build(**changes):
    return KVCacheManager(**{**SIZES, **changes})


@pytest.mark.parametrize("size", [2**40, 10**30])
@pytest.mark.parametrize("name", ["max_seq_len", "page_size", "num_layers", "num_heads", "head_dim", "num_pages"])
def test_single_sizes_are_bounded(name, size):
    with pytest.raises(ValueError, match=f"{name} must be at most .*, got {size}"):
        build(**{name: size})


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 2**31 - 1, "num_pages": 2**31 - 1},
        {"head_dim": 2**31 - 1, "num_pages": 2**20},
        {"head_dim": 2**31 - 1, "num_heads": 2**31 - 1, "page_size": 2**31 - 1},
    ],
)
def test_sizes_together_name_the_bytes(sizes):
    page = {**SIZES, "num_pages": 8, **sizes}
    page["num_pages"] = sizes.get("num_pages", 1)
    count = 2 * 2 * page["num_pages"] * page["num_heads"] * page["page_size"] * page["head_dim"] * 4
    with pytest.raises(ValueError, match=f"num_pages=.*head_dim={page['head_dim']} in torch.float32 .*{count} bytes"):
        build(**sizes)


@pytest.mark.parametrize("rows", [MAX_ROWS + 1, 2**30, 2**40])
@pytest.mark.parametrize("method", ["begin", "join", "fork"])
def test_rows_beyond_the_limit_are_refused_and_change_nothing(method, rows):
    cache = build()
    cache.begin(2)
    cache.step([3, 5])
    with pytest.raises(ValueError, match="allowed: 65536 sequences|must be at most"):
        cache.fork(0, rows) if method == "fork" else getattr(cache, method)(rows)
    assert cache.lengths == (3, 5)
    cache.reorder([1, 1, 0])
    assert cache.lengths == (5, 5, 3)


def test_a_pool_that_cannot_grow_stays():
    cache = build(head_dim=2**20)
    with pytest.raises(ValueError, match="num_pages=2147483647, .*bytes"):
        cache.grow(2**31 - 1)
    assert cache.num_pages == 8 and cache.pages(1)[0].shape[0] == 8
    cache.begin(1)
    cache.step(64)
