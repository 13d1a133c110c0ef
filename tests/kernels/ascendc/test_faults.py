"""The emulation finds planted faults: each kernel of ``sources/faults_*.cpp`` breaks one rule of the hardware."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from atb_modules.kernels.ascend.socs import SOCS
from atb_modules.testing.ascendc import EmulationError, In, Out, Work, build_kernels, launch
from atb_modules.testing.seeds import fresh_generator

SOURCES = Path(__file__).parent / "sources"
COUNT = 1001

MEMORY = {
    "ub_overflow": "UB overflow: 262144 bytes are asked for, the SoC has 196608",
    "misaligned_operand": "not aligned to 32 bytes",
    "misaligned_copy": "not aligned to 32 bytes",
    "copy_of_40_bytes": "40 bytes are not a multiple of 32",
    "tail_past_the_end": "reads 28 bytes past the end of tensor 0",
    "past_the_global_buffer": "past the size given to SetGlobalBuffer",
    "tail_stored_past_the_end": "writes 28 bytes past the end of tensor 1",
    "uninitialised_read": "reads byte .* of UB, which nobody has written",
    "reads_the_padding": "reads byte .* of UB, which nobody has written",
    "reads_a_recycled_buffer": "reads byte .* of UB, which nobody has written",
    "count_past_the_tensor": "count of 1025 exceeds the tensor of 1024",
    "writes_the_input": "writes tensor 0, which is an input",
    "reads_the_output": "reads element 0 of tensor 1 of global memory, which nobody has written",
    "small_work_tensor": "work tensor has 8 elements, 16 are needed",
    "double_free": "FreeTensor of a tensor that is free already",
    "leak": "FreeTensor is missing",
    "left_in_the_queue": "still in the queue",
    "dequeue_of_nothing": "DeQue from an empty queue",
    "alloc_of_a_third_buffer": "all buffers of the queue are in use",
    "enqueued_twice": "gave away before",
    "foreign_tensor": "does not belong to the queue",
    "nine_buffers": "9 buffers together; there are eight events",
    "select_without_room": "Select needs 8192 bytes of UB",
    "queue_before_init": "used before InitBuffer",
    "reads_what_is_free": "reads byte .* of UB, which nobody has written",
    "result_over_a_part": "the result from byte 32 lies over a part of the operand from byte 0",
    "widened_in_place": "Cast: the result from byte 0 lies over a part of the operand from byte 0",
    "too_many_runs": "1 to 4095 runs, given 4096",
}
SYNC = {
    "no_wait_for_the_load": "pipe V reads UB at byte 0 before the write by pipe MTE2 .* MTE2_V is missing",
    "wrong_event": "pipe MTE3 reads UB .* before the write by pipe V .* V_MTE3 is missing",
    "no_wait_for_the_result": "V_MTE3 is missing",
    "load_over_a_read": "pipe MTE2 overwrites UB .* while pipe V may still read it.*V_MTE2 is missing",
    "compute_over_a_store": "pipe V overwrites UB .* while pipe MTE3 may still read it.*MTE3_V is missing",
    "no_barrier": "V_V, here PipeBarrier, is missing",
    "scalar_reads_too_early": "V_S is missing",
    "vector_reads_scalars_too_early": "S_V is missing",
    "wait_without_set": "nobody has set: it would hang",
    "wait_for_another_event": "nobody has set: it would hang",
    "set_twice": "sets an event that is set",
    "event_left_set": "MTE2_V is still set when the kernel ends",
    "atomic_left_on": "SetAtomicNone is missing",
    "adds_to_nothing": "adds to tensor 1 of global memory, which nobody has written",
    "load_after_store": "reads tensor 1 of global memory before the write by pipe MTE3",
    "cores_write_the_same": "overwrites tensor 1 of global memory while pipe MTE3 of core 0 may still write it",
    "exchange_without_sync": "(before the write by pipe MTE3 of core|which nobody has written)",
    "one_core_skips_the_barrier": "would hang",
}
CUBE = {
    "l0c_overflow": "L0C overflow: 132096 bytes are asked for, the SoC has 131072",
    "no_wait_for_l1": "MTE2_MTE1 is missing",
    "no_wait_for_the_product": "M_FIX is missing",
    "small_products_without_barrier": "M_M, here PipeBarrier, is missing",
    "accumulates_on_nothing": "reads byte 0 of L0C, which nobody has written",
    "rows_that_nobody_filled": "reads byte 96 of L1, which nobody has written",
    "conversion_that_does_not_fit": "quantPre does not fit",
    "vector_op_on_a_cube_core": "a cube core has no UB",
}
#: the way from the unified buffer to L1, and what else dav-3510 does in its own way
DAV_3510 = {
    "no_wait_for_the_rows": "reads byte 0 of L1, which nobody has written",
    "waits_for_one_vector_core": "of L1, which nobody has written|before the write by pipe MTE3 of core 2",
    "slot_filled_too_early": "L1 at byte 0 before the write by pipe MTE3 of core 1 .* a cross-core flag is missing",
    "rows_not_yet_computed": "V_MTE3 is missing",
    "over_another_buffer": "overwrites L1 at byte 512 while pipe MTE2 of core 0 may still write it",
    "behind_the_buffers": "a vector core writes L1 where its cube core has no buffer",
    "between_blocks": "by address starts at a multiple of 32 bytes",
    "past_the_end_of_l1": "by address lies past the end of its memory",
    "rows_of_fractals_in_l0a": "L0A of dav-3510 holds columns of fractals",
    "fill_of_l0a": "dav-3510 fills L1, not L0A or L0B",
    "columns_too_close": "a stride is smaller than the fractals of a column",
    "rows_copied_as_fractals": "simulated by software: make fractals in the unified buffer",
    "too_many_fractals_at_once": "mStep and kStep are 1 to 255",
    "adds_to_no_elements": "does not promise to do nothing for a count or a repeat of 0",
    "gap_between_fractals": "dstGap has no effect on dav-3510",
}
MIXED = {
    "mixed_without_wait": "of global memory",
    "mixed_half_set": r"CrossCoreWaitFlag\(3\) waits for a flag that no core sets: it would hang",
}


@pytest.fixture(scope="module", autouse=True)
def built():
    build_kernels(SOURCES / f"{name}.cpp" for name in ("faults_memory", "faults_sync", "faults_cube", "mixed"))
    build_kernels([SOURCES / "faults_3510.cpp"], arch=3510)


def run_vector(source, kernel, count=COUNT, blocks=1, soc="ascend910b1"):
    x = torch.randn(count, generator=fresh_generator())
    y = torch.empty(count)
    report = launch(SOURCES / source, kernel, [In(x), Out(y), ctypes.c_uint32(count)], blocks=blocks, soc=soc)
    return x, y, report


def test_kernels_without_a_fault_pass():
    x, y, report = run_vector("faults_memory.cpp", "correct")
    assert torch.equal(y, x + 1)
    assert [(t.read, t.written, t.unwritten) for t in report.tensors] == [(4 * COUNT, 0, 0), (0, 4 * COUNT, 0)]
    x, y, _ = run_vector("faults_sync.cpp", "correct", 1024)
    assert torch.equal(y, (x + 1) * 2)
    _, y, report = run_vector("faults_sync.cpp", "exchange", 1024, blocks=2)
    assert torch.equal(y, torch.arange(2.0).repeat_interleave(512))
    a = torch.randn(16, 16, generator=fresh_generator()).half()
    c = torch.empty(16, 16)
    launch(SOURCES / "faults_cube.cpp", "correct", [In(a), Out(c)])
    torch.testing.assert_close(c, 2 * (a.float() @ a.float().T))


@pytest.mark.parametrize("kernel", MEMORY)
def test_faults_of_memory_and_queues(kernel):
    with pytest.raises(EmulationError, match=MEMORY[kernel]):
        run_vector("faults_memory.cpp", kernel)


@pytest.mark.parametrize("kernel", SYNC)
def test_faults_of_synchronisation(kernel):
    with pytest.raises(EmulationError, match=SYNC[kernel]):
        run_vector("faults_sync.cpp", kernel, 1024, blocks=2)


@pytest.mark.parametrize("kernel", CUBE)
def test_faults_of_the_cube_side(kernel):
    a, c = torch.ones(16, 16).half(), torch.empty(16, 16)
    with pytest.raises(EmulationError, match=CUBE[kernel]):
        launch(SOURCES / "faults_cube.cpp", kernel, [In(a), Out(c)])


def straight_to_l1(kernel, soc="ascend950"):
    generator = fresh_generator()
    a, b = (torch.randn(16, 16, generator=generator).half() for _ in range(2))
    c = torch.empty(16, 16)
    return a, b, c, launch(SOURCES / "faults_3510.cpp", kernel, [In(a), In(b), Out(c)], soc=soc)


def test_vector_cores_write_the_l1_of_their_cube_core():
    a, b, c, report = straight_to_l1("correct")
    torch.testing.assert_close(c, (a + 1).float() @ b.float().T, rtol=1e-5, atol=1e-4)
    assert report.bytes_moved == 2 * 512 + 1024  # the sum goes through no global memory
    with pytest.raises(EmulationError, match="no way from the unified buffer to L1"):
        straight_to_l1("correct", "ascend910b1")


@pytest.mark.parametrize("kernel", DAV_3510)
def test_faults_on_the_way_to_l1(kernel):
    with pytest.raises(EmulationError, match=DAV_3510[kernel]):
        straight_to_l1(kernel)


def test_the_way_to_l1_is_asked_of_the_compiler():
    with pytest.raises(EmulationError, match="compiled with -DENABLE_CV_COMM_VIA_SSBUF=true"):
        launch(SOURCES / "fault_channel.cpp", "closed", [], soc="ascend950")


def mixed(kernel, m=37, n=43, k=90, blocks=1):
    generator = fresh_generator()
    a, b = (torch.randn(rows, k, generator=generator).half() for rows in (m, n))
    c, work = torch.empty(m, n), torch.empty(m, k).half()
    sizes = [ctypes.c_uint32(size) for size in (m, n, k)]
    return a, b, c, launch(SOURCES / "mixed.cpp", kernel, [In(a), In(b), Out(c), Work(work), *sizes], blocks=blocks)


def test_cube_and_vector_cores_work_on_one_product():
    a, b, c, report = mixed("mixed")
    torch.testing.assert_close(c, 2 * a.float() @ b.float().T, rtol=1e-5, atol=1e-4)
    assert [core.cube for core in report.cores] == [True, False, False]
    assert report.peak("L1") == 18432 and report.peak("L0C") == 9216 and report.peak("UB") == 384


@pytest.mark.parametrize("kernel", MIXED)
def test_faults_between_cube_and_vector_cores(kernel):
    with pytest.raises(EmulationError, match=MIXED[kernel]):
        mixed(kernel)


def test_the_vector_unit_has_no_bfloat16_addition():
    with pytest.raises(EmulationError, match="Add has no bfloat16_t form"):
        launch(SOURCES / "fault_bfloat16.cpp", "add_bfloat16", [])


def test_limits_are_those_of_the_soc():
    with pytest.raises(EmulationError, match="no DataCopyPad"):
        run_vector("faults_memory.cpp", "correct", soc="ascend310p")
    run_vector("faults_memory.cpp", "correct", soc="ascend950")
    with pytest.raises(EmulationError, match="the cube side of this SoC is not modelled"):
        launch(SOURCES / "mixed.cpp", "mixed", [], soc="ascend310p")
    for soc in SOCS.values():
        with pytest.raises(EmulationError, match=f"{soc.vector_cores + 1} blocks on {soc.vector_cores} cores"):
            run_vector("faults_memory.cpp", "correct", blocks=soc.vector_cores + 1, soc=soc)


def test_arguments_are_checked():
    x = torch.ones(8)
    with pytest.raises(EmulationError, match="the kernel takes 3 arguments, given 2"):
        launch(SOURCES / "faults_memory.cpp", "correct", [In(x), Out(torch.empty(8))])
    with pytest.raises(EmulationError, match="argument 2 of the kernel has 4 bytes, given 8"):
        launch(SOURCES / "faults_memory.cpp", "correct", [In(x), Out(torch.empty(8)), ctypes.c_uint64(8)])
    with pytest.raises(EmulationError, match="has no kernel missing"):
        launch(SOURCES / "faults_memory.cpp", "missing", [])
    with pytest.raises(TypeError, match=r"arguments\[0\] is int"):
        launch(SOURCES / "faults_memory.cpp", "correct", [3])
    with pytest.raises(ValueError, match="dense rows in order"):
        In(torch.ones(4, 4).t())
    with pytest.raises(TypeError, match="tensor is list"):
        In([1.0])
