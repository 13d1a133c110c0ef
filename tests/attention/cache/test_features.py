"""FeatureStore: bounded, oldest first, copies of what it is given."""

import copy

import pytest
import torch

import atb_modules as atb
from atb_modules.attention.cache.features import FeatureStore


def features(value, tokens=4, layers=1):
    part = torch.full((tokens, 8), float(value))
    return part, (part + 0.5,) * layers


def test_what_is_put_is_found_and_belongs_to_the_store():
    store = FeatureStore()
    given = features(1)
    store.put(b"a", given)
    given[0].zero_()
    tokens, (layer,) = store.get(b"a")
    assert torch.equal(tokens, torch.ones(4, 8)) and torch.equal(layer, torch.full((4, 8), 1.5))
    assert store.get(b"b") is None and len(store) == 1 and store.bytes_used == 2 * 4 * 8 * 4


def test_the_one_not_asked_for_longest_goes_first():
    size = 2 * 4 * 8 * 4
    store = FeatureStore(2 * size + 1)
    for key in (b"a", b"b"):
        store.put(key, features(key[0]))
    store.get(b"a")
    store.put(b"c", features(3))
    assert store.get(b"b") is None and store.get(b"a") is not None and store.get(b"c") is not None
    store.put(b"large", features(9, tokens=100))
    assert store.get(b"large") is None and store.bytes_used == 2 * size
    store.clear()
    assert not len(store) and not store.bytes_used
    with pytest.raises(ValueError, match="max_bytes is -1"):
        FeatureStore(-1)


def test_a_cache_forgets_them_when_it_is_reset_and_takes_them_along_when_copied():
    cache = atb.KVCacheManager(16, 4, 1, 2, 8, torch.float32)
    cache.features.put(b"a", features(1))
    cache.begin(1)
    twin = copy.deepcopy(cache)
    cache.reset()
    assert cache.features.get(b"a") is None
    assert torch.equal(twin.features.get(b"a")[0], torch.ones(4, 8))
