"""The cache's methods: wrong kinds, rows that are not open, and steps that the cache has left behind."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from atb_modules.attention.cache import KVCacheManager


@pytest.fixture
def cache():
    manager = KVCacheManager(32, 4, 2, 4, 8, torch.float32, num_pages=40)
    manager.begin(2)
    manager.step([5, 3])
    return manager


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (True, TypeError, r"query_lengths must be an int or hold ints, got True \(bool\)"),
        (1.0, TypeError, "query_lengths must be an int or hold ints, got 1.0"),
        (None, TypeError, "got None"),
        ("11", TypeError, "got '11'"),
        ({0: 1, 1: 1}, TypeError, "got {0: 1"),
        ([1, True], TypeError, "query_lengths must hold ints, got True"),
        ([1, 1.0], TypeError, "query_lengths must hold ints, got 1.0"),
        (np.array([1, 1]), TypeError, "query_lengths must hold ints"),
        (np.int64(1), TypeError, "query_lengths must be an int or hold ints"),
        (torch.ones(2, 2, dtype=torch.int64), ValueError, "query_lengths must hold ints, got a tensor of shape"),
        (torch.tensor(1), ValueError, "query_lengths must hold ints, got a tensor of shape"),
        (-1, ValueError, "query_lengths must not be negative, got -1"),
        ([1], ValueError, "query_lengths has 1 entries, the cache has 2 rows"),
    ],
)
def test_step_lengths(cache, value, error, message):
    for call in (cache.step, lambda lengths: cache.layer_step(0, lengths)):
        with pytest.raises(error, match=message):
            call(value)
    assert cache.lengths == (5, 3)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("leave", ()),
        ("fork", ()),
        ("register_prefix", ([1, 2],)),
        ("crop", ()),
        ("drop", ()),
        ("gather", ()),
    ],
)
@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        (2, ValueError, "rows? has row 2, the cache has 2 open sequences"),
        (-1, ValueError, "rows? has row -1, the cache has 2 open sequences"),
        (True, TypeError, "got True"),
        (0.0, TypeError, "got 0.0"),
        ("0", TypeError, "got '0'"),
        ([True], TypeError, "must hold ints, got True"),
    ],
)
def test_rows(cache, name, arguments, row, error, message):
    calls = {
        "crop": lambda: cache.crop(1, row),
        "drop": lambda: cache.drop(1, row),
        "gather": lambda: cache.gather(0, row),
    }
    call = calls.get(name, lambda: getattr(cache, name)(row, *arguments))
    with pytest.raises(error, match=message):
        call()
    assert cache.lengths == (5, 3)


@pytest.mark.parametrize("name", ["leave", "reorder"])
@pytest.mark.parametrize(
    ("rows", "error"), [([0, 2], ValueError), ([0, 1.0], TypeError), ([False, 1], TypeError), (None, TypeError)]
)
def test_lists_of_rows(cache, name, rows, error):
    with pytest.raises(error, match="rows "):
        getattr(cache, name)(rows)
    assert cache.lengths == (5, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.begin(True), TypeError, "batch_size must be an int, got True"),
        (lambda c: c.begin(-1), ValueError, "batch_size must be at least 0"),
        (lambda c: c.join(1.0), TypeError, "count must be an int, got 1.0"),
        (lambda c: c.fork(0, 0), ValueError, "count must be at least 1"),
        (lambda c: c.fork([0, 1]), ValueError, "row must be one row, got 2"),
        (lambda c: c.fork([]), ValueError, "row must be one row, got 0"),
        (lambda c: c.gather(0, [0, 1]), ValueError, "row must be one row, got 2"),
        (lambda c: c.crop(True), TypeError, "keep must be an int or hold ints, got True"),
        (lambda c: c.crop(2.5), TypeError, "keep must be an int or hold ints, got 2.5"),
        (lambda c: c.drop([1, None]), TypeError, "tokens must hold ints, got None"),
        (lambda c: c.pages(True), TypeError, "layer_idx must be an int, got True"),
        (lambda c: c.pages("0"), TypeError, "layer_idx must be an int, got '0'"),
        (lambda c: c.pages(2), ValueError, "layer_idx is 2, the cache has layers 0 to 1"),
        (lambda c: c.step(0).slots(2), ValueError, "layer_idx is 2, the cache has layers 0 to 1"),
        (lambda c: c.step(0).block_table(-1), ValueError, "layer_idx is -1"),
        (lambda c: c.gather(0.0, 0), TypeError, "layer_idx must be an int, got 0.0"),
        (lambda c: c.match_prefix(None), TypeError, "token_ids must be an int or hold ints, got None"),
        (lambda c: c.match_prefix("text"), TypeError, "token_ids must"),
        (lambda c: c.match_prefix([True]), TypeError, "token_ids must hold ints, got True"),
        (lambda c: c.match_prefix(torch.ones(2, dtype=torch.bool)), ValueError, "token_ids must be integers of shape"),
        (lambda c: c.match_prefix([1], salt=3), TypeError, "salt must be a str or None, got 3"),
        (lambda c: c.join_prefix([1], adapter=["a"]), TypeError, "adapter must be a str or None"),
        (lambda c: c.match_prefix([1], images=3), TypeError, "images must be a sequence of"),
        (
            lambda c: c.match_prefix([1], images=[b"x"]),
            TypeError,
            r"images must hold pairs \(token, content\), got bytes",
        ),
        (lambda c: c.match_prefix([1], images=[(0.0, b"x")]), TypeError, "the token of an image must be an int"),
        (
            lambda c: c.register_prefix(0, [1], images=[(0, "x")]),
            TypeError,
            "image content is a Tensor or bytes, got str",
        ),
    ],
)
def test_calls(cache, call, error, message):
    with pytest.raises(error, match=message):
        call(cache)
    assert cache.lengths == (5, 3)


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        (1.5, TypeError, "window must be an int or hold ints, got 1.5"),
        (True, TypeError, "window must be an int, got True"),
        ("12", TypeError, "window must be an int or hold ints, got '12'"),
        ([1, 2.0], TypeError, "window must be an int, got 2.0"),
    ],
)
def test_windows(window, error, message):
    with pytest.raises(error, match=message):
        KVCacheManager(32, 4, 2, 4, 8, torch.float32, window=window)


def test_a_step_is_only_good_until_the_cache_moves_on(cache):
    """Written through a step that was left behind, keys would land in pages that may be another row's by now."""

    def write(step):
        cache.append(step, 0, *torch.zeros(2, step.total_tokens, 4, 8))

    changes = {
        "step": lambda: cache.step(1),
        "crop": lambda: cache.crop(1),
        "leave": lambda: cache.leave(0),
        "fork": lambda: cache.fork(0),
        "begin": lambda: cache.begin(2),
        "rollback": cache.undo_newest,
    }
    for change in changes.values():
        step = cache.step(1)
        write(step)
        change()
        with pytest.raises(ValueError, match="step of . tokens is not the newest one of this cache, or the cache was"):
            write(step)
        with pytest.raises(ValueError, match="not the newest one of this cache"):
            cache.rollback(step)


def test_steps_are_of_this_cache(cache):
    twin = copy.deepcopy(cache)
    step = twin.step(1)
    k = torch.zeros(2, 4, 8)
    with pytest.raises(ValueError, match="not the newest one of this cache"):
        cache.append(step, 0, k, k)
    cache.begin(2)
    for bad in (None, object(), 1):
        with pytest.raises(TypeError, match=f"step is {type(bad).__name__}; allowed: the CacheStep"):
            cache.append(bad, 0, k, k)
        with pytest.raises(TypeError, match=f"step is {type(bad).__name__}; allowed: the CacheStep"):
            cache.rollback(bad)


@pytest.mark.parametrize("bad", [[[0.0]], None, np.zeros((2, 4, 8), dtype=np.float32)])
def test_appended_keys_are_tensors(cache, bad):
    step, good = cache.step(1), torch.zeros(2, 4, 8)
    with pytest.raises(TypeError, match=f"k must be a Tensor, got {type(bad).__name__}"):
        cache.append(step, 0, bad, good)
    with pytest.raises(TypeError, match=f"v must be a Tensor, got {type(bad).__name__}"):
        cache.append(step, 0, good, bad)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
        ({"max_seq_len": 2.5}, TypeError, "max_seq_len must be an int, got 2.5"),
        ({"num_kv_heads": 3}, ValueError, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"dtype": torch.int8}, ValueError, "dtype must be one of .*got torch.int8"),
        ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype"),
        ({"window": [1, 2]}, ValueError, "window has 2 entries, num_layers is 1"),
        ({"window": -1}, ValueError, "window must be at least 0, got -1"),
        ({"num_pages": 0}, ValueError, "num_pages must be at least 1"),
    ],
)
def test_constructor_names_what_is_wrong(change, error, message):
    options = {
        "max_seq_len": 64,
        "page_size": 4,
        "num_layers": 1,
        "num_heads": 4,
        "head_dim": 8,
        "dtype": torch.float32,
    }
    with pytest.raises(error, match=message):
        KVCacheManager(**{**options, **change})
