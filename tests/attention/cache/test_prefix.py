"""Prefix sharing: pages are found by their whole history alone, and never once refilled."""

import copy

import pytest
import torch

from atb_modules.attention.cache import KVCacheManager

DIM = 8


def make_cache(page_size=16, num_pages=32, max_seq_len=512, **options):
    return KVCacheManager(max_seq_len, page_size, 1, 1, DIM, torch.float32, num_pages=num_pages, **options)


def keys_of(tokens, context=0.0):
    """Keys that depend on a token and all before it, as those of a model do."""
    history = torch.cumsum(torch.tensor(tokens, dtype=torch.float64).sin() + context, 0)
    return history[:, None, None].repeat(1, 1, DIM).float()


def compute(cache, tokens, context=0.0, **key):
    """Runs a prompt: takes what is shared, computes the rest; returns (row, shared tokens)."""
    row, shared = cache.join_prefix(tokens, **key)
    counts = [0] * cache.batch_size
    counts[row] = len(tokens) - shared
    k = keys_of(tokens, context)[shared:]
    cache.append(cache.step(counts), 0, k, k)
    expected = keys_of(tokens, context).transpose(0, 1)
    held = cache.gather(0, row)[0]
    assert torch.equal(held, expected[:, expected.shape[1] - held.shape[1] :])
    cache.register_prefix(row, tokens, **key)
    return row, shared


PROMPT = list(range(100, 140))


@pytest.mark.parametrize("shift", [256, 65536])
def test_ids_that_share_low_bytes_share_no_pages(shift):
    cache = make_cache()
    compute(cache, PROMPT)
    assert compute(cache, [token + shift for token in PROMPT])[1] == 0
    assert compute(cache, PROMPT)[1] == 32


def test_a_page_is_found_only_behind_its_own_history():
    a, b, c = ([value] * 16 for value in (1, 2, 3))
    cache = make_cache()
    compute(cache, a + b)
    assert compute(cache, c + b)[1] == 0
    assert cache.match_prefix(a + c) == 16
    assert cache.match_prefix(b) == 0


def test_salt_adapter_and_images_are_apart():
    cache = make_cache()
    image, other = torch.zeros(3, 4, 4), torch.zeros(3, 4, 4)
    other[2, 3, 3] = 1.0
    variants = [
        {},
        {"salt": "x"},
        {"adapter": "x"},
        {"salt": "x", "adapter": "x"},
        {"images": [(2, image)]},
        {"images": [(2, other)]},
        {"images": [(3, image)]},
        {"images": [(2, image.reshape(4, 3, 4))]},
        {"images": [(2, image.half())]},
        {"images": [(2, b"pixels")]},
    ]
    for index, key in enumerate(variants):
        assert compute(cache, PROMPT, context=float(index), **key)[1] == 0
        cache.begin(0)
    # A second image later in the prompt leaves the first page as it was.
    assert cache.match_prefix(PROMPT, images=[(2, image), (20, image)]) == 16
    cache.reset()
    for key in variants:
        assert compute(cache, PROMPT, **key)[1] == 0
        assert cache.match_prefix(PROMPT, **key) == 32


def test_a_half_filled_page_is_not_shared():
    cache = make_cache()
    compute(cache, PROMPT[:24])
    assert cache.match_prefix(PROMPT) == 16
    assert cache.match_prefix(PROMPT[:24]) == 16
    assert cache.match_prefix(PROMPT[:15]) == 0


def test_refilled_pages_are_forgotten():
    x, y = list(range(16)), list(range(50, 74))
    cache = make_cache(page_size=4, num_pages=6)
    compute(cache, x)
    cache.leave(0)
    stats = cache.memory_stats()
    assert (stats.pages_used, stats.pages_kept, stats.pages_free) == (0, 4, 2)
    compute(cache, y)
    cache.crop(12)
    assert cache.match_prefix(x) == 0
    cache.begin(0)
    assert compute(cache, x[:12])[1] == 0


def test_kept_pages_are_found_and_stay_while_they_are_used():
    x = list(range(16))
    cache = make_cache(page_size=4, num_pages=6)
    compute(cache, x)
    cache.begin(0)
    row, shared = cache.join_prefix(x)
    assert (row, shared) == (0, 16)
    cache.join()
    push = keys_of(list(range(8)))
    cache.append(cache.step([0, 8]), 0, push, push)
    assert torch.equal(cache.gather(0, 0)[0], keys_of(x).transpose(0, 1))
    assert cache.match_prefix(x) == 16


def test_pages_are_given_up_from_the_end_of_the_oldest_prompt():
    cache = make_cache(page_size=4, num_pages=6)
    first, second = [1] * 12, [2] * 12
    compute(cache, first)
    cache.begin(0)
    compute(cache, second)
    cache.begin(0)
    cache.begin(1)
    cache.step(8)
    assert cache.match_prefix(first) == 4
    assert cache.match_prefix(second) == 12


def test_a_cropped_page_that_is_written_again_is_forgotten():
    cache = make_cache(page_size=4, num_pages=8)
    prompt = list(range(8))
    compute(cache, prompt)
    cache.crop(6)
    other = [*prompt[:6], 77, 78]
    k = keys_of(other)[6:]
    cache.append(cache.step(2), 0, k, k)
    assert cache.match_prefix(prompt) == 4
    cache.register_prefix(0, other)
    assert cache.match_prefix(other) == 8
    assert torch.equal(cache.gather(0, 0)[0], keys_of(other).transpose(0, 1))


def test_one_pages_two_salts():
    """A page stands for one key only; a second registration of the same page does not find it wrongly."""
    cache = make_cache(page_size=4, num_pages=8)
    prompt = list(range(8))
    compute(cache, prompt)
    assert cache.register_prefix(0, prompt, salt="x") == 0
    assert cache.match_prefix(prompt, salt="x") == 0
    assert cache.match_prefix(prompt) == 8


def test_windowed_layers_share_what_they_can_still_see():
    cache = KVCacheManager(512, 4, 2, 1, DIM, torch.float32, num_pages=40, window=[None, 6])
    prompt = list(range(40))
    cache.begin(1)
    for token in range(40):
        step = cache.step(1)
        for layer in (0, 1):
            cache.append(step, layer, keys_of(prompt)[token : token + 1], keys_of(prompt)[token : token + 1])
    assert cache.register_prefix(0, prompt) == 40
    assert cache.match_prefix(prompt) == 40
    # What the window let go of was never registered: too short a prefix cannot be resumed.
    assert cache.match_prefix(prompt[:20]) == 0
    row, shared = cache.join_prefix(prompt)
    assert shared == 40
    assert torch.equal(cache.gather(0, row)[0], keys_of(prompt).transpose(0, 1))
    assert torch.equal(cache.gather(1, row)[0], keys_of(prompt)[32:].transpose(0, 1))
    cache.begin(0)
    cache.begin(2)
    cache.step([160, 0])
    assert cache.match_prefix(prompt) == 0


def test_a_deep_prompt_can_be_copied():
    cache = KVCacheManager(8192, 1, 1, 1, DIM, torch.float32)
    cache.begin(1)
    cache.step(5000)
    cache.register_prefix(0, list(range(5000)))
    assert copy.deepcopy(cache).match_prefix(list(range(5000))) == 5000
