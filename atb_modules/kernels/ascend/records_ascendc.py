"""The registry's records of our Ascend C kernels: what their tilings refuse, and what they move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from atb_modules.kernels.ascend import ops_ascendc as ops
from atb_modules.kernels.ascend.availability import current_soc
from atb_modules.kernels.ascend.records_attention import attention_cost
from atb_modules.kernels.ascend.rules import FLOATS, chip_and_dtype, is_310p, short, whole_blocks
from atb_modules.kernels.ascend.socs import KIB
from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import (
    ActivationTraits,
    AttentionTraits,
    CacheAppendTraits,
    LinearTraits,
    NormTraits,
    PagedAttentionTraits,
)
from atb_modules.spec import AttentionSpec, Causal
from atb_modules.strategies import AttentionStrategy, CacheStrategy, LinearStrategy, MLPStrategy, NormStrategy

Sentences = Callable[[Any, Any], Iterator[str]]


def _common(traits: Any, name: str, dtypes: tuple[torch.dtype, ...], on_310p: bool = False) -> Iterator[str]:
    reason = ops.unbuilt_reason()
    if reason:
        yield reason
    yield from chip_and_dtype(traits, name, dtypes, on_310p)


def _apart(name: str) -> Iterator[str]:
    soc = current_soc()
    if soc is not None and soc.arch == "dav-2002":
        yield f"{name} is written for cube and vector cores that stand apart, not for {soc.version}"


def _norm(spec: None, traits: NormTraits) -> Iterator[str]:
    yield from _common(traits, "our norm kernel", FLOATS, on_310p=True)
    yield from whole_blocks(traits)
    soc = current_soc()
    if soc is not None and is_310p(soc) and traits.requires_grad:
        yield f"{soc.version} copies multiples of 32 bytes, and a row's statistic is none"


def _gate(spec: None, traits: ActivationTraits) -> Iterator[str]:
    yield from _common(traits, "our gate kernel", FLOATS, on_310p=True)
    if traits.kind not in ("silu", "gelu_tanh"):
        yield f"our gate kernel activates by silu or gelu_tanh, the call asks for {traits.kind}"
    yield from whole_blocks(traits)


def _append(spec: None, traits: CacheAppendTraits) -> Iterator[str]:
    yield from _common(traits, "our rotary kernel", FLOATS)
    if traits.page_dtype not in FLOATS:
        yield f"our rotary kernel writes no codes, the pages are {short(traits.page_dtype)}"
    if traits.head_dim > 1024:
        yield f"our rotary kernel takes head sizes up to 1024, the call has {traits.head_dim}"


def _paged(spec: AttentionSpec, traits: PagedAttentionTraits) -> Iterator[str]:
    yield from _common(traits, "our paged decode kernel", FLOATS)
    if traits.total != traits.batch:
        yield f"our paged decode kernel serves one token a row, the call has {traits.total} for {traits.batch} rows"
    if traits.page_dtype != traits.dtype:
        yield f"our paged decode kernel takes pages of {short(traits.dtype)}, these are {short(traits.page_dtype)}"
    if traits.has_sinks or traits.has_alibi or spec.has_overlays:
        yield "our paged decode kernel knows windows and softcap, no sinks, slopes, globals, prefixes or chunks"
    if traits.head_dim % 16 or traits.head_dim > 256:
        yield f"our paged decode kernel takes head sizes up to 256 in steps of 16, the call has {traits.head_dim}"
    if traits.num_heads // traits.num_kv_heads > 128:
        yield "our paged decode kernel shares a key head among 128 query heads at most"


def _attention(spec: AttentionSpec, traits: AttentionTraits) -> Iterator[str]:
    yield from _common(traits, "our flash kernel", FLOATS)
    yield from _apart("our flash kernel")
    if traits.requires_grad:
        yield "our flash kernel has no backward"
    if traits.mask != "none" or traits.has_sinks or traits.has_alibi or traits.has_overlays or traits.dropout:
        yield "our flash kernel knows causality and windows alone"
    if spec.has_overlays or spec.block_size is not None:
        yield "our flash kernel knows no globals, prefixes, chunks or blocks"
    if spec.causal is Causal.TOP_LEFT and traits.q_len != traits.kv_len:
        yield "our flash kernel aligns causality at the lower right"
    for what, size in (("head", traits.head_dim), ("value", traits.value_dim)):
        if size % 16 or size > 256:
            yield f"our flash kernel takes {what} sizes up to 256 in steps of 16, the call has {size}"


def _norm_linear(spec: None, traits: LinearTraits) -> Iterator[str]:
    yield from _common(traits, "our norm and product kernel", FLOATS)
    yield from _apart("our norm and product kernel")
    if traits.weight_dtype != traits.dtype:
        yield f"our norm and product kernel takes weights of {short(traits.dtype)}, not {short(traits.weight_dtype)}"
    if traits.requires_grad:
        yield "our norm and product kernel has no backward"
    if traits.autocast:
        yield "autocast decides the dtype of the product"
    if traits.in_features > 65535:
        yield f"our norm and product kernel takes rows of 65535 elements, the call has {traits.in_features}"
    soc = current_soc()
    row = 4 * traits.in_features * traits.dtype.itemsize + 4 * traits.in_features
    if soc is not None and not soc.ub_to_l1 and row + 24 * KIB > soc.ub:  # straight to L1, by chunks
        yield f"a row and its norm take {row} bytes, too many for the unified buffer of {soc.version}"


def _norm_cost(passes: float) -> Callable[[None, NormTraits], Cost]:
    def cost(spec: None, traits: NormTraits) -> Cost:
        moved = passes * traits.rows * traits.width * traits.dtype.itemsize
        return Cost(bytes=moved * (2.5 if traits.requires_grad else 1.0), calls=2.0 if traits.requires_grad else 1.0)

    return cost


def _gate_cost(spec: None, traits: ActivationTraits) -> Cost:
    return Cost(bytes=3.0 * traits.rows * traits.width * traits.dtype.itemsize)


def _append_cost(spec: None, traits: CacheAppendTraits) -> Cost:
    return Cost(bytes=8.0 * traits.tokens * traits.num_kv_heads * traits.head_dim * traits.dtype.itemsize)


def _paged_cost(spec: AttentionSpec, traits: PagedAttentionTraits) -> Cost:
    kv_len = 1.0 * traits.max_blocks * traits.page_size
    kv_len = kv_len if spec.left is None else min(kv_len, spec.left + 1.0)
    moved = 2.0 * traits.batch * traits.num_kv_heads * kv_len * traits.head_dim * traits.dtype.itemsize
    return Cost(operations=4.0 * traits.total * traits.num_heads * kv_len * traits.head_dim, bytes=moved)


def _norm_linear_cost(spec: None, traits: LinearTraits) -> Cost:
    weights = 1.0 * traits.in_features * traits.out_features
    rows = 1.0 * traits.rows * (traits.in_features + traits.out_features)
    return Cost(operations=2.0 * traits.rows * weights, bytes=(weights + rows) * traits.dtype.itemsize)


def _add(op: str, strategy: Any, function: Any, sentences: Sentences, cost: Any) -> None:
    register(
        Kernel(
            op,
            strategy,
            function,
            lambda spec, traits: tuple(sentences(spec, traits)),
            cost,
            device_types=("npu",),
            transformable=False,
        )
    )


_add("rms_norm", NormStrategy.ASCEND_C, ops.rms_norm_ascend_c, _norm, _norm_cost(2.0))
_add("add_rms_norm", NormStrategy.ASCEND_C, ops.add_rms_norm_ascend_c, _norm, _norm_cost(4.0))
_add("gated_activation", MLPStrategy.ASCEND_C, ops.gated_activation_ascend_c, _gate, _gate_cost)
_add("rotary_append", CacheStrategy.ASCEND_C, ops.rotary_append_ascend_c, _append, _append_cost)
_add("paged_attention", AttentionStrategy.ASCEND_C, ops.paged_attention_ascend_c, _paged, _paged_cost)
_add("attention", AttentionStrategy.ASCEND_C, ops.attention_ascend_c, _attention, attention_cost)
_add("norm_linear", LinearStrategy.ASCEND_C, ops.norm_linear_ascend_c, _norm_linear, _norm_linear_cost)
