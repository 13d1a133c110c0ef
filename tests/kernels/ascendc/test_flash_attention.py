"""Flash attention over cube and vector cores on the emulation: parity, bytes, memories, hand-over, planted faults."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules.kernels.ascend.socs import SOCS
from atb_modules.kernels.reference.attention import attention_reference
from atb_modules.spec import AttentionSpec
from atb_modules.testing import assert_parity, fresh_generator, plain_attention, summation_orders
from atb_modules.testing.ascendc import EmulationError, kernels
from atb_modules.testing.ascendc.attention_kernels import flash_attention
from atb_modules.testing.ascendc.mutants import mutated_sources, plant

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
PLACES = ("UB", "L1", "L0A", "L0B", "L0C")


def draw(batch, heads, kv_heads, q_len, kv_len, dim, dtype, value_dim=None):
    generator = fresh_generator()
    shapes = (heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, value_dim or dim)
    return [torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes]


def check(batch, heads, kv_heads, q_len, kv_len, dim, dtype, *, value_dim=None, left=-1, right=-1, softcap=0.0, **rest):
    q, k, v = draw(batch, heads, kv_heads, q_len, kv_len, dim, dtype, value_dim)
    out, lse, report = flash_attention(q, k, v, left=left, right=right, softcap=softcap, **rest)
    sides = (None if left < 0 else left, None if right < 0 else right)
    spec = AttentionSpec(window=None if sides == (None, None) else sides, softcap=softcap or None)
    golden, golden_lse = attention_reference(q.double(), k.double(), v.double(), spec)
    plain = summation_orders(partial(plain_attention, q, k, v, spec))
    what = f"{tuple(q.shape)} x {kv_len} {dtype} {sides}"
    assert_parity(out, golden, plain, reduction=max(kv_len, 1), softcap=softcap > 0, what=what)
    torch.testing.assert_close(lse.double(), golden_lse, atol=3e-6, rtol=3e-6)
    assert report.tensors[3].unwritten == report.tensors[4].unwritten == 0
    return q, out, report


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 192])
@pytest.mark.parametrize("right", [-1, 0], ids=["full", "causal"])
def test_parity(dtype, dim, right):
    check(1, 4, 2, 77, 203, dim, dtype, right=right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_on_the_generation_of_950(dtype):
    check(1, 4, 2, 77, 203, 80, dtype, right=0, soc="ascend950")
    check(1, 2, 1, 130, 257, 192, dtype, left=40, right=0, soc="ascend950")
    check(2, 2, 2, 150, 60, 64, dtype, right=0, softcap=2.0, soc="ascend950")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("q_len", "kv_len", "left", "right"),
    [
        (1, 1, -1, -1), (1, 300, -1, 0), (33, 33, -1, 0), (130, 257, 40, 0), (300, 141, 20, 7), (65, 64, 0, 0),
        (17, 400, 128, 3), (200, 70, -1, 0), (5, 129, -1, 0),
    ],
)  # fmt: skip
def test_windows_and_lengths(dtype, q_len, kv_len, left, right):
    check(1, 2, 1, q_len, kv_len, 64, dtype, left=left, right=right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_tiles_soft_caps_and_value_sizes(dtype):
    check(6, 8, 2, 130, 260, 64, dtype, right=0)
    check(1, 2, 2, 40, 150, 64, dtype, softcap=2.0)
    check(1, 1, 1, 40, 90, 192, dtype, value_dim=128)
    check(1, 1, 1, 40, 90, 64, dtype, value_dim=256)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_that_see_nothing(dtype):
    q, out, _ = check(1, 2, 1, 150, 60, 64, dtype, right=0)
    assert torch.equal(out[:, :, :90], torch.zeros_like(out[:, :, :90]))
    q, out, report = check(2, 2, 1, 10, 0, 64, dtype)
    assert not out.any()
    assert report.tensors[0].read == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_of_drawn_shapes(dtype):
    generator = fresh_generator()
    pick = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    for _ in range(4):
        kv_heads, q_len, kv_len = pick(1, 3), pick(1, 200), pick(0, 400)
        dims = {"dim": 16 * pick(1, 17), "value_dim": 16 * pick(1, 17)}
        sides = {"left": pick(-1, 300), "right": pick(-1, 100)}
        check(pick(1, 3), kv_heads * pick(1, 4), kv_heads, q_len, kv_len, dtype=dtype, **dims, **sides)


def visible_keys(q_len, kv_len, left, right, tile_rows):
    """Keys between the first and the last that a tile of queries sees, summed over the tiles."""
    total = 0
    for row in range(0, q_len, tile_rows):
        last = min(row + tile_rows, q_len) - 1
        begin = 0 if left < 0 else max(0, row + kv_len - q_len - left)
        end = kv_len if right < 0 else min(kv_len, last + kv_len - q_len + right + 1)
        total += max(0, end - begin)
    return total


@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (50, 0), (30, 20)])
def test_keys_outside_the_window_are_not_read(left, right):
    batch, heads, q_len, kv_len, dim = 4, 8, 256, 500, 64
    q, _, report = check(batch, heads, 4, q_len, kv_len, dim, torch.float16, left=left, right=right)
    keys = visible_keys(q_len, kv_len, left, right, 128) * batch * heads
    assert report.tensors[0].read == q.numel() * 2
    assert report.tensors[1].read == report.tensors[2].read == keys * dim * 2
    assert report.tensors[3].written == q.numel() * 2


def tile(soc, dtype, **shape):
    call = {
        "batch": 2, "heads": 4, "kv_heads": 2, "q_len": 100, "kv_len": 200, "head_dim": 64, "value_dim": 64,
        "left": -1, "right": 0, "scale": 1.0, "softcap": 0.0,
    } | shape  # fmt: skip
    try:
        struct = "FlashAttentionTiling"
        return kernels.tile("flash_attention", struct, soc, cube=kernels.cube_of(soc), dtype=dtype, **call), None
    except ValueError as refusal:
        return None, str(refusal)


def bytes_of(tiling, dtype, place):
    return kernels.host_number("atb_flash_attention_bytes", tiling, kernels.DTYPES[dtype][0], place)


def test_memory_is_what_the_tiling_says():
    for softcap, dtype in ((0.0, torch.float16), (2.0, torch.bfloat16), (0.0, torch.float32)):
        tiling, _ = tile(
            "ascend910b1", dtype, batch=1, heads=24, kv_heads=24, q_len=100, kv_len=80, right=-1,
            softcap=softcap,
        )  # fmt: skip
        _, _, report = check(1, 24, 24, 100, 80, 64, dtype, softcap=softcap)
        for index, place in enumerate(PLACES):
            assert report.peak(place) == bytes_of(tiling, dtype, index)


@settings(max_examples=300, deadline=None)
@given(
    soc=st.sampled_from(sorted(SOCS)), dtype=st.sampled_from(DTYPES), batch=st.integers(1, 64),
    kv_heads=st.integers(1, 16), group=st.integers(1, 16), q_len=st.integers(1, 100_000),
    kv_len=st.integers(0, 100_000), head_dim=st.integers(1, 17).map(lambda n: 16 * n),
    value_dim=st.integers(1, 16).map(lambda n: 16 * n), left=st.sampled_from([-1, 0, 1000]),
    softcap=st.sampled_from([0.0, 30.0]),
)  # fmt: skip
def test_no_accepted_shape_exceeds_the_memories(soc, dtype, kv_heads, group, head_dim, **shape):
    tiling, reason = tile(soc, dtype, heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, **shape)
    row = SOCS[soc]
    if tiling is None:
        assert row.arch == "dav-2002" or head_dim > 256, reason
        return
    for place, limit in enumerate((row.ub - 8192, row.l1, row.l0a, row.l0b, row.l0c)):
        assert bytes_of(tiling, dtype, place) <= limit
    assert 1 <= kernels.blocks_of(tiling) <= row.cube_cores


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 72}, "multiples of 16"),
        ({"value_dim": 272}, "at most 256"),
        ({"heads": 3}, "multiple of the heads of keys"),
        ({"soc": "ascend310p"}, "cube and vector cores apart"),
        ({"dtype": torch.bfloat16, "soc": "ascend310p"}, "cube and vector cores apart"),
        ({"q_len": 0}, "the lengths are"),
        ({"softcap": -1.0}, "softcap is positive"),
    ],
)
def test_what_does_not_fit_is_refused(change, reason):
    _, refusal = tile(**({"soc": "ascend910b1", "dtype": torch.float16} | change))
    assert refusal is not None
    assert reason in refusal


def test_scores_of_the_next_tile_are_computed_before_this_one_is_weighed():
    q, k, v = draw(1, 1, 1, 16, 1000, 64, torch.float16)
    _, _, report = flash_attention(q, k, v)
    cube, vector = 0, 1
    trace = report.trace
    scores = report.instructions(cube, "FIX", "CrossCoreSetFlag")
    ready = [i for i in scores if trace[i]["offset"] == 0]
    waits = report.instructions(cube, "MTE2", "CrossCoreWaitFlag")
    steps = -(-1000 // 128)
    assert len(ready) == len(waits) == steps
    # the cube core has handed over the scores of tile t + 1 before it waits for the weights of tile t
    assert all(ready[t + 1] < waits[t] for t in range(steps - 1))
    # the keys of tile t + 1 are on their way before the product of tile t
    keys = [i for i in report.instructions(cube, "MTE2", "DataCopy") if trace[i]["region"] == 1]
    assert all(keys[t + 1] < ready[t] for t in range(steps - 1))
    # the vector core begins tile t + 1 before it gathers the products of tile t
    vector_waits = report.instructions(vector, "MTE2", "CrossCoreWaitFlag")
    flags = [int(trace[i]["offset"]) for i in vector_waits]
    assert flags == [0, *[0, 2] * (steps - 1), 2]
    # two slots of scores in turn
    slots = [int(trace[i]["region_offset"]) for i in report.instructions(vector, "MTE2", "DataCopy")][:1]
    assert slots == [0]


FAULTS = {
    "the cube core does not wait for the weights": (
        "flash_attention_cube.h", "    AwaitVectors<PIPE_MTE2>(kWeightsReady);\n", "",
        "which nobody has written|before the write by pipe MTE3",
    ),
    "the vector cores do not wait for the scores": (
        "flash_attention_rows.h", "    AwaitCube<PIPE_MTE2>(kScoresReady);\n", "",
        "which nobody has written|before the write by pipe FIX",
    ),
    "one slot of scores": (
        "flash_attention_cube.h", "Store(slots_.scores[turn % 2 * slots_.score_size]", "Store(slots_.scores[0]",
        "of global memory (while|before the write by) pipe|which nobody has written",
    ),
    "the scores are announced before they are stored": (
        "flash_attention_cube.h", "TellVectors<PIPE_FIX>(kScoresReady)",
        "TellVectors<PIPE_M>(kScoresReady)", "before the write by pipe FIX of core|which nobody has written",
    ),
    "the products are announced twice": (
        "flash_attention_cube.h", "    TellVectors<PIPE_FIX>(kProductsReady);\n",
        "    TellVectors<PIPE_FIX>(kProductsReady);\n    TellVectors<PIPE_FIX>(kProductsReady);\n",
        "flag 2 is still set|before the write by pipe FIX|which nobody has written",
    ),
    "a vector core forgets its weights": (
        "flash_attention_rows.h", "    TellCube<PIPE_MTE3>(kWeightsReady);\n",
        "    if (GetSubBlockIdx() == 0) TellCube<PIPE_MTE3>(kWeightsReady);\n", "it would hang",
    ),
    "L0C overflow": (
        "flash_attention_cube.h", "pipe->InitBuffer(sums_, 2, t_.tile_rows * kColumns",
        "pipe->InitBuffer(sums_, 6, 64 * kColumns", "L0C overflow",
    ),
    "keys that nobody filled": (
        "flash_attention_cube.h", "t_.head_dim, t_.tile_keys);\n    in_k_", "t_.head_dim);\n    in_k_",
        "of L1, which nobody has written",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def mutants(tmp_path_factory):
    return plant(tmp_path_factory.mktemp("mutants"), "flash_attention", FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, mutants, monkeypatch):
    message = FAULTS[fault][-1]
    monkeypatch.setattr(kernels, "ASCENDC", mutants[fault])
    q, k, v = draw(1, 1, 1, 20, 1000, 64, torch.float16)
    with pytest.raises(EmulationError, match=message):
        flash_attention(q, k, v)


def test_windows_that_are_off_by_one_turn_parity_red(tmp_path, monkeypatch):
    change = ("flash_attention_steps.h", "at + t.right + 1;", "at + t.right + 2;")
    monkeypatch.setattr(kernels, "ASCENDC", mutated_sources(tmp_path, *change))
    with pytest.raises(AssertionError, match="largest scaled error"):
        check(1, 1, 1, 33, 33, 64, torch.float16, right=0)
