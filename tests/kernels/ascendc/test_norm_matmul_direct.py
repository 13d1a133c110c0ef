"""RMSNorm + product straight from the unified buffer to L1 (dav-3510): order, traffic, planted faults."""

from __future__ import annotations

import pytest
import torch

from atb_modules.testing.ascendc import EmulationError, kernels
from atb_modules.testing.ascendc.matmul_kernels import norm_matmul
from atb_modules.testing.ascendc.mutants import mutated_sources, plant
from tests.kernels.ascendc.test_norm_matmul import check, draw

SOC = "ascend950"


def several_steps(rows=4100, width=520, columns=20):
    """The report of a call whose blocks have several tiles of rows, and three chunks of the width."""
    x, scale, weight = draw(rows, width, columns, torch.float16)
    return norm_matmul(x, scale, weight, soc=SOC)[1]


def test_normalised_rows_go_through_no_global_memory():
    x, scale, weight = draw(16, 1024, 2048, torch.float16)
    _, report = norm_matmul(x, scale, weight, soc=SOC)
    _, through = norm_matmul(x, scale, weight)
    rows, _, product, out = report.tensors
    assert len(through.tensors) == 5 and through.tensors[4].written > 0  # the workspace of the other generation
    assert (product.read, out.written, out.unwritten) == (weight.numel() * 2, 16 * 2048 * 2, 0)
    assert rows.read == report.blocks * 2 * x.numel() * 2  # each block: once for the statistics, once for its tile
    writes = [i for i in report.instructions(1, "MTE3", "DataCopy") if report.trace[i]["region"] < 0]
    assert len(writes) == 1024 // 256
    assert {int(report.trace[i]["place"]) for i in writes} == {1}  # L1


def test_a_chunk_is_normalised_while_the_one_before_is_multiplied():
    report = several_steps()
    trace = report.trace
    # the flags of the first vector core; those of the second are 16 to 26
    products, freed = (
        [i for i in report.instructions(0, "MTE1", op) if trace[i]["offset"] < 16]
        for op in ("CrossCoreWaitFlag", "CrossCoreSetFlag")
    )
    steps = len(products)
    assert steps >= 6 and len(freed) == steps - 2
    for core in (1, 2):
        filled = report.instructions(core, "MTE3", "CrossCoreSetFlag")
        waited = report.instructions(core, "MTE3", "CrossCoreWaitFlag")
        assert len(filled) == steps and len(waited) == steps - 2
        assert filled[1] < waited[0]
        # the rows of the next step are on their way before those of this one are scaled
        loads = [i for i in report.instructions(core, "MTE2", "DataCopyPad") if trace[i]["region"] == 0]
        taken = [i for i in report.instructions(core, "V", "DeQue") if trace[i]["bytes"] > 512]  # rows, not weights
        assert all(load < use for load, use in zip(loads[1:], taken, strict=False))
    weights = [i for i in report.instructions(0, "MTE2", "DataCopy") if trace[i]["region"] == 2]
    assert len(weights) == steps
    assert all(weights[n + 1] < products[n] for n in range(steps - 1))


@pytest.mark.parametrize("width", [20_000, 65_535])
def test_rows_of_any_length(width):
    check(3, width, 20, torch.float16, soc=SOC)


FAULTS = {
    "the cube core does not wait for the slot": (
        "norm_matmul_direct_cube.h", "    AwaitVectors<PIPE_MTE1>(kSlotFull + which);\n", "",
        "of L1, which nobody has written|reads L1 .* before the write by pipe MTE3 of core",
    ),
    "a slot is overwritten too early": (
        "norm_matmul_direct_rows.h", "    if (sent_ >= 2) AwaitCube<PIPE_MTE3>(kSlotFree + which);\n", "",
        "reads L1 .* before the write by pipe MTE3|overwrites L1 .* while pipe MTE[13]",
    ),
    "a slot is given back before it is read": (
        "norm_matmul_direct_cube.h", "TellVectors<PIPE_MTE1>(kSlotFree", "TellVectors<PIPE_MTE2>(kSlotFree",
        "overwrites L1 .* while pipe MTE1 of core . may still read it: a cross-core flag is missing",
    ),
    "the vector cores say nothing": (
        "norm_matmul_direct_rows.h", "    TellCube<PIPE_MTE3>(kSlotFull + which);\n", "", "it would hang",
    ),
    "the flag comes before the rows": (
        "norm_matmul_direct_rows.h", "TellCube<PIPE_MTE3>(kSlotFull", "TellCube<PIPE_V>(kSlotFull",
        "reads L1 .* before the write by pipe MTE3 of core",
    ),
    "a slot is freed that nobody waits for": (
        "norm_matmul_direct_cube.h", "if (at + k == n && again)", "if (at + k == n)", "flag [23] is still set",
    ),
    "the weights come first in L1": (
        "norm_matmul_direct_rows.h", "static_cast<uint32_t>(which * size * sizeof(T))",
        "static_cast<uint32_t>((which + 2) * size * sizeof(T))", "L1 .* while pipe MTE2 of core|MTE[12]|has no buffer",
    ),
    "rows without the missing ones": (
        "norm_matmul_direct_rows.h", "    if (rows < share) {", "    if (false) {", "of UB, which nobody has written",
    ),
    "the end of a row is left as it is": (
        "norm_matmul_direct_rows.h", "behind, gap, 0},\n                ZerosBehind<T>(width - n));",
        "behind, gap, 0},\n                DataCopyPadExtParams<T>{});", "of UB, which nobody has written",
    ),
    "the second vector core is not told": (
        "cross_core.h", "  CrossCoreSetFlag<4, pipe>(flag + 16);\n", "", "it would hang",
    ),
    "the second vector core is not waited for": (
        "cross_core.h", "  CrossCoreWaitFlag<4, pipe>(flag + 16);\n", "",
        "reads L1 .* before the write by pipe MTE3 of core 2",
    ),
    "both slots have one flag": (
        "norm_matmul_direct_rows.h", "TellCube<PIPE_MTE3>(kSlotFull + which)", "TellCube<PIPE_MTE3>(kSlotFull)",
        "it would hang",
    ),
    "all chunks go to one slot": (
        "norm_matmul_direct_rows.h", "static_cast<uint16_t>(sent_ % 2)", "static_cast<uint16_t>(0)",
        "reads L1 .* before the write by pipe MTE3 of core 1",
    ),
    "both vector cores write one half": (
        "norm_matmul_direct_rows.h", "[static_cast<uint32_t>(GetSubBlockIdx()) * share * kFractalWidth<T>]", "[0]",
        "overwrites L1 at byte 0 while pipe MTE3 of core 1 may still write it",
    ),
    "columns without room for the other half": (
        "norm_matmul_direct_rows.h", "(share), 0, static_cast<uint16_t>(share)};", "(share), 0, 0};",
        "overwrites L1 .* while pipe MTE3 of core 1 may still write it",
    ),
    "fractals before the rows are scaled": (
        "norm_matmul_direct_rows.h", "BinaryRepeatParams(1, 1, 1, line, line, 0));\n      PipeBarrier<PIPE_V>();",
        "BinaryRepeatParams(1, 1, 1, line, line, 0));", "Cast .* V_V, here PipeBarrier, is missing",
    ),
    "rows of fractals lie too close": (
        "norm_matmul_direct_rows.h", "steps(static_cast<uint16_t>(share), 1, 1,",
        "steps(static_cast<uint16_t>(share - 1), 1, 1,", "of UB, which nobody has written",
    ),
    "squares of the tile before": (
        "norm_matmul_direct_rows.h", "if (step.start == 0)\n        Mul(squares", "if (false)\n        Mul(squares",
        "MulAddDst reads byte .* of UB, which nobody has written",
    ),
    "rows are not loaded ahead": (
        "norm_matmul_direct_rows.h", "InitBuffer(in_, 2, ", "InitBuffer(in_, 1, ",
        "all buffers of the queue are in use",
    ),
    "a slot is given back after its first piece": (
        "norm_matmul_direct_cube.h", "if (at + k == n && again)", "if (at == 0 && again)",
        "L1 .* while pipe MTE1 of core 0 may still read it|reads L1 .* before the write by pipe MTE3",
    ),
    "the statistics are used too early": (
        "norm_matmul_direct_rows.h", "repeats, 1, 1, line);\n    PipeBarrier<PIPE_V>();\n", "repeats, 1, 1, line);\n",
        "V_V, here PipeBarrier, is missing",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def mutants(tmp_path_factory):
    return plant(tmp_path_factory.mktemp("mutants"), "norm_matmul", FAULTS, arch=3510)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, mutants, monkeypatch):
    monkeypatch.setattr(kernels, "ASCENDC", mutants[fault])
    with pytest.raises(EmulationError, match=FAULTS[fault][-1]):
        several_steps(width=519)


WRONG_RESULTS = {
    "rows of the next line": (
        "norm_matmul_direct_rows.h", "1, 1, static_cast<uint8_t>(t_.chunk / 8));\n    for", "1, 1, 8);\n    for",
    ),
    "both cores have the first rows": (
        "norm_matmul_direct_rows.h", "uint64_t(MyRow(step)) * t_.width", "uint64_t(FirstRow(step)) * t_.width",
    ),
    "the mean of a chunk": (
        "norm_matmul_direct_rows.h", "1.0f / static_cast<float>(t_.width)", "1.0f / static_cast<float>(t_.chunk)",
    ),
    "always the first piece": (
        "cube_tiles.h", "load.kStartPosition = at / kFractalWidth<T>;", "load.kStartPosition = 0;",
    ),
    "sums of the last chunk": ("norm_matmul_direct_cube.h", "step.start + at == 0", "at == 0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG_RESULTS)
def test_wrong_results_turn_parity_red(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "ASCENDC", mutated_sources(tmp_path, *WRONG_RESULTS[fault]))
    with pytest.raises(AssertionError):
        check(37, 600, 40, torch.float16, soc=SOC)
