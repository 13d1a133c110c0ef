"""Static pages: the same contents as paged ones, tables that never change, and decode steps compiled once."""

import pytest
import torch

from atb_modules import AttentionSpec, CachePolicy, KVCacheManager, OutOfPagesError
from atb_modules.attention.cache import next_slots
from atb_modules.ops import cache_append, paged_attention

HEADS, DIM = 2, 8


def make_cache(policy, **options):
    return KVCacheManager(
        **{
            "max_seq_len": 22,
            "page_size": 4,
            "num_layers": 2,
            "num_heads": 4,
            "head_dim": DIM,
            "dtype": torch.float32,
            "num_kv_heads": HEADS,
            "num_pages": 18,
            "window": (None, 5),
            "policy": policy,
        }
        | options
    )


def test_same_contents_as_paged_and_a_table_that_stays():
    caches = [make_cache(policy) for policy in CachePolicy]
    static = caches[list(CachePolicy).index(CachePolicy.STATIC)]
    generator = torch.Generator().manual_seed(1)
    for cache in caches:
        cache.begin(3)
    table = static.step([0, 0, 0]).block_table(0)
    before = table.clone()
    for change, lengths in (
        (lambda cache: None, [5, 0, 2]),
        (lambda cache: cache.crop(3, rows=[0]), [1, 1, 1]),
        (lambda cache: cache.reorder([0, 1, 2]), [4, 9, 1]),
        (lambda cache: cache.drop(1), [1, 1, 1]),
    ):
        states = torch.randn(2, 2, sum(lengths), HEADS, DIM, generator=generator)
        for cache in caches:
            change(cache)
            step = cache.step(lengths)
            for layer in range(2):
                cache.append(step, layer, *states[layer])
        for layer in range(2):
            for row in range(3):
                a, b = (cache.gather(layer, row)[0] for cache in caches)
                kept = min(a.shape[1], b.shape[1])
                assert torch.equal(a[:, a.shape[1] - kept :], b[:, b.shape[1] - kept :])
        assert len({cache.lengths for cache in caches}) == 1
        assert torch.equal(table, before) and static.step([0, 0, 0]).block_table(0).data_ptr() == table.data_ptr()
    stats = static.memory_stats()
    assert stats.pages_used == 2 * 18 and stats.bytes_wasted == stats.bytes_used - 2 * 2 * sum(static.lengths) * 64
    static.leave(1)
    assert static.memory_stats().pages_used == 2 * 12
    assert static.join() == [2] and static.lengths[2] == 0
    with pytest.raises(OutOfPagesError, match=r"1 rows of 22 tokens needs 6 more page\(s\) a layer, 0 of num_pages=18"):
        static.join()
    with pytest.raises(OutOfPagesError, match="4 rows of 22 tokens"):
        static.begin(4)
    assert static.batch_size == 3
    static.begin(2)
    assert static.memory_stats().pages_used == 2 * 12


def test_a_decode_step_compiles_once():
    """Lengths are a tensor: 14 steps over several pages are one graph, and equal steps of the manager."""
    torch._dynamo.reset()
    graphs = []
    spec = AttentionSpec(causal=True)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def decode(q, k, v, k_pages, v_pages, table, lengths, starts):
        slots, kv_lengths = next_slots(table, lengths, 4)
        cache_append(k, v, k_pages, v_pages, slots, trusted=True)
        out, _ = paged_attention(q, k_pages, v_pages, table, kv_lengths, starts, spec, trusted=True)
        return out, kv_lengths

    compiled = torch.compile(decode, fullgraph=True, backend=backend)
    caches = [make_cache(policy, num_layers=1, window=None) for policy in ("static", "paged")]
    states = torch.randn(2, 7, HEADS, DIM)
    for cache in caches:
        cache.begin(2)
        cache.append(cache.step([5, 2]), 0, *states)
    static, paged = caches
    lengths, starts = torch.tensor(static.lengths, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    table = static.step(0).block_table(0)
    for _ in range(14):
        q, k, v = torch.randn(2, 4, DIM), *torch.randn(2, 2, HEADS, DIM)
        out, lengths = compiled(q, k, v, *static.pages(0), table, lengths, starts)
        step = paged.step(1)
        paged.append(step, 0, k, v)
        where = step.block_table(0), step.kv_lengths, step.cu_seqlens_q
        assert torch.equal(out, paged_attention(q, *paged.pages(0), *where, spec)[0])
    assert len(graphs) == 1
    static.step(14)  # what the loop has written becomes part of the rows
    assert tuple(lengths.tolist()) == static.lengths == paged.lengths
    assert torch.equal(static.gather(0, 1)[0], paged.gather(0, 1)[0])


def test_what_static_pages_cannot_do_is_named():
    cache = make_cache("static", num_layers=1, window=None)
    cache.begin(2)
    cache.step([22, 4])
    with pytest.raises(ValueError, match="row 0 holds 22 tokens and cannot take 1 more"):
        cache.step(1)
    before = cache.memory_stats()
    for call in (
        lambda: cache.fork(1),
        lambda: cache.reorder([1, 1]),
        lambda: cache.register_prefix(1, [1, 2, 3, 4]),
        lambda: cache.join_prefix([1, 2, 3, 4]),
    ):
        with pytest.raises(ValueError, match="policy is 'static'"):
            call()
    assert cache.memory_stats() == before and cache.lengths == (22, 4)
    with pytest.raises(ValueError, match="policy is 'fixed'; allowed: 'paged', 'static'"):
        make_cache("fixed")


def test_next_slots_names_what_does_not_fit():
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for arguments, error, message in (
        ((None, lengths, 4), TypeError, "block_table is NoneType"),
        ((table, lengths.float(), 4), ValueError, "lengths is torch.float32"),
        ((table[:1], lengths, 4), ValueError, r"block_table is torch.int32 \(1, 3\); allowed"),
        ((table, lengths, 0), ValueError, "page_size is 0"),
    ):
        with pytest.raises(error, match=message):
            next_slots(*arguments)
