"""RMSNorm + product as one mixed kernel on the emulation: parity, memory of the SoCs, hand-over, planted faults."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules.kernels.ascend.socs import SOCS
from atb_modules.kernels.reference.norm import rms_norm_reference
from atb_modules.testing import assert_parity, fresh_generator, summation_orders
from atb_modules.testing.ascendc import EmulationError, kernels
from atb_modules.testing.ascendc.matmul_kernels import norm_matmul
from atb_modules.testing.ascendc.mutants import plant
from atb_modules.testing.parity import compare

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
PLACES = ("UB", "L1", "L0A", "L0B", "L0C")
#: one chip of each generation whose cube and vector cores stand apart: through the workspace, and straight to L1
APART = ["ascend910b1", "ascend950"]


def draw(rows, width, columns, dtype, norm_weight=True):
    generator = fresh_generator()
    x = torch.randn(rows, width, generator=generator).to(dtype)
    weight = (torch.randn(columns, width, generator=generator) * width**-0.5).to(dtype)
    return x, torch.randn(width, generator=generator).to(dtype) if norm_weight else None, weight


def check(rows, width, columns, dtype, *, norm_weight=True, weight_offset=0.0, cast_first=False, **options):
    x, scale, weight = draw(rows, width, columns, dtype, norm_weight)
    out, report = norm_matmul(x, scale, weight, weight_offset=weight_offset, cast_first=cast_first, **options)
    rest = (1e-6, weight_offset, cast_first)
    # The product of what the norm rounds to the dtype is held to both rules. Its rounding, which any chain of the two
    # makes, is beyond the second: against the exact norm the error is that of the plain chain.
    exact = rms_norm_reference(x.double(), None if scale is None else scale.double(), *rest)
    golden = exact.to(dtype).double() @ weight.double().T

    def plain(order=None):
        features = torch.arange(width) if order is None else torch.randperm(width, generator=order)
        return rms_norm_reference(x, scale, *rest)[:, features] @ weight[:, features].T

    what = f"{rows} x {width} x {columns} {dtype}"
    if not cast_first:  # two roundings in another place
        assert_parity(out, golden, reduction=width, what=what)
    result = compare(out, exact @ weight.double().T, summation_orders(plain), reduction=width)
    assert not [failure for failure in result.failures if failure.startswith("largest error")], (what, result)
    return report


@pytest.mark.parametrize("soc", APART)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "columns"),
    [(1, 64, 16), (2, 4096, 33), (17, 80, 11008), (33, 1000, 257), (130, 200, 48), (300, 96, 300), (47, 2056, 130)],
)
def test_parity(rows, width, columns, dtype, soc):
    check(rows, width, columns, dtype, soc=soc)


@pytest.mark.parametrize("soc", APART)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_of_drawn_sizes(dtype, soc):
    generator = fresh_generator()
    for _ in range(4):
        rows, width, columns = (
            int(torch.randint(low, high, (), generator=generator)) for low, high in ((16, 300), (64, 700), (64, 500))
        )
        check(rows, width, columns, dtype, soc=soc)


@pytest.mark.parametrize("soc", APART)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kinds_of_norm(dtype, soc):
    check(20, 300, 40, dtype, norm_weight=False, soc=soc)
    check(20, 300, 40, dtype, weight_offset=1.0, soc=soc)
    check(20, 300, 40, dtype, cast_first=True, soc=soc)


@pytest.mark.parametrize("soc", APART)
def test_memory_is_what_the_tiling_says(soc):
    for dtype in DTYPES:
        tiling, _ = tile(soc, dtype, 300, 256, 300)
        report = check(300, 256, 300, dtype, soc=soc)
        for index, place in enumerate(PLACES):
            assert report.peak(place) == bytes_of(tiling, dtype, index)
        assert report.tensors[3].unwritten == 0


def tile(soc, dtype, rows, width, columns):
    try:
        return kernels.tile(
            "norm_matmul", "NormMatmulTiling", soc, cube=kernels.cube_of(soc), dtype=dtype, rows=rows, width=width,
            columns=columns, has_weight=True, cast_first=False, eps=1e-6, weight_offset=0.0,
        ), None  # fmt: skip
    except ValueError as refusal:
        return None, str(refusal)


def bytes_of(tiling, dtype, place):
    return kernels.host_number("atb_norm_matmul_bytes", tiling, kernels.DTYPES[dtype][0], place)


@settings(max_examples=300, deadline=None)
@given(
    soc=st.sampled_from(sorted(SOCS)), dtype=st.sampled_from(DTYPES), rows=st.integers(1, 20_000),
    width=st.integers(1, 20_000), columns=st.integers(1, 160_000),
)  # fmt: skip
def test_no_accepted_shape_exceeds_the_memories(soc, dtype, rows, width, columns):
    tiling, reason = tile(soc, dtype, rows, width, columns)
    row = SOCS[soc]
    if tiling is None:
        assert row.arch == "dav-2002" or (row.arch == "dav-2201" and width > 8192), reason
        return
    limits = (row.ub, row.l1, row.l0a, row.l0b, row.l0c)
    for place, limit in enumerate(limits):
        assert bytes_of(tiling, dtype, place) <= limit
    assert 1 <= kernels.blocks_of(tiling) <= row.cube_cores
    work = kernels.host_number("atb_norm_matmul_workspace", tiling, kernels.DTYPES[dtype][0])
    assert work <= row.l2 // 2  # the slots stay in L2


@pytest.mark.parametrize(
    ("soc", "width", "columns", "reason"),
    [
        ("ascend310p", 64, 64, "cube and vector cores apart"),
        ("ascend950", 70_000, 64, "at most 65535"),
        ("ascend910b1", 70_000, 64, "at most 65535"),
        ("ascend910b1", 30_000, 64, "does not fit the unified buffer"),
        ("ascend910b1", 64, 2**25, "number of columns"),
    ],
)
def test_what_does_not_fit_is_refused(soc, width, columns, reason):
    _, refusal = tile(soc, torch.float32, 5, width, columns)
    assert refusal is not None
    assert reason in refusal


#: of the twelve first words of the tiling
FIELDS = ("blocks", "rows", "width", "columns", "to_l1", "step", "row_groups", "column_groups", "tile_rows",
          "tile_columns", "chunk", "piece")  # fmt: skip


@pytest.mark.parametrize("soc", APART)
@pytest.mark.parametrize("columns", [4096, 11_008, 28_672])
@pytest.mark.parametrize("rows", [1, 16, 128, 2048, 8192])
def test_every_core_has_its_share(rows, columns, soc):
    for width in (4096, 8192):
        for dtype in (torch.float16, torch.float32):
            tiling, reason = tile(soc, dtype, rows, width, columns)
            if tiling is None:
                assert (soc, width, dtype) == ("ascend910b1", 8192, torch.float32), reason
                continue
            t = dict(zip(FIELDS, np.frombuffer(bytes(tiling), np.uint32).tolist(), strict=False))
            assert (t["rows"], t["width"], t["columns"]) == (rows, width, columns)
            cores = SOCS[soc].cube_cores
            # the block that has most to do, in lines of the output that it multiplies
            row_tiles, column_tiles = -(-rows // t["tile_rows"]), -(-columns // t["tile_columns"])
            most = -(-row_tiles // t["row_groups"]) * t["tile_rows"] * -(-column_tiles // t["column_groups"])
            share = max(rows, 16) * columns / cores
            assert most * t["tile_columns"] <= 1.35 * share, t
            assert t["blocks"] >= 0.9 * cores, t


def test_straight_to_l1_moves_fewer_bytes():
    x, scale, weight = draw(128, 512, 1024, torch.float16)
    straight, through = (norm_matmul(x, scale, weight, soc=soc, trace=False)[1].bytes_moved for soc in APART[::-1])
    assert straight < through


@pytest.mark.parametrize("soc", APART)
def test_an_odd_row_stays_alone(soc):
    """Infinities, NaN, huge and tiny numbers in one row change no other. (On a device products should see no NaN.)"""
    x, scale, weight = draw(35, 300, 70, torch.float16)
    clean, _ = norm_matmul(x, scale, weight, soc=soc, trace=False)
    for row, value in ((0, float("inf")), (7, float("nan")), (8, 65504.0), (17, 6e-8), (34, float("-inf"))):
        odd = x.clone()
        odd[row, 5:] = value
        out, _ = norm_matmul(odd, scale, weight, soc=soc, trace=False)
        others = torch.arange(35) != row
        assert torch.equal(out[others], clean[others]), (row, value)


def several_tiles():
    """The report of a call whose blocks have several tiles of rows each."""
    sizes = (2000, 64, 16)
    x, scale, weight = draw(*sizes, torch.float16)
    _, report = norm_matmul(x, scale, weight)
    return report


def test_rows_are_normalised_while_the_tile_before_is_multiplied():
    report = several_tiles()
    cube, first, second = 0, 1, 2
    assert [report.cores[i].cube for i in (cube, first, second)] == [True, False, False]
    trace = report.trace
    starts = report.instructions(cube, "MTE2", "CrossCoreWaitFlag")
    tiles = len(starts)
    assert tiles >= 3
    for core in (first, second):
        filled = report.instructions(core, "MTE3", "CrossCoreSetFlag")
        waited = report.instructions(core, "MTE3", "CrossCoreWaitFlag")
        assert len(filled) == tiles
        # two slots: a core waits for none but the third tile on
        assert len(waited) == tiles - 2
        assert filled[1] < waited[0]
    # the cube core has issued the loads of the next tile before it multiplies this one
    products = report.instructions(cube, "M", "Mmad")
    loads = [i for i in report.instructions(cube, "MTE2", "DataCopy") if trace[i]["region"] == 4]
    assert len(loads) == len(products) == tiles
    assert all(loads[n + 1] < products[n] for n in range(tiles - 1))


def test_weights_are_loaded_ahead_of_the_product():
    x, scale, weight = draw(16, 1024, 128, torch.float16)
    _, report = norm_matmul(x, scale, weight)
    loads = [i for i in report.instructions(0, "MTE2", "DataCopy") if report.trace[i]["region"] == 2]
    products = report.instructions(0, "M", "Mmad")
    each = len(products) // len(loads)
    assert len(loads) == 4
    assert all(loads[n + 1] < products[n * each] for n in range(3))
    assert report.tensors[2].read == weight.numel() * 2


FAULTS = {
    "the cube core does not wait for the slot": (
        "norm_matmul_cube.h", "    if (begins) AwaitVectors<PIPE_MTE2>(kSlotFull + which);\n", "",
        "before the write by pipe MTE3 of core|which nobody has written",
    ),
    "a slot is overwritten too early": (
        "norm_matmul_rows.h", "      if (i >= 2) AwaitCube<PIPE_MTE3>(kSlotFree + which);\n", "",
        "tensor 4 of global memory (while|before the write by) pipe",
    ),
    "a slot is given back before it is read": (
        "norm_matmul_cube.h", "TellVectors<PIPE_MTE2>(kSlotFree", "TellVectors<PIPE_MTE1>(kSlotFree",
        "overwrites tensor 4 of global memory while pipe",
    ),
    "the vector cores say nothing": (
        "norm_matmul_rows.h", "      TellCube<PIPE_MTE3>(kSlotFull + which);\n", "", "it would hang",
    ),
    "the flag comes before the rows": (
        "norm_matmul_rows.h", "TellCube<PIPE_MTE3>(kSlotFull", "TellCube<PIPE_V>(kSlotFull",
        "before the write by pipe MTE3 of core|which nobody has written",
    ),
    "a slot is freed that nobody waits for": (
        "norm_matmul_cube.h", "if (ends && step.tile + 2 < steps_.Tiles())", "if (ends)", "flag [23] is still set",
    ),
    "L0C overflow": (
        "norm_matmul_cube.h", "pipe->InitBuffer(sums_, 2, t_.tile_rows", "pipe->InitBuffer(sums_, 8, 32 * t_.tile_rows",
        "L0C overflow",
    ),
    "small products without a barrier": (
        "cube_tiles.h", "if (Fractals(rows) * Fractals(columns) < 10)", "if (false)",
        "M_M, here PipeBarrier, is missing",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def mutants(tmp_path_factory):
    return plant(tmp_path_factory.mktemp("mutants"), "norm_matmul", FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, mutants, monkeypatch):
    message = FAULTS[fault][-1]
    monkeypatch.setattr(kernels, "ASCENDC", mutants[fault])
    x, scale, weight = draw(2000, 192, 16, torch.float16)
    with pytest.raises(EmulationError, match=message):
        norm_matmul(x, scale, weight)
