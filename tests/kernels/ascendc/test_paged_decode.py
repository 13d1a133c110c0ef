"""The paged decode kernel on the emulation: parity, bytes, memory of the SoCs, prefetch, planted faults."""

from __future__ import annotations

import struct
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules.kernels.ascend.socs import SOCS
from atb_modules.kernels.reference.attention import paged_attention_reference
from atb_modules.spec import AttentionSpec
from atb_modules.testing import assert_parity, fresh_generator, summation_orders
from atb_modules.testing.ascendc import EmulationError, kernels
from atb_modules.testing.ascendc.attention_kernels import PagedDecodeShape, paged_decode
from atb_modules.testing.ascendc.mutants import mutated_sources, plant
from atb_modules.testing.plain import plain_paged_attention

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def draw(lengths, heads, kv_heads, dim, page_size, dtype, value_dim=None):
    """Queries, and caches whose pages lie in random order; pages that no sequence has hold NaN."""
    generator = fresh_generator()
    blocks = max(1, *(-(-length // page_size) for length in lengths))
    order = torch.randperm(len(lengths) * blocks, generator=generator).to(torch.int32)
    table = order.view(len(lengths), blocks).clone()
    q = torch.randn(len(lengths), heads, dim, generator=generator).to(dtype)
    k = torch.randn(order.numel(), kv_heads, page_size, dim, generator=generator).to(dtype)
    v = torch.randn(order.numel(), kv_heads, page_size, value_dim or dim, generator=generator).to(dtype)
    for row, length in enumerate(lengths):
        used = -(-length // page_size)
        for page in table[row, used:].tolist():
            k[page], v[page] = float("nan"), float("nan")
        table[row, used:] = -1
    return q, k, v, table, torch.tensor(lengths, dtype=torch.int32)


def check(lengths, heads, kv_heads, dim, page_size, dtype, *, left=-1, softcap=0.0, value_dim=None, **options):
    inputs = draw(lengths, heads, kv_heads, dim, page_size, dtype, value_dim)
    spec = AttentionSpec(
        causal=left >= 0, window=None if left < 0 else (left, 0), softcap=softcap or None, scale=dim**-0.5
    )
    out, lse, report = paged_decode(*inputs, left=left, softcap=softcap, **options)
    q, k, v, table, kv_lengths = inputs
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    golden, golden_lse = paged_attention_reference(q.double(), k.double(), v.double(), table, kv_lengths, starts, spec)
    plain = summation_orders(partial(plain_paged_attention, q, k, v, table, kv_lengths, starts, spec))
    assert_parity(out, golden, plain, reduction=max(*lengths, 1), softcap=softcap > 0, what=f"{lengths} {dtype}")
    torch.testing.assert_close(lse.double(), golden_lse, atol=3e-6, rtol=3e-6)
    assert all(traffic.unwritten == 0 for traffic in report.tensors[5:7])
    return inputs, report


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 192])
@pytest.mark.parametrize("page_size", [16, 128, 512])
def test_parity(dtype, dim, page_size):
    check([77, 0, 1, 259], 4, 2, dim, page_size, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows_soft_caps_and_groups(dtype):
    check([130, 5, 0, 64], 6, 1, 64, 32, dtype, left=63)
    check([300, 33], 4, 4, 48, 16, dtype, left=0)
    check([90, 131], 8, 2, 64, 128, dtype, softcap=2.0)
    check([70], 3, 3, 192, 16, dtype, value_dim=128)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_sequences_are_split_and_merged(dtype):
    lengths = [2085, 700, 0, 1]
    inputs, report = check(lengths, 2, 1, 64, 128, dtype)
    assert report.tensors[7].read == report.tensors[7].written > 0
    assert report.blocks > len(lengths)


def test_keys_outside_the_window_are_not_read():
    _, report = check([1000], 4, 2, 64, 64, torch.float16, left=99)
    assert report.tensors[1].read == report.tensors[2].read == 100 * 2 * 64 * 2


@pytest.mark.parametrize(("heads", "kv_heads", "length"), [(8, 2, 1500), (4, 4, 700), (16, 2, 2500)])
def test_bytes_are_the_keys_and_values_once(heads, kv_heads, length, capsys):
    """The table: bytes of the kernel, the least possible, and the unfused sequence's."""
    inputs, report = check([length, length // 3], heads, kv_heads, 128, 128, torch.bfloat16)
    q, _, _, _, lengths = inputs
    tokens = int(lengths.sum())
    keys = tokens * kv_heads * 128 * 2
    assert report.tensors[1].read == report.tensors[2].read == keys
    ends = 2 * q.numel() * 2 + q.shape[0] * heads * 4
    least = 2 * keys + ends
    # pages are gathered to dense keys and values, then scores are written, read, written as weights and read
    unfused = 3 * 2 * keys + 4 * tokens * heads * 2 + ends
    with capsys.disabled():
        print(f"\npaged decode {heads}/{kv_heads} heads, {tokens} tokens: {report.bytes_moved} bytes moved (emulated), "
              f"{least} least, {unfused} unfused; {report.bytes_moved / least:.3f} of the least, "
              f"{report.bytes_moved / unfused:.3f} of the unfused")  # fmt: skip
    assert report.bytes_moved <= 1.05 * least
    assert report.bytes_moved < 0.4 * unfused


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_of_drawn_shapes(dtype):
    generator = fresh_generator()
    pick = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    for _ in range(4):
        kv_heads, page_size = pick(1, 4), 2 ** pick(4, 10)
        lengths = [pick(0, 400) for _ in range(pick(1, 4))]
        left = pick(-1, 200)
        dims = {"dim": 16 * pick(1, 17), "value_dim": 16 * pick(1, 17)}
        check(lengths, kv_heads * pick(1, 9), kv_heads, page_size=page_size, dtype=dtype, left=left, **dims)


def test_queries_that_are_a_view_of_one_projection():
    q, *rest = draw([100, 37, 5], 4, 2, 64, 16, torch.float16)
    projection = torch.zeros(3, 8, 64, dtype=q.dtype)
    projection[:, :4] = q
    apart, dense = paged_decode(projection[:, :4], *rest), paged_decode(q, *rest)
    assert torch.equal(apart[0], dense[0])
    assert torch.equal(apart[1], dense[1])


def test_the_next_tile_is_loaded_before_this_one_is_computed():
    _, report = check([640], 2, 1, 128, 64, torch.float16, max_length=640)
    loads = [i for i in report.instructions(0, "MTE2", "DataCopy") if report.trace[i]["region"] == 1]
    scores = report.instructions(0, "V", "WholeReduceMax")
    pages = len(loads)
    assert pages == len(scores) >= 5
    assert all(loads[n + 1] < scores[n] for n in range(pages - 1))
    assert all(scores[n] < loads[n + 2] for n in range(pages - 2))  # two buffers, and no third
    offsets = [int(report.trace[i]["offset"]) for i in loads]
    assert all(a != b for a, b in pairwise(offsets))


def test_peak_of_the_unified_buffer_is_what_the_tiling_says():
    for dtype in (torch.float16, torch.float32):
        tiling, reason = tile("ascend910b1", dtype, 1, 8, 2, 128, 128, 128, 900, -1, 0.0)
        _, report = check([900], 8, 2, 128, 128, dtype)
        assert reason is None
        assert report.peak("UB") == bytes_of(tiling, dtype)


def tile(soc, dtype, batch, heads, kv_heads, dim, value_dim, page_size, length, left, softcap):
    try:
        shape = PagedDecodeShape(
            batch=batch, heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=value_dim, page_size=page_size,
            pages=batch * -(-length // page_size), max_blocks=-(-length // page_size), q_step=heads * dim,
            max_length=length, left=left,
        )  # fmt: skip
        return kernels.tile(
            "paged_decode", "PagedDecodeTiling", soc, dtype=dtype, shape=shape, scale=1.0, softcap=softcap
        ), None  # fmt: skip
    except ValueError as refusal:
        return None, str(refusal)


def test_the_fields_of_a_shape_arrive_by_name():
    """The tiling begins with 32-bit numbers of the same names; one value is like no other."""
    given = {
        "batch": 3, "heads": 12, "kv_heads": 4, "head_dim": 80, "value_dim": 96, "page_size": 48, "pages": 77,
        "max_blocks": 50, "q_step": 1000,
    }  # fmt: skip
    shape = PagedDecodeShape(**given, max_length=2000, left=1500)
    tiling = kernels.tile(
        "paged_decode", "PagedDecodeTiling", "ascend910b1", dtype=torch.float16, shape=shape, scale=0.5, softcap=2.0
    )
    names = [*list(given)[:3], "group", *list(given)[3:], "tile", "parts", "part_keys"]
    numbers = dict(zip(names, struct.unpack_from("13I", bytes(tiling)[4:]), strict=True))
    assert {name: numbers[name] for name in given} == given
    assert numbers["parts"] * numbers["part_keys"] >= 1501 > (numbers["parts"] - 1) * numbers["part_keys"]
    assert struct.unpack_from("i2f", bytes(tiling)[56:]) == (1500, 0.5, 2.0)


def bytes_of(tiling, dtype):
    return kernels.host_number("atb_paged_decode_bytes", tiling, kernels.DTYPES[dtype][0])


@settings(max_examples=300, deadline=None)
@given(
    soc=st.sampled_from(sorted(SOCS)), dtype=st.sampled_from(DTYPES), batch=st.integers(1, 300),
    group=st.integers(1, 140), kv_heads=st.integers(1, 16), dim=st.integers(1, 17).map(lambda n: 16 * n),
    value_dim=st.integers(1, 16).map(lambda n: 16 * n), page_size=st.sampled_from([16, 48, 128, 512]),
    length=st.integers(1, 100_000), left=st.sampled_from([-1, 0, 1000]), softcap=st.sampled_from([0.0, 30.0]),
)  # fmt: skip
def test_no_accepted_shape_exceeds_the_unified_buffer(
    soc, dtype, batch, group, kv_heads, dim, value_dim, page_size, length, left, softcap
):
    tiling, reason = tile(
        soc, dtype, batch, group * kv_heads, kv_heads, dim, value_dim, page_size, length, left, softcap
    )
    if tiling is None:
        common = dim <= 192 and value_dim <= 192 and group <= 8
        assert soc == "ascend310p" or not common, reason
        return
    assert bytes_of(tiling, dtype) <= SOCS[soc].ub - (8192 if softcap else 0)
    assert kernels.blocks_of(tiling) <= SOCS[soc].vector_cores


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dim": 72}, "multiples of 16"),
        ({"dim": 272}, "at most 256"),
        ({"heads": 3}, "multiple of the heads of keys"),
        ({"soc": "ascend310p"}, "log-sum-exps"),
        ({"heads": 258}, "at most 128 query heads"),
        ({"heads": 256, "dim": 256, "value_dim": 256}, "do not fit the unified buffer"),
    ],
)
def test_what_does_not_fit_is_refused(change, reason):
    call = {
        "soc": "ascend910b1", "dtype": torch.float32, "batch": 2, "heads": 4, "kv_heads": 2, "dim": 64,
        "value_dim": 64, "page_size": 16, "length": 100, "left": -1, "softcap": 0.0,
    }  # fmt: skip
    _, refusal = tile(**(call | change))
    assert refusal is not None
    assert reason in refusal


FAULTS = {
    "the cores do not meet before the merge": (
        "paged_decode.cpp", "  SyncAll();\n", "", "(before the write by pipe MTE3|which nobody has written)",
    ),
    "the sum of a score follows its products at once": (
        "paged_decode_tile.h", "        PipeBarrier<PIPE_V>();\n      }\n      WholeReduceSum",
        "      }\n      WholeReduceSum", "V_V, here PipeBarrier, is missing",
    ),
    "a tile is not given back": ("paged_decode.cpp", "      in_k_.FreeTensor(k);\n", "", "it would hang"),
    "a tile of values takes a key more": (
        "paged_decode.cpp", "run * t_.value_dim);", "(run + 1) * t_.value_dim);", "exceeds the tensor",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def mutants(tmp_path_factory):
    return plant(tmp_path_factory.mktemp("mutants"), "paged_decode", FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, mutants, monkeypatch):
    message = FAULTS[fault][-1]
    monkeypatch.setattr(kernels, "ASCENDC", mutants[fault])
    inputs = draw([2000], 2, 1, 128, 128, torch.float16)
    with pytest.raises(EmulationError, match=message):
        paged_decode(*inputs)


def test_reading_another_page_turns_parity_red(tmp_path, monkeypatch):
    change = ("paged_decode.cpp", "+ at / t_.page_size));", "+ 0));")
    monkeypatch.setattr(kernels, "ASCENDC", mutated_sources(tmp_path, *change))
    with pytest.raises(AssertionError, match="largest scaled error"):
        check([200], 2, 1, 64, 64, torch.float16)
