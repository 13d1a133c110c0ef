"""Every hand-over in our kernels is needed: the emulation refuses each kernel once one of them is taken out."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from atb_modules.testing.ascendc import EmulationError, In, InOut, Out, build_kernels, launch
from atb_modules.testing.ascendc import kernels as emulated

#: kernel, the text that is changed (its first match), what it becomes, and the fault
MUTATIONS = [
    ("add_rms_norm", r"    WaitForVector\(pipe_\);\n    for", "    for", "V_S is missing"),
    ("add_rms_norm", r"ReadMean\(r\), t_.width\);\n    VectorWaitsForScalar\(pipe_\);", "ReadMean(r), t_.width);",
     "S_V is missing"),
    ("add_rms_norm", r"Add\(a, a, b, n\);\n *PipeBarrier<PIPE_V>\(\);", "Add(a, a, b, n);", "V_V, here PipeBarrier"),
    ("add_rms_norm", r"SetFlag<HardEvent::MTE3_MTE2>\(id\);\n *WaitFlag<HardEvent::MTE3_MTE2>\(id\);", "(void)id;",
     "reads tensor .* before the write by pipe MTE3"),
    ("add_rms_norm", r"in_residual_.FreeTensor\(residual\);", "", "(all buffers of the queue are in use|not freed)"),
    ("add_rms_norm", r"y_\[row \* t_.width\], rows,", "y_[row * t_.width], t_.tile_rows,", "nobody has written"),
    ("gated", r"atb::Narrow\(result, gate, n\);\n *out_.EnQue\(result\);\n *result = out_.template DeQue<T>\(\);",
     "atb::Narrow(result, gate, n);", "V_MTE3 is missing"),
    ("gated", r"atb::ZerosBehind<T>\(t_.step - at.count\)", "DataCopyPadExtParams<T>{}", "nobody has written"),
    ("lse_merge", r"atb::WaitForVector\(pipe_\);", "", "V_S is missing"),
    ("rotary_append", r"atb::VectorWaitsForScalar\(pipe_\);", "", "S_V is missing"),
    ("rotary_append", r"\(t_.page_size - 1\) \* bytes", "t_.page_size * bytes", "may still write it"),
    ("rms_norm_backward", r"(?s)(float Mean.*?)atb::VectorWaitsForScalar\(pipe_\);", r"\1", "S_V is missing"),
]  # fmt: skip
ENTRY = (
    r'(?s)(#ifndef ATB_NO_BFLOAT16\n)?extern "C" __global__ __aicore__ void\s+\w+_(half|bfloat16)\(.*?\n}\n(#endif\n)?'
)


def mutated(folder, number):
    """The kernel's source, in float alone and with its headers pasted in, changed in one place."""
    kernel, pattern, replacement, _ = MUTATIONS[number]
    text = (emulated.ASCENDC / f"{kernel}.cpp").read_text()
    rows = (emulated.ASCENDC / "rms_norm_rows.h").read_text().replace("#pragma once\n", "")
    text = text.replace('#include "rms_norm_rows.h"', rows)
    text = re.sub(ENTRY, "", text)
    changed, count = re.subn(pattern, replacement, text, count=1)
    assert count == 1, f"mutation {number} finds nothing to change"
    path = folder / f"{kernel}_{number}.cpp"
    path.write_text(changed)
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutations")
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda number: mutated(folder, number), range(len(MUTATIONS))))
    build_kernels(paths, include=[emulated.ASCENDC])
    return paths


def run_kernel(kernel, source):
    """One launch in float that takes every branch that the mutations touch."""
    run = lambda arguments, tiling: launch(  # noqa: E731
        source, f"atb_{kernel}_float", [*arguments, tiling], blocks=emulated.blocks_of(tiling),
        include=[emulated.ASCENDC],
    )  # fmt: skip
    common = {"soc": "ascend910b1", "dtype": torch.float32}
    if kernel == "add_rms_norm":
        for shape in ((200, 40), (1, 20_000)):
            x, weight = torch.randn(shape), torch.randn(shape[1])
            tiling = emulated.tile(
                "rms_norm", "RmsNormTiling", **common, rows=shape[0], width=shape[1], adds=True, has_weight=True,
                cast_first=False, keeps_rstd=True, eps=1e-6, weight_offset=0.0,
            )  # fmt: skip
            outs = [Out(torch.empty(shape)), Out(torch.empty(shape)), Out(torch.empty(shape[0]))]
            run([In(x), In(x.clone()), In(weight), *outs], tiling)
    elif kernel == "gated":
        gate, up = torch.randn(300, 60).split(30, dim=1)
        tiling = emulated.tile(
            "gated", "GatedTiling", **common, rows=300, width=30, gate_step=60, up_step=60, kind=0
        )  # fmt: skip
        run([In(gate), In(up), Out(torch.empty(300, 30))], tiling)
    elif kernel == "lse_merge":
        tiling = emulated.tile("lse_merge", "LseMergeTiling", **common, parts=3, rows=50, width=64)
        outs = [Out(torch.empty(50, 64)), Out(torch.empty(50))]
        run([In(torch.randn(3, 50, 64)), In(torch.randn(3, 50)), *outs], tiling)
    elif kernel == "rotary_append":
        q, kv, angles = torch.randn(48, 3, 24), torch.randn(48, 2, 24), torch.randn(48, 12)
        pages = [torch.zeros(12, 2, 4, 24) for _ in range(2)]
        shape = emulated.RotaryAppendShape(
            tokens=48, heads=3, kv_heads=2, head_dim=24, value_dim=24, pairs=12, q_step=72, k_step=48, v_step=48,
            page_size=4, pages=12, slots_int64=True,
        )  # fmt: skip
        tiling = emulated.tile("rotary_append", "RotaryAppendTiling", **common, shape=shape)
        run([InOut(q), In(kv), In(kv.clone()), In(angles), In(angles.clone()), *map(InOut, pages),
             In(torch.arange(48))], tiling)  # fmt: skip
    else:
        x = torch.randn(60, 20_000)
        tiling = emulated.tile(
            "rms_norm_backward", "RmsNormBackwardTiling", **common, rows=60, width=20_000, has_weight=True,
            has_sum_grad=False, weight_offset=0.0,
        )  # fmt: skip
        partial = torch.empty(emulated.blocks_of(tiling), 20_000)
        run([In(x), In(x.clone()), In(torch.ones(60)), In(x[0].clone()), None, Out(torch.empty_like(x)), Out(partial)],
            tiling)  # fmt: skip


@pytest.mark.parametrize("kernel", sorted({kernel for kernel, *_ in MUTATIONS}))
def test_the_kernels_as_they_are_pass(kernel):
    run_kernel(kernel, emulated.ASCENDC / f"{kernel}.cpp")


@pytest.mark.parametrize("number", range(len(MUTATIONS)))
def test_a_mutated_kernel_is_refused(sources, number):
    with pytest.raises(EmulationError, match=MUTATIONS[number][3]):
        run_kernel(MUTATIONS[number][0], sources[number])
