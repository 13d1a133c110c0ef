"""KVCacheManager: contents, page accounting and errors, each against plain tensors."""

import copy
import pickle

import pytest
import torch

from atb_modules.attention.cache import KVCacheManager, OutOfPagesError

HEADS, DIM = 2, 8


def make_cache(page_size=4, num_layers=1, max_seq_len=64, num_pages=None, window=None, dtype=torch.float32):
    return KVCacheManager(
        max_seq_len,
        page_size,
        num_layers,
        4,
        DIM,
        dtype,
        num_kv_heads=HEADS,
        num_pages=num_pages,
        window=window,
    )


def push(cache, counts, generator, layers=None):
    """One step with random keys and values; returns (k, v) of each layer, packed."""
    step = cache.step(counts)
    written = []
    for layer in range(cache.num_layers) if layers is None else layers:
        k = torch.randn(step.total_tokens, HEADS, DIM, generator=generator).to(cache.dtype)
        v = torch.randn(step.total_tokens, HEADS, DIM, generator=generator).to(cache.dtype)
        cache.append(step, layer, k, v)
        written.append((k, v))
    return written


def assert_holds(cache, layer, row, k):
    """The newest tokens of `row` are those of k (tokens, heads, dim): all, or all that a window kept."""
    held, _ = cache.gather(layer, row)
    expected = k.transpose(0, 1)
    assert held.shape[1] <= expected.shape[1]
    torch.testing.assert_close(held, expected[:, expected.shape[1] - held.shape[1] :], rtol=0, atol=0)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20260701)


def test_step_describes_the_packed_tokens(generator):
    cache = make_cache()
    cache.begin(3)
    push(cache, [5, 0, 2], generator)
    step = cache.step([1, 3, 2])
    assert step.past_lengths == (5, 0, 2)
    assert step.cu_seqlens_q.tolist() == [0, 1, 4, 6]
    assert step.kv_lengths.tolist() == [6, 3, 4]
    assert step.positions.tolist() == [5, 0, 1, 2, 2, 3]
    assert (step.max_query_length, step.max_kv_length) == (3, 6)
    assert step.cu_seqlens_q.dtype == step.kv_lengths.dtype == step.block_table(0).dtype == torch.int32
    assert step.positions.dtype == step.slots(0).dtype == torch.int64
    assert step.block_table(0).is_contiguous()
    rows = torch.tensor([0, 1, 1, 1, 2, 2])
    pages = step.block_table(0)[rows, step.positions // 4]
    assert torch.equal(pages * 4 + step.positions % 4, step.slots(0))


def test_one_token_step_equals_the_ragged_way(generator):
    cache = make_cache()
    cache.begin(3)
    push(cache, [3, 4, 9], generator)
    twin = copy.deepcopy(cache)
    plain = cache.step(1)
    cache_slots, positions = plain.slots(0), plain.positions
    twin.step([1, 1, 0])
    first = torch.cat([cache_slots[:2], positions[:2]])
    twin.rollback(twin._newest)
    ragged = twin.step([1, 1, 2])
    assert torch.equal(first, torch.cat([ragged.slots(0)[:2], ragged.positions[:2]]))
    assert ragged.slots(0)[2] == cache_slots[2]


def test_append_moves_nothing(generator):
    cache = make_cache(num_pages=8)
    cache.begin(2)
    k_pages, v_pages = cache.pages(0)
    addresses = k_pages.data_ptr(), v_pages.data_ptr()
    k_pages.zero_()
    push(cache, [7, 3], generator)
    before = k_pages.clone()
    step = cache.step(1)
    cache.append(step, 0, torch.ones(2, HEADS, DIM), torch.ones(2, HEADS, DIM))
    changed = (k_pages != before).any(-1).any(1).nonzero().tolist()
    assert sorted(page * 4 + offset for page, offset in changed) == sorted(step.slots(0).tolist())
    assert (cache.pages(0)[0].data_ptr(), cache.pages(0)[1].data_ptr()) == addresses


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_sequence_never_holds_a_page_more_than_it_needs(page_size, generator):
    cache = make_cache(page_size=page_size, num_layers=2, max_seq_len=50, num_pages=120)
    cache.begin(2)
    for counts in ([1, 3], [1, 1], [16, 0], [1, 1], [7, 9]):
        push(cache, counts, generator)
        need = sum(-(-length // page_size) for length in cache.lengths)
        assert cache.memory_stats().pages_used == 2 * need
    stats = cache.memory_stats()
    assert stats.bytes_used == stats.pages_used * 2 * HEADS * page_size * DIM * 4
    assert stats.bytes_used - stats.bytes_wasted == sum(cache.lengths) * 2 * 2 * HEADS * DIM * 4
    assert stats.bytes_reserved == sum(p.numel() * 4 for layer in (0, 1) for p in cache.pages(layer))


def test_crop_and_drop(generator):
    """Cropping to nothing keeps nothing, dropping more than there is leaves nothing stale."""
    cache = make_cache()
    for change, length in [
        (lambda: cache.crop(0), 0),
        (lambda: cache.crop(3), 3),
        (lambda: cache.drop(5), 6),
        (lambda: cache.drop(99), 0),
    ]:
        cache.begin(1)
        ((k, _),) = push(cache, [11], generator)
        change()
        assert cache.lengths == (length,)
        assert cache.memory_stats().pages_used == -(-length // 4)
        ((more, _),) = push(cache, [6], generator)
        assert_holds(cache, 0, 0, torch.cat([k[:length], more]))
        assert cache.gather(0, 0)[0].shape[1] == length + 6


def test_crop_after_a_window_rolled(generator):
    cache = make_cache(window=7)
    cache.begin(1)
    ((k, _),) = push(cache, [40], generator)
    cache.drop(6)
    ((more, _),) = push(cache, [3], generator)
    assert_holds(cache, 0, 0, torch.cat([k[:34], more]))
    assert cache.gather(0, 0)[0].shape[1] >= 10
    # Positions 0 to 27 are let go of at this step: position 33 and on can still see all they need.
    push(cache, [1], generator)
    first_kept = 38 - cache.gather(0, 0)[0].shape[1]
    floor = first_kept + 7
    with pytest.raises(ValueError, match=rf"cannot go back to {floor - 1}.*lengths {floor} to 38, or 0"):
        cache.crop(floor - 1)
    assert cache.lengths == (38,)
    cache.crop(floor)
    cache.crop(0)
    ((k, _),) = push(cache, [9], generator)
    assert_holds(cache, 0, 0, k)
    assert cache.gather(0, 0)[0].shape[1] == 9


def test_window_frees_pages_and_keeps_what_is_visible(generator):
    cache = make_cache(num_layers=3, max_seq_len=200, window=[None, 9, None])
    cache.begin(1)
    past = {0: [], 1: []}
    for count in [13, *[1] * 60, 20, *[1] * 5]:
        before = cache.lengths[0]
        written = push(cache, [count], generator)
        for layer in past:
            past[layer].append(written[layer][0])
            assert_holds(cache, layer, 0, torch.cat(past[layer]))
        assert cache.gather(1, 0)[0].shape[1] >= count + min(9, before)
        groups = {group.window: group for group in cache.memory_stats().groups}
        assert groups[None].pages_used == -(-cache.lengths[0] // 4)
        # What the step's first query sees and what the step brings, at any alignment to pages.
        assert groups[9].pages_used <= -(-(9 + count) // 4) + 1
    assert groups[None].layers == (0, 2)


def test_held_windows_can_be_cropped_back(generator):
    cache = make_cache(window=7, num_pages=20)
    cache.begin(1)
    ((k, _),) = push(cache, [15], generator)
    cache.hold_windows(True)
    parts = [k, *(push(cache, [1], generator)[0][0] for _ in range(25))]
    assert cache.memory_stats().pages_used == 10
    cache.crop(17)
    held = torch.cat(parts)[:17]
    assert_holds(cache, 0, 0, held)
    assert cache.gather(0, 0)[0].shape[1] == 17
    cache.let_go()
    assert cache.memory_stats().pages_used == 3
    cache.hold_windows(False)
    ((more, _),) = push(cache, [9], generator)
    assert_holds(cache, 0, 0, torch.cat([held, more]))
    push(cache, [1], generator)
    assert cache.memory_stats().pages_used == 3
    with pytest.raises(TypeError, match="hold is 1"):
        cache.hold_windows(1)


def test_fork_shares_pages_and_copies_only_the_last_one(generator):
    cache = make_cache(num_layers=2, num_pages=20)
    cache.begin(1)
    (first, second) = push(cache, [10], generator)
    assert cache.fork(0, 2) == [1, 2]
    stats = cache.memory_stats()
    assert (stats.pages_used, stats.pages_shared) == (6, 6)
    more = push(cache, [1, 1, 0], generator)
    assert cache.memory_stats().pages_used == 2 * (3 + 2)
    for layer, base in enumerate((first[0], second[0])):
        assert_holds(cache, layer, 0, torch.cat([base, more[layer][0][:1]]))
        assert_holds(cache, layer, 1, torch.cat([base, more[layer][0][1:]]))
        assert_holds(cache, layer, 2, base)
    push(cache, [0, 0, 1], generator)
    # The last one to write finds the page its own and copies nothing.
    assert cache.memory_stats().pages_used == 2 * (3 + 2)
    assert cache.memory_stats().pages_shared == 2 * 2


def test_reorder_join_leave(generator):
    cache = make_cache(num_pages=40)
    cache.begin(3)
    ((k, _),) = push(cache, [5, 6, 7], generator)
    parts = list(k.split([5, 6, 7]))
    cache.reorder([2, 0, 0, 2])
    parts = [parts[2], parts[0], parts[0], parts[2]]
    assert cache.lengths == (7, 5, 5, 7)
    ((more, _),) = push(cache, 2, generator)
    parts = [torch.cat(pair) for pair in zip(parts, more.split(2), strict=True)]
    cache.leave([0, 2])
    parts = [parts[1], parts[3]]
    assert cache.join() == [2]
    ((more, _),) = push(cache, [1, 1, 1], generator)
    for row, expected in enumerate([*[torch.cat(p) for p in zip(parts, more.split(1), strict=False)], more[2:]]):
        assert_holds(cache, 0, row, expected)
    cache.begin(0)
    assert cache.memory_stats().pages_used == 0


def test_a_full_pool_loses_nothing(generator):
    cache = make_cache(num_pages=5)
    cache.begin(2)
    ((k, _),) = push(cache, [8, 7], generator)
    cache.fork(1)
    stats = cache.memory_stats()
    with pytest.raises(OutOfPagesError, match=r"needs 2 more page\(s\) a layer, 1 of num_pages=5 are free") as raised:
        cache.step([1, 1, 0])
    assert (raised.value.needed, raised.value.available) == (2, 1)
    assert pickle.loads(pickle.dumps(raised.value)).needed == 2
    assert cache.lengths == (8, 7, 7) and cache.memory_stats() == stats
    for row, part in enumerate([k[:8], k[8:], k[8:]]):
        assert_holds(cache, 0, row, part)
    ((more, _),) = push(cache, [0, 1, 0], generator)
    assert_holds(cache, 0, 1, torch.cat([k[8:], more]))
    assert_holds(cache, 0, 2, k[8:])
    with pytest.raises(OutOfPagesError):
        cache.step([1, 0, 0])
    cache.leave(1)
    push(cache, [1, 1], generator)


def test_rollback(generator):
    cache = make_cache(window=[5], num_pages=9)
    cache.begin(2)
    ((k, _),) = push(cache, [9, 2], generator)
    stats = cache.memory_stats()
    step = cache.step([6, 1])
    cache.append(step, 0, torch.zeros(7, HEADS, DIM), torch.zeros(7, HEADS, DIM))
    cache.rollback(step)
    assert cache.lengths == (9, 2)
    assert cache.memory_stats().pages_used <= stats.pages_used
    ((more, _),) = push(cache, [1, 1], generator)
    assert_holds(cache, 0, 0, torch.cat([k[:9], more[:1]]))
    assert_holds(cache, 0, 1, torch.cat([k[9:], more[1:]]))
    with pytest.raises(ValueError, match="not the newest"):
        cache.rollback(step)
    step = cache.step(1)
    cache.join()
    with pytest.raises(ValueError, match="cache was changed"):
        cache.rollback(step)


def test_layer_step_is_shared_by_layers_until_one_comes_again():
    cache = make_cache(num_layers=3)
    assert [cache.register_layer() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="num_layers=3"):
        cache.register_layer()
    steps = [cache.layer_step(layer, (4, 2)) for layer in range(3)]
    assert steps[0] is steps[1] is steps[2]
    assert cache.lengths == (4, 2)
    with pytest.raises(ValueError, match="rows"):
        cache.layer_step(0, (1, 1, 1))
    step = cache.layer_step(0, (1, 1))
    assert cache.lengths == (5, 3)
    with pytest.raises(ValueError, match=r"layer 1 brings \(2, 1\) tokens, earlier layers \(1, 1\)"):
        cache.layer_step(1, (2, 1))
    assert cache.layer_step(2, (1, 1)) is step


def test_unwritten_slots_never_show(generator):
    for dim in (64, 80):
        for dtype in (torch.float32, torch.bfloat16):
            cache = KVCacheManager(128, 16, 1, 1, dim, dtype)
            cache.begin(1)
            nan = torch.full((37, 1, dim), float("nan"), dtype=dtype)
            cache.append(cache.step(37), 0, nan, nan)
            for length in range(1, 71):
                cache.begin(1)
                k = torch.randn(length, 1, dim, generator=generator).to(dtype)
                cache.append(cache.step(length), 0, k, k)
                held, values = cache.gather(0, 0)
                assert torch.equal(held, k.transpose(0, 1)) and torch.equal(values, held)


def test_stored_cache_stays_as_it_is():
    """Copies of a prompt's cache, filled with grad on, are independent: it does not grow with every turn."""
    cache = make_cache(num_pages=40)
    cache.begin(1)
    prompt = torch.randn(6, HEADS, DIM, requires_grad=True)
    cache.append(cache.step(6), 0, prompt * 2, prompt * 3)
    stored = cache.gather(0, 0)[0].clone()
    twin = copy.deepcopy(cache)
    for _ in range(3):
        (row,) = cache.fork(0)
        for _ in range(4):
            counts = [0] * cache.batch_size
            counts[row] = 1
            cache.append(cache.step(counts), 0, torch.ones(1, HEADS, DIM), torch.ones(1, HEADS, DIM))
        assert cache.lengths == (6, 10)
        assert torch.equal(cache.gather(0, row)[0][:, :6], stored)
        cache.leave(row)
        twin.append(twin.step(4), 0, torch.zeros(4, HEADS, DIM), torch.zeros(4, HEADS, DIM))
    assert cache.lengths == (6,) and torch.equal(cache.gather(0, 0)[0], stored)
    assert twin.lengths == (18,)
    assert torch.equal(twin.gather(0, 0)[0][:, :6], stored)


def test_a_pickled_cache_goes_on(generator):
    cache = make_cache(num_pages=20)
    cache.begin(1)
    ((k, _),) = push(cache, [6], generator)
    twin = pickle.loads(pickle.dumps(cache))
    ((more, _),) = push(twin, [7], generator)
    assert_holds(twin, 0, 0, torch.cat([k, more]))
    assert twin.step(1).block_table(0)[0, :4].tolist() == [0, 1, 2, 3]
    assert cache.lengths == (6,)


def test_writes_work_across_inference_mode():
    with torch.inference_mode():
        cache = make_cache()
        cache.begin(1)
        cache.append(cache.step(2), 0, torch.ones(2, HEADS, DIM), torch.ones(2, HEADS, DIM))
    cache.append(cache.step(1), 0, torch.ones(1, HEADS, DIM), torch.ones(1, HEADS, DIM))
    copy.deepcopy(cache).step(1)


def test_calls_name_what_is_wrong(generator):
    cache = make_cache(max_seq_len=10, num_pages=8)
    cache.begin(2)
    push(cache, [8, 3], generator)
    good = torch.zeros(2, HEADS, DIM)
    with pytest.raises(ValueError, match="query_lengths has 3 entries, the cache has 2 rows"):
        cache.step([1, 1, 1])
    with pytest.raises(ValueError, match=r"row 0 holds 8 tokens and cannot take 3 more.*max_seq_len=10"):
        cache.step(3)
    with pytest.raises(ValueError, match="negative"):
        cache.step([1, -1])
    assert cache.lengths == (8, 3)
    step = cache.step(1)
    for bad, message in [
        (good[:1], r"k has shape \(1, 2, 8\)"),
        (torch.zeros(2, 4, DIM), r"k has shape \(2, 4, 8\), the step and the cache need \(2, 2, 8\)"),
        (good.bfloat16(), "dtype torch.bfloat16"),
        (good.to("meta"), "on meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.append(step, 0, bad, good)
    with pytest.raises(ValueError, match="layer_idx is 1"):
        cache.append(step, 1, good, good)
    with pytest.raises(ValueError, match="rows has row 2, the cache has 2 open"):
        cache.leave([0, 2])
    with pytest.raises(ValueError, match="row twice"):
        cache.leave([0, 0])
    with pytest.raises(ValueError, match="row has row -1"):
        cache.fork(-1)
    with pytest.raises(ValueError, match="token_ids has 99 tokens, row 0 holds 9"):
        cache.register_prefix(0, list(range(99)))
    with pytest.raises(TypeError, match="token_ids must hold ints"):
        cache.match_prefix([1.5])
    with pytest.raises(ValueError, match="token_ids must be integers of shape"):
        cache.match_prefix(torch.zeros(2, 2, dtype=torch.int64))
