"""The planner's bytes of a fused group are those that the emulation counts for the kernel."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from atb_modules.fusions import Fusion
from atb_modules.kernels.ascend.socs import SOCS
from atb_modules.optimize.planner import LayerShape, layer_steps, plan_steps
from atb_modules.testing.ascendc import attention_kernels, kernels, matmul_kernels

SHAPE = LayerShape(1024, 8, 2, 128, 2048, tokens=96, kv_len=96, dtype=torch.float16, page_size=16)
DECODE = dataclasses.replace(SHAPE, tokens=48, kv_len=48, batch=48)


def planned(shape, fusion, soc="ascend910b1"):
    """Bytes of the fused group alone: its steps, cut out of the layer."""
    steps = layer_steps(shape, SOCS[soc])
    kinds = {
        Fusion.ADD_NORM: ("add", "norm"),
        Fusion.NORM_MATMUL: ("norm", "matmul"),
        Fusion.ROTARY_APPEND: ("rotary", "append"),
        Fusion.GATE: ("activation", "multiply"),
        Fusion.ATTENTION: ("scores", "softmax", "values"),
    }[fusion]
    at = next(i for i in range(len(steps)) if tuple(s.kind for s in steps[i : i + len(kinds)]) == kinds)
    run = steps[at : at + len(kinds)]
    outside = {b.name for step in steps if step not in run for b in step.reads}
    kept = [
        dataclasses.replace(
            step,
            writes=tuple(dataclasses.replace(b, kept=b.kept or b.name in outside) for b in step.writes),
            reads=tuple(
                dataclasses.replace(b, kept=True) if _written(b, run) and b.name in outside else b for b in step.reads
            ),
        )
        for step in run
    ]
    groups = plan_steps(kept, shape, SOCS[soc]).groups
    assert [group.fusion for group in groups] == [fusion]
    return groups[0].bytes


def _written(buffer, run):
    return any(buffer.name == b.name for step in run for b in step.writes)


def half(*shape):
    return torch.randn(shape).half()


def counted(shape, fusion, soc="ascend910b1"):
    rows, heads, kv_heads, dim = shape.tokens, shape.num_heads, shape.num_kv_heads, shape.head_dim
    x = half(rows, shape.hidden_size)
    weight = half(shape.hidden_size)
    if fusion is Fusion.ADD_NORM:
        report = kernels.add_rms_norm(x, x.clone(), weight, keep_rstd=False, trace=False)[-1]
        # every core reads the weight: a row a core here, thousands of rows in a layer worth planning
        return report.bytes_moved - (report.blocks - 1) * weight.nbytes
    if fusion is Fusion.GATE:
        both = half(rows, 2 * shape.intermediate_size)
        return kernels.gated_activation(*both.split(shape.intermediate_size, dim=1), trace=False)[-1].bytes_moved
    if fusion is Fusion.NORM_MATMUL:
        product = half((heads + 2 * kv_heads) * dim, shape.hidden_size)
        report = matmul_kernels.norm_matmul(x, weight, product, soc=soc, trace=False)[-1]
        rows_in, scale, matrix, out = report.tensors[:4]  # the workspace after them stays in L2
        once = {x.nbytes: rows_in.read, weight.nbytes: scale.read, product.nbytes: matrix.read}
        # groups of cores read the same rows and the same part of the matrix, and straight to L1 the rows are read
        # once for their statistics and once for each tile of columns; after the first time all this is in L2
        assert all(read and read % size == 0 for size, read in once.items())
        return sum(once) + out.written
    pages = -(-shape.kv_len // shape.page_size) * shape.batch
    if fusion is Fusion.ROTARY_APPEND:
        q, k, v = half(rows, heads, dim), half(rows, kv_heads, dim), half(rows, kv_heads, dim)
        cache = [torch.zeros(pages, kv_heads, shape.page_size, dim).half() for _ in range(2)]
        angles = torch.rand(rows, dim // 2)
        report = kernels.rotary_append(q, k, v, angles, angles, *cache, torch.arange(rows), trace=False)
        return report.bytes_moved
    cache = [half(pages, kv_heads, shape.page_size, dim) for _ in range(2)]
    table = torch.arange(pages).int().view(shape.batch, -1)
    lengths = torch.full((shape.batch,), shape.kv_len, dtype=torch.int32)
    report = attention_kernels.paged_decode(half(rows, heads, dim), *cache, table, lengths, trace=False)[-1]
    return report.bytes_moved


@pytest.mark.parametrize("fusion", [Fusion.ADD_NORM, Fusion.GATE, Fusion.ROTARY_APPEND, Fusion.NORM_MATMUL], ids=str)
def test_bytes_of_a_prompt(fusion):
    assert counted(SHAPE, fusion) == pytest.approx(planned(SHAPE, fusion), rel=0.05)


@pytest.mark.parametrize("fusion", list(Fusion), ids=str)
def test_bytes_of_a_decode_step(fusion):
    assert counted(DECODE, fusion) == pytest.approx(planned(DECODE, fusion), rel=0.05)


@pytest.mark.parametrize("shape", [SHAPE, DECODE], ids=["prompt", "decode"])
def test_bytes_of_norm_and_product_straight_to_l1(shape):
    fusion, soc = Fusion.NORM_MATMUL, "ascend950"
    assert counted(shape, fusion, soc) == pytest.approx(planned(shape, fusion, soc), rel=0.05)
