"""What the kernels take of the on-chip memories and move through global memory, as the emulation counts it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules.kernels.ascend.availability import assume_soc
from atb_modules.kernels.ascend.rules import whole_blocks
from atb_modules.kernels.ascend.socs import SOCS
from atb_modules.kernels.traits import NormTraits
from atb_modules.testing.ascendc import kernels as emulated

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
socs = st.sampled_from(list(SOCS.values()))
dtypes = st.sampled_from(DTYPES)


def fits(call, soc):
    """Runs the call where the kernel takes it, and holds every core's peak to the SoC. A fault would raise."""
    try:
        report = call()
    except ValueError as error:
        assert str(error).startswith("ascend ")
        return
    assert report.peak("UB") <= soc.ub - emulated.RESERVED_UB


@settings(max_examples=200, deadline=None)
@given(
    soc=socs, dtype=st.sampled_from([torch.float16, torch.float32]), rows=st.integers(2, 50), width=st.integers(1, 500)
)
def test_records_and_tilings_refuse_the_same_rows(soc, dtype, rows, width):
    """What Python says of rows that a chip cannot copy, and what the C++ that lays kernels out says."""
    with assume_soc(soc):
        refused = bool(list(whole_blocks(NormTraits("npu", dtype, rows, width))))
    norm = {
        "adds": True,
        "has_weight": True,
        "cast_first": False,
        "keeps_rstd": False,
        "eps": 1e-6,
        "weight_offset": 0.0,
    }
    halves = {"gate_step": 2 * width, "up_step": 2 * width, "kind": 0}
    for op, struct, options in (("rms_norm", "RmsNormTiling", norm), ("gated", "GatedTiling", halves)):
        try:
            emulated.tile(op, struct, soc, dtype=dtype, rows=rows, width=width, **options)
        except ValueError as error:
            assert refused and str(error).endswith("copies multiples of 32 bytes, and a row is none")
        else:
            assert not refused


@st.composite
def shapes(draw, most=100_000):
    """Rows and widths, each of which may be long."""
    width = draw(st.one_of(st.integers(1, 64), st.integers(1, 20_000), st.integers(1, 60_000).map(lambda n: 16 * n)))
    return draw(st.integers(1, max(1, min(most // width, 7000)))), min(width, most)


@settings(max_examples=60, deadline=None)
@given(soc=socs, dtype=dtypes, shape=shapes(), adds=st.booleans(), keep=st.booleans(), weighted=st.booleans())
def test_norms_fit_every_soc(soc, dtype, shape, adds, keep, weighted):
    x = torch.ones(shape, dtype=dtype)
    weight = torch.ones(shape[1], dtype=dtype) if weighted else None
    options = {"keep_rstd": keep, "soc": soc, "trace": False}
    if adds:
        fits(lambda: emulated.add_rms_norm(x, x, weight, **options)[-1], soc)
    else:
        fits(lambda: emulated.rms_norm(x, weight, **options)[-1], soc)


@settings(max_examples=40, deadline=None)
@given(soc=socs, dtype=dtypes, shape=shapes(), of_sum=st.booleans(), weighted=st.booleans())
def test_the_backward_fits_every_soc(soc, dtype, shape, of_sum, weighted):
    x, rstd = torch.ones(shape, dtype=dtype), torch.ones(shape[0])
    weight, grad_sum = torch.ones(shape[1], dtype=dtype) if weighted else None, x if of_sum else None
    fits(lambda: emulated.rms_norm_backward(x, x, rstd, weight, grad_sum, soc=soc, trace=False)[-1], soc)


@settings(max_examples=40, deadline=None)
@given(soc=socs, dtype=dtypes, shape=shapes(), fused=st.booleans())
def test_gated_activations_fit_every_soc(soc, dtype, shape, fused):
    rows, width = shape
    both = torch.ones(rows, 2 * width, dtype=dtype)
    gate, up = both.split(width, dim=1)
    if not fused:
        gate, up = gate.contiguous(), up.contiguous()
    fits(lambda: emulated.gated_activation(gate, up, soc=soc, trace=False)[-1], soc)


@settings(max_examples=40, deadline=None)
@given(
    soc=socs,
    dtype=dtypes,
    tokens=st.integers(1, 40),
    heads=st.integers(1, 130),
    kv_heads=st.integers(1, 16),
    dim=st.one_of(st.integers(2, 64), st.sampled_from([80, 128, 192, 256, 512, 1024])),
    rotated=st.floats(0.01, 1.0),
    interleaved=st.booleans(),
)
def test_rotary_append_fits_every_soc(soc, dtype, tokens, heads, kv_heads, dim, rotated, interleaved):
    tokens = max(1, min(tokens, 100_000 // (heads * dim)))
    pairs = max(1, int(dim * rotated) // 2)
    q, kv = torch.ones(tokens, heads, dim, dtype=dtype), torch.ones(tokens, kv_heads, dim, dtype=dtype)
    pages = torch.zeros(tokens // 16 + 1, kv_heads, 16, dim, dtype=dtype)
    angles, slots = torch.ones(tokens, pairs), torch.arange(tokens)
    fits(
        lambda: emulated.rotary_append(
            q, kv, kv, angles, angles, pages, pages.clone(), slots, interleaved=interleaved, soc=soc, trace=False
        ),
        soc,
    )


@settings(max_examples=30, deadline=None)
@given(soc=socs, dtype=dtypes, parts=st.integers(1, 512), rows=st.integers(1, 3000), width=st.integers(1, 4096))
def test_merges_fit_every_soc(soc, dtype, parts, rows, width):
    rows = max(1, min(rows, 200_000 // (parts * width)))
    outs = torch.ones(parts, rows, width, dtype=dtype)
    fits(lambda: emulated.lse_merge(outs, torch.ones(parts, rows), soc=soc, trace=False)[-1], soc)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2048, 4096, 5120])
def test_add_rms_norm_reads_and_writes_everything_once(dtype, width, capsys):
    """The table: bytes of the kernel, the least possible, and the unfused sequence's."""
    rows = 480
    x = torch.randn(rows, width).to(dtype)
    *_, report = emulated.add_rms_norm(x, x.clone(), torch.ones(width, dtype=dtype), keep_rstd=False, trace=False)
    tensor = rows * width * x.element_size()
    least = 4 * tensor + width * x.element_size()
    *_, norm = emulated.rms_norm(x, torch.ones(width, dtype=dtype), keep_rstd=False, trace=False)
    unfused = 3 * tensor + norm.bytes_moved  # the sum reads two tensors and writes one
    with capsys.disabled():
        print(f"\nadd+RMSNorm {rows} x {width} {dtype}: {report.bytes_moved} bytes moved (emulated), {least} least, "
              f"{unfused} unfused; {report.bytes_moved / least:.3f} of the least, "
              f"{report.bytes_moved / unfused:.3f} of the unfused")  # fmt: skip
    for traffic, (read, written) in zip(
        report.tensors, [(tensor, 0), (tensor, 0), (report.blocks * width * x.element_size(), 0)] + 2 * [(0, tensor)],
        strict=True,
    ):  # fmt: skip
        assert (traffic.read, traffic.written, traffic.unwritten) == (read, written, 0)
    assert report.bytes_moved <= 1.05 * least
    assert report.bytes_moved < 0.84 * unfused


def test_the_other_kernels_read_and_write_everything_once():
    rows, width = 480, 2048
    x, weight = torch.randn(rows, width).half(), torch.ones(width).half()
    tensor = rows * width * 2
    assert emulated.rms_norm(x, weight, keep_rstd=False)[-1].bytes_moved <= 1.05 * 2 * tensor
    halves = torch.randn(rows, 2 * width).half().split(width, dim=1)
    report = emulated.gated_activation(*halves)[-1]
    assert [(t.read, t.written) for t in report.tensors] == [(tensor, 0), (tensor, 0), (0, tensor)]
    report = emulated.rms_norm_backward(x, x.clone(), torch.ones(rows), weight, x.clone())[-1]
    assert report.bytes_moved <= 1.1 * 4 * tensor  # a partial sum of grad_weight in float comes from each core
    outs = torch.randn(4, rows, 128)
    lse = torch.randn(4, rows)
    least = 4 * (5 * rows * 128 + 5 * rows)
    assert emulated.lse_merge(outs, lse)[-1].bytes_moved == least


def assert_loads_run_ahead(report, loads, op, computes):
    """The ``loads`` copies of tile n + 1 are issued before the first of the ``computes`` ``op`` of tile n."""
    copies = np.sort([i for name in ("DataCopy", "DataCopyPad") for i in report.instructions(0, "MTE2", name)])
    starts = report.instructions(0, "V", op)[::computes]
    last_loads = copies[loads - 1 :: loads]
    assert len(last_loads) == len(starts) > 2
    assert all(load < start for load, start in zip(last_loads[1:], starts[:-1], strict=True))


def test_the_next_tile_is_loaded_while_one_is_computed():
    x = torch.randn(480, 4096).half()
    *_, report = emulated.add_rms_norm(x, x.clone(), None, keep_rstd=False)
    assert_loads_run_ahead(report, 2, "DeQue", 2)
    *_, report = emulated.rms_norm(x, None, keep_rstd=False)
    assert_loads_run_ahead(report, 1, "DeQue", 1)
    *_, report = emulated.gated_activation(x, x.clone())
    assert_loads_run_ahead(report, 2, "DeQue", 2)
    rows = torch.randn(480, 128)
    *_, report = emulated.lse_merge(rows.expand(4, 480, 128).contiguous(), torch.zeros(4, 480))
    parts = report.instructions(0, "MTE2", "DataCopy")
    weighing = report.instructions(0, "V", "Axpy")
    assert len(parts) == 4 and parts[1] < weighing[0] and parts[2] < weighing[10]


def test_the_map_of_the_unified_buffer_has_no_overlap():
    x = torch.randn(100, 1001)
    *_, report = emulated.add_rms_norm(x, x.clone(), torch.ones(1001))
    rows = sorted((row.offset, row.bytes) for row in report.buffers if row.core == 0)
    assert all(start + size <= after for (start, size), (after, _) in pairwise(rows))
    assert rows[-1][0] + rows[-1][1] == report.cores[0].peak["UB"]
    assert {row.position for row in report.buffers} == {"VECIN", "VECOUT", "VECCALC"}


def test_the_trace_is_told_as_text():
    x = torch.randn(1, 16)
    *_, report = emulated.rms_norm(x, None, keep_rstd=False)
    lines = [line.split()[1:] for line in report.listing().splitlines()]
    assert ["MTE2", "DataCopy", "UB[0", ":", "64]", "tensor", "0", "at", "0"] in lines
    assert [line[0] for line in lines if line[1] == "ReduceSum"] == ["V"]
    assert (
        lines[-2][:2] == ["MTE3", "FreeTensor"] and report.listing(start=0, stop=1) == report.listing().splitlines()[0]
    )
