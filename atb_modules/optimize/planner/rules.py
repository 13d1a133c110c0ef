"""Which neighbours one kernel can serve, and what that kernel takes of a core's buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atb_modules.fusions import Fusion
from atb_modules.kernels.ascend import ops_ascendc
from atb_modules.kernels.ascend.availability import assume_soc
from atb_modules.kernels.ascend.socs import KIB, Soc
from atb_modules.kernels.registry import kernels
from atb_modules.kernels.traits import (
    ActivationTraits,
    AttentionTraits,
    CacheAppendTraits,
    LinearTraits,
    NormTraits,
    PagedAttentionTraits,
)
from atb_modules.mlp import MLPType
from atb_modules.optimize.planner.shapes import LayerShape
from atb_modules.optimize.planner.steps import Step
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import LinearStrategy

Need = Callable[[tuple[Step, ...], LayerShape, Soc], int]


@dataclass(frozen=True)
class Rule:
    """A run of neighbours, by kind, and the kernel that serves it.

    Args:
        fusion: what a layer is told to fuse; None where there is no kernel and the run is listed with its savings.
        kinds: of the steps, in order.
        kernel: what runs; empty where nothing does.
        unified_buffer: bytes of a vector core's buffer that it needs to touch each element once.
        why_not: the sentence for a rule without a kernel.
    """

    fusion: Fusion | None
    kinds: tuple[str, ...]
    kernel: str
    unified_buffer: Need
    why_not: str = ""

    def matches(self, steps: tuple[Step, ...]) -> bool:
        return tuple(step.kind for step in steps) == self.kinds


def _row(steps: tuple[Step, ...], shape: LayerShape) -> int:
    """Bytes of the longest row, in whole 32-byte blocks."""
    width = max(step.width for step in steps)
    return -(-width * shape.dtype.itemsize // 32) * 32


def _floats(width: int, lines: int, most: int = 2048) -> int:
    """What ``lines`` chunks of a row take in float32."""
    return lines * min(-(-width // 64) * 64, most) * 4


def _add_norm(steps: tuple[Step, ...], shape: LayerShape, soc: Soc) -> int:
    """Both inputs, both outputs and the weight of a row at once, or the sum is read again; and a chunk in float32."""
    return 5 * _row(steps, shape) + _floats(steps[-1].width, 3) + KIB


def _norm_matmul(steps: tuple[Step, ...], shape: LayerShape, soc: Soc) -> int:
    """A row in, a row out and the weight; the products' operands lie in the cube core's own buffers.

    Where vector cores reach L1, eight rows go by chunks of 512 bytes, whatever their length.
    """
    if soc.ub_to_l1:
        return 8 * (3 * 512 + 2 * 4 * 512 // shape.dtype.itemsize) + 3 * KIB
    return 3 * _row(steps[:1], shape) + _floats(steps[0].width, 3) + KIB


def _rotary_append(steps: tuple[Step, ...], shape: LayerShape, soc: Soc) -> int:
    """A token's queries, keys and values, in and out, two angles a channel, and one head in float32."""
    token = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * shape.dtype.itemsize
    return 2 * token + 8 * shape.head_dim + _floats(shape.head_dim, 4) + KIB


def _gate(steps: tuple[Step, ...], shape: LayerShape, soc: Soc) -> int:
    """A chunk of each half, and of the result, double-buffered; any width goes in chunks."""
    return 6 * min(_row(steps, shape), 8 * KIB) + _floats(steps[0].width, 3) + KIB


def _attention(steps: tuple[Step, ...], shape: LayerShape, soc: Soc) -> int:
    """Scores of 64 queries and 128 keys in float32, twice, and as many rows of outputs."""
    return 2 * 64 * 128 * 4 + 64 * shape.head_dim * 8 + 4 * KIB


def _unknown(steps: tuple[Step, ...], shape: LayerShape, soc: Soc) -> int:
    return 0


RULES: tuple[Rule, ...] = (
    Rule(Fusion.ADD_NORM, ("add", "norm"), "add_rms_norm", _add_norm),
    Rule(Fusion.NORM_MATMUL, ("norm", "matmul"), "norm_matmul", _norm_matmul),
    Rule(Fusion.ROTARY_APPEND, ("rotary", "append"), "rotary_append", _rotary_append),
    Rule(Fusion.ATTENTION, ("scores", "softmax", "values"), "flash_attention", _attention),
    Rule(Fusion.GATE, ("activation", "multiply"), "gated_activation", _gate),
    Rule(None, ("matmul", "add"), "", _unknown, "no kernel adds the residual to a product while it is in L0C"),
    Rule(None, ("matmul", "rotary"), "", _unknown, "no kernel rotates a product while it is in L0C"),
    Rule(None, ("matmul", "activation"), "", _unknown, "different cores make the two halves of a gate's product"),
    Rule(None, ("multiply", "matmul"), "", _unknown, "no kernel gates the rows that a product reads"),
    Rule(
        None,
        ("head_norm", "rotary", "append"),
        "",
        _unknown,
        "npu_qkv_rms_norm_rope_cache writes pages in fractals (PA_NZ), the cache keeps rows",
    ),
)


def _registered_call(rule: Rule, steps: tuple[Step, ...], shape: LayerShape) -> tuple[str, Any]:
    """The op of the registry that a fusion is, and its traits."""
    dtype, rows, width = shape.dtype, steps[-1].rows, steps[-1].width
    heads = shape.num_heads, shape.num_kv_heads
    match rule.fusion:
        case Fusion.GATE:
            return "gated_activation", ActivationTraits("npu", dtype, MLPType(shape.mlp_type).activation, rows, width)
        case Fusion.ADD_NORM:
            return "add_rms_norm", NormTraits("npu", dtype, rows, width, fused_add=True)
        case Fusion.NORM_MATMUL:
            return "norm_linear", LinearTraits("npu", dtype, dtype, rows, steps[0].width, width)
        case Fusion.ROTARY_APPEND:
            return "rotary_append", CacheAppendTraits("npu", dtype, dtype, rows, heads[1], shape.head_dim, rotary=True)
    blocks = -(-shape.kv_len // shape.page_size)
    if shape.cached:
        pages = shape.head_dim, shape.page_size, blocks
        return "paged_attention", PagedAttentionTraits("npu", dtype, dtype, shape.batch, rows, *heads, *pages)
    lengths = rows // shape.batch, shape.kv_len
    return "attention", AttentionTraits("npu", dtype, shape.batch, *heads, *lengths, shape.head_dim, shape.head_dim)


def refusal(rule: Rule, steps: tuple[Step, ...], shape: LayerShape, soc: Soc) -> str:
    """Why each kernel for NPUs refuses the call that the rule stands for on this chip; empty where one takes it.

    In the words of the registry's records, which know what the operators' documentation and our tilings allow. Whether
    our kernels are built on this machine says nothing about the chip.
    """
    op, traits = _registered_call(rule, steps, shape)
    sentences: list[str] = []
    unbuilt = ops_ascendc.unbuilt_reason()
    with assume_soc(soc):
        for kernel in kernels(op):
            if kernel.device_types != ("npu",) or kernel.strategy is LinearStrategy.ASCEND:
                continue  # torch_npu's norm and product are two kernels
            reasons = [reason for reason in kernel.reasons(AttentionSpec(causal=True), traits) if reason != unbuilt]
            if not reasons:
                return ""
            sentences += reasons
    return "; ".join(sentences)


def workspace(rule: Rule, shape: LayerShape, soc: Soc) -> int:
    """Bytes between the vector and the cube cores of a mixed kernel, which should stay in the L2 cache.

    None where vector cores write the L1 of their cube core.
    """
    if rule.fusion is not Fusion.NORM_MATMUL or soc.ub_to_l1:
        return 0
    rows = min(shape.tokens, 128)
    return 2 * rows * shape.hidden_size * shape.dtype.itemsize * min(soc.cube_cores, -(-shape.tokens // rows))


def layout_change(steps: tuple[Step, ...]) -> tuple[str, str] | None:
    """Where a buffer between two of the steps is written in one layout and belongs to neighbours of another."""
    for before, after in itertools.pairwise(steps):
        for buffer in before.writes:
            if buffer in after.reads and after.kind == "matmul":
                wanted = after.writes[0].layout
                if buffer.layout != wanted:
                    return buffer.layout, wanted
    return None


#: half of the cache is left to weights and to other cores
L2_SHARE = 0.5
