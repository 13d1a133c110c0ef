"""The registry's records of row ops on NPUs: norms, gated activations, rotations, cache writes, paged attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from atb_modules.kernels.ascend import ops_paged, ops_rows
from atb_modules.kernels.ascend.ops_latent import latent_reasons
from atb_modules.kernels.ascend.rules import FLOATS, HALVES, chip_and_dtype, is_310p, short
from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import (
    ActivationTraits,
    CacheAppendTraits,
    LinearTraits,
    NormTraits,
    PagedAttentionTraits,
    RotaryTraits,
)
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import (
    AttentionStrategy,
    CacheStrategy,
    LinearStrategy,
    MLPStrategy,
    NormStrategy,
    RotaryStrategy,
)


def _norm_reasons(operator: str, least: int = 32):
    """``least``: bytes of a row on the inference chip, "the last axis must be at least 32 bytes"."""

    def reasons(spec: None, traits: NormTraits) -> Iterator[str]:
        yield from chip_and_dtype(traits, operator, FLOATS)
        row = traits.width * traits.dtype.itemsize
        if is_310p() and row < least:
            yield f"{operator} takes rows of 32 bytes and more on Ascend310P3, the call has {row}"

    return lambda spec, traits: tuple(reasons(spec, traits))


def _norm_cost(passes: float):
    def cost(spec: None, traits: NormTraits) -> Cost:
        elements = 1.0 * traits.rows * traits.width * traits.dtype.itemsize
        return Cost(
            bytes=passes * elements * (2.5 if traits.requires_grad else 1.0), calls=2.0 - (not traits.requires_grad)
        )

    return cost


def _activation_reasons(spec: None, traits: ActivationTraits) -> tuple[str, ...]:
    def reasons() -> Iterator[str]:
        operator = "npu_swiglu" if traits.kind == "silu" else "npu_geglu"
        yield from chip_and_dtype(traits, operator, FLOATS, on_310p=traits.kind != "silu")
        if traits.kind not in ("silu", "gelu", "gelu_tanh"):
            yield f"torch_npu has no gated operator of kind {traits.kind!r}"

    return tuple(reasons())


def _activation_cost(spec: None, traits: ActivationTraits) -> Cost:
    elements = 1.0 * traits.rows * traits.width * traits.dtype.itemsize
    joined = 0.0 if not traits.contiguous and not traits.requires_grad else 4.0
    return Cost(bytes=(3.0 + joined) * elements * (2.5 if traits.requires_grad else 1.0), calls=2.0 if joined else 1.0)


def _rotary_reasons(spec: None, traits: RotaryTraits) -> tuple[str, ...]:
    def reasons() -> Iterator[str]:
        yield from chip_and_dtype(traits, "npu_rotary_mul", FLOATS)
        if is_310p() and (traits.interleaved or traits.rotary_dim != 128):
            yield "npu_rotary_mul turns two halves of 128 channels alone on Ascend310P3"
        if traits.rotary_dim >= 896:
            yield f"npu_rotary_mul takes fewer than 896 channels, the call has {traits.rotary_dim}"
        if traits.interleaved and traits.num_heads >= 1000:
            yield f"npu_rotary_mul takes fewer than 1000 heads where neighbours turn, the call has {traits.num_heads}"

    return tuple(reasons())


def _rotary_cost(spec: None, traits: RotaryTraits) -> Cost:
    elements = 1.0 * traits.tokens * traits.num_heads * traits.head_dim
    casts = 0.0 if traits.dtype.itemsize == 4 else 2.0
    return Cost(bytes=elements * (8.0 + 6.0 * casts), calls=1.0 + casts)


def _append_reasons(spec: None, traits: CacheAppendTraits) -> tuple[str, ...]:
    def reasons() -> Iterator[str]:
        codes = traits.page_dtype == torch.int8  # written by PyTorch's own operators, which run everywhere
        operator = "atb::_npu_reshape_and_cache"
        yield from chip_and_dtype(traits, operator, FLOATS, on_310p=codes and not traits.rotary)
        if traits.page_dtype not in FLOATS and not codes:
            yield f"{operator} writes no {short(traits.page_dtype)}"
        if traits.rotary and traits.head_dim >= 896:
            yield f"npu_rotary_mul takes fewer than 896 channels, the call has {traits.head_dim}"

    return tuple(reasons())


def _append_cost(spec: None, traits: CacheAppendTraits) -> Cost:
    elements = 1.0 * traits.tokens * traits.num_kv_heads * traits.head_dim * traits.dtype.itemsize
    codes = 43.0 if traits.page_dtype == torch.int8 else 0.0
    return Cost(bytes=(16.0 if traits.rotary else 4.0) * elements, calls=codes + (6.0 if traits.rotary else 1.0))


def _paged(spec: AttentionSpec, traits: PagedAttentionTraits) -> Iterator[str]:
    operator = "npu_fused_infer_attention_score_v2"
    if traits.latent_dim and traits.head_dim > 512:
        operator = "atb::_npu_paged_attention_mla"
        yield from latent_reasons(traits)
        if spec.window is not None:
            yield f"{operator} knows no window"
    elif is_310p():
        operator = "npu_prompt_flash_attention"
        yield from _prompt_paged(operator, traits)
    else:
        yield from _fused_paged(operator, traits)
    if spec.softcap is not None:
        yield f"{operator} has no softcap"
    if traits.has_sinks:
        yield f"{operator} takes sinks in its packed layouts alone"
    if traits.has_alibi:
        yield f"{operator} takes no slopes"
    if spec.has_overlays:
        yield f"{operator} knows causality and windows alone"


def _prompt_paged(operator: str, traits: PagedAttentionTraits) -> Iterator[str]:
    """Of the inference chip 310P: prompts over gathered keys and values."""
    yield from chip_and_dtype(traits, operator, (torch.float16,))
    if traits.total <= traits.batch:
        yield "npu_fused_infer_attention_score_v2, which reads pages by one token a row, does not run on Ascend310P3"
    if traits.page_dtype not in (traits.dtype, torch.int8):
        yield f"{operator} takes {short(traits.dtype)} or what is written out so, pages are {short(traits.page_dtype)}"
    if traits.head_dim > 512:
        yield f"{operator} takes head sizes up to 512, the call has {traits.head_dim}"
    if traits.num_heads > 256:
        yield f"{operator} takes up to 256 heads, the call has {traits.num_heads}"
    if traits.max_blocks * traits.page_size > 16384:
        yield f"{operator} needs full masks, and a table of {traits.max_blocks} pages may hold more than 16384 tokens"
    if traits.need_lse:
        yield f"{operator} returns no LSE"


def _fused_paged(operator: str, traits: PagedAttentionTraits) -> Iterator[str]:
    yield from chip_and_dtype(traits, operator, HALVES, on_310p=False)
    if traits.page_dtype not in (traits.dtype, torch.int8):
        taken = f"{short(traits.dtype)} or int8"
        yield f"{operator} takes pages of the queries' {taken}, these are {short(traits.page_dtype)}"
    if traits.head_dim > 512 or traits.head_dim % 16:
        yield f"{operator} takes head sizes up to 512 in steps of 16, the call has {traits.head_dim}"
    if traits.num_heads // traits.num_kv_heads > 64:
        yield f"{operator} takes up to 64 heads on a key head, the call has {traits.num_heads // traits.num_kv_heads}"
    if traits.num_heads > 256:
        yield f"{operator} takes up to 256 heads, the call has {traits.num_heads}"
    if traits.page_size % 16 or not 16 <= traits.page_size <= 512:
        yield f"{operator} takes pages of 16 to 512 tokens in steps of 16, these have {traits.page_size}"


def _paged_cost(spec: AttentionSpec, traits: PagedAttentionTraits) -> Cost:
    kv_len = 1.0 * traits.max_blocks * traits.page_size
    if spec.left is not None and traits.total == traits.batch:
        kv_len = min(kv_len, spec.left + 1.0)
    moved = (
        (1.0 if traits.latent_dim else 2.0)
        * traits.batch
        * traits.num_kv_heads
        * kv_len
        * traits.head_dim
        * traits.page_dtype.itemsize
    )
    codes, several = traits.page_dtype == torch.int8, traits.total > traits.batch
    if codes and (several or traits.page_size % 32 or traits.head_dim % 32):  # written out in the queries' dtype
        moved *= 1.0 + 4.0 + 2.0 * traits.dtype.itemsize
    gathers = several and (traits.page_size % 128 != 0 or traits.head_dim > 512 or is_310p())
    return Cost(
        operations=4.0 * traits.total * traits.num_heads * kv_len * traits.head_dim,
        bytes=moved * (3.0 if gathers else 1.0),
        calls=3.0 + (10.0 if codes else 0.0) + (6.0 * traits.batch if gathers else 0.0),
    )


def _product_reasons(spec: None, traits: LinearTraits) -> tuple[str, ...]:
    return tuple(chip_and_dtype(traits, "npu_rms_norm", FLOATS))


def _product_cost(spec: None, traits: LinearTraits) -> Cost:
    weights = 1.0 * traits.in_features * traits.out_features
    rows = 3.0 * traits.rows * traits.in_features + traits.rows * traits.out_features
    moved = weights * traits.weight_dtype.itemsize + rows * traits.dtype.itemsize
    passes = 3.0 if traits.requires_grad else 1.0
    return Cost(operations=2.0 * passes * traits.rows * weights, bytes=passes * moved, calls=2.0 * passes)


def _add(op: str, strategy: Any, function: Any, reasons: Any, cost: Any, transformable: bool = True) -> None:
    register(Kernel(op, strategy, function, reasons, cost, device_types=("npu",), transformable=transformable))


_add("rms_norm", NormStrategy.ASCEND, ops_rows.rms_norm_ascend, _norm_reasons("npu_rms_norm"), _norm_cost(2.0))
_add(
    "add_rms_norm",
    NormStrategy.ASCEND,
    ops_rows.add_rms_norm_ascend,
    _norm_reasons("npu_add_rms_norm"),
    _norm_cost(4.0),
    transformable=False,
)
_add(
    "layer_norm",
    NormStrategy.ASCEND,
    ops_rows.layer_norm_ascend,
    _norm_reasons("native_layer_norm", least=0),
    _norm_cost(2.0),
)
_add(
    "add_layer_norm",
    NormStrategy.ASCEND,
    ops_rows.add_layer_norm_ascend,
    _norm_reasons("npu_add_layer_norm"),
    _norm_cost(4.0),
)
_add(
    "gated_activation",
    MLPStrategy.ASCEND,
    ops_rows.gated_activation_ascend,
    _activation_reasons,
    _activation_cost,
)
_add("rotary", RotaryStrategy.ASCEND, ops_rows.rotary_ascend, _rotary_reasons, _rotary_cost)
_add("cache_append", CacheStrategy.ASCEND, ops_paged.cache_append_ascend, _append_reasons, _append_cost)
_add("rotary_append", CacheStrategy.ASCEND, ops_paged.rotary_append_ascend, _append_reasons, _append_cost)
_add(
    "paged_attention",
    AttentionStrategy.ASCEND,
    ops_paged.paged_attention_ascend,
    lambda spec, traits: tuple(_paged(spec, traits)),
    _paged_cost,
)
_add("norm_linear", LinearStrategy.ASCEND, ops_rows.norm_linear_ascend, _product_reasons, _product_cost)
