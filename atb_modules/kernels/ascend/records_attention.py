"""The registry's record of attention on NPUs: the documented limits of the fused operators, and the cost."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from atb_modules.kernels.ascend.availability import current_soc
from atb_modules.kernels.ascend.ops_attention import attention_ascend
from atb_modules.kernels.ascend.ops_prompt import padded_length, padded_width
from atb_modules.kernels.ascend.rules import FLOATS, chip_and_dtype, is_310p
from atb_modules.kernels.ascend.structure import LARGEST_MASK, compressible
from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import AttentionTraits
from atb_modules.spec import AttentionSpec, Causal
from atb_modules.strategies import AttentionStrategy


def _needs_full_mask(spec: AttentionSpec, traits: AttentionTraits) -> bool:
    if traits.mask != "none" or traits.has_alibi or traits.has_images or traits.has_block_mask:
        return True
    return not compressible(spec, traits.q_len, traits.kv_len, packed=bool(traits.segments))


def _prompt_reasons(spec: AttentionSpec, traits: AttentionTraits) -> Iterator[str]:
    """Of the inference chip 310P, which has no attention of training."""
    operator, soc = "npu_prompt_flash_attention", current_soc()
    assert soc is not None
    yield from chip_and_dtype(traits, operator, (torch.float16,))
    if traits.requires_grad:
        yield f"{operator} has no derivative, and npu_fusion_attention does not run on {soc.version}"
    if traits.dropout:
        yield f"{operator} drops nothing"
    if spec.softcap is not None:
        yield f"{operator} has no softcap"
    if traits.need_lse:
        yield f"{operator} returns no LSE"
    if traits.has_sinks:
        yield f"{operator} takes no sinks"
    if traits.mask == "float" or traits.has_alibi:
        yield f"{operator} adds nothing to the scores on {soc.version}"
    if traits.num_heads > 256:
        yield f"{operator} takes up to 256 heads, the call has {traits.num_heads}"
    width = max(traits.head_dim, traits.value_dim)
    if width > 512:
        yield f"{operator} takes head sizes up to 512, the call has {width}"
    length = max(traits.q_len, traits.kv_len)
    if length > 65535:
        yield f"{operator} takes up to 65535 tokens on {soc.version}, the call has {length}"
    elif _masked_prompt(spec, traits):
        elements = _prompt_mask(traits)
        if elements > LARGEST_MASK:
            yield f"the structure needs a full mask of {elements} elements, more than {LARGEST_MASK}"


def _masked_prompt(spec: AttentionSpec, traits: AttentionTraits) -> bool:
    return spec.masks_keys or spec.has_overlays or traits.has_overlays or traits.mask != "none"


def _prompt_mask(traits: AttentionTraits) -> int:
    """Elements of the padded masks; one for each head of each row where the mask's size allows for that."""
    each, pairs = padded_length(traits.q_len, traits.kv_len) ** 2, traits.q_len * traits.kv_len
    if traits.mask_elements == traits.batch * pairs:
        each *= traits.batch
    elif traits.has_block_mask or (traits.mask_elements != pairs and traits.mask_elements):
        each *= traits.batch * (1 if traits.mask_elements % traits.num_heads else traits.num_heads)
    return each


def _attention_reasons(spec: AttentionSpec, traits: AttentionTraits) -> Iterator[str]:
    if is_310p():
        yield from _prompt_reasons(spec, traits)
        return
    operator = "npu_fusion_attention"
    yield from chip_and_dtype(traits, operator, FLOATS)
    if spec.softcap is not None:
        yield f"{operator} has no softcap"
    if traits.dropout and torch.compiler.is_compiling():
        yield f"{operator} returns the seed of its dropout mask as a number, which a traced graph would keep for ever"
    soc = current_soc()
    if traits.has_sinks and soc is not None and soc.name == "ascend950":
        yield f"npu_fusion_attention_v3, which takes sinks, does not run on {soc.version}"
    if traits.bias_requires_grad:
        yield f"{operator} returns no gradient of a bias"
    if traits.head_dim > 768:
        yield f"{operator} takes head sizes up to 768, the call has {traits.head_dim}"
    if traits.value_dim > traits.head_dim:
        yield f"{operator} takes value sizes up to the head size {traits.head_dim}, the call has {traits.value_dim}"
    if traits.num_heads > 256:
        yield f"{operator} takes up to 256 heads, the call has {traits.num_heads}"
    if traits.need_lse and traits.requires_grad and traits.head_dim > 752:
        yield "the gradient of the LSE takes 16 channels more than the head size, which may be 768 at most"
    if (traits.mask == "float" or traits.has_alibi) and traits.dtype.itemsize < 4:
        yield f"{operator} rounds what is added to the scores to the dtype of the queries"
    if traits.segments:
        if traits.segments > 2048:
            yield f"{operator} takes up to 2048 packed sequences, the call has {traits.segments}"
        if traits.mask == "float" or traits.has_alibi:
            yield f"{operator} takes no bias in its packed layout"
        if traits.mask == "bool" or traits.has_images or traits.has_block_mask or spec.has_overlays:
            yield f"the packed layout of {operator} knows causality and windows alone"
        if spec.causal is Causal.TOP_LEFT:
            yield f"the packed layout of {operator} aligns causality at the lower right"
    elif _needs_full_mask(spec, traits):
        elements = max(traits.mask_elements, traits.q_len * traits.kv_len)
        if traits.has_block_mask:
            elements = traits.batch * traits.num_heads * traits.q_len * traits.kv_len
        if elements > LARGEST_MASK:
            yield f"the structure needs a full mask of {elements} elements, more than {LARGEST_MASK}"


def attention_reasons(spec: AttentionSpec, traits: AttentionTraits) -> tuple[str, ...]:
    return tuple(_attention_reasons(spec, traits))


def _prompt_cost(spec: AttentionSpec, traits: AttentionTraits) -> Cost:
    """Every pair is computed, padding included; keys and values are copied for the heads that share them."""
    rows, columns, mask = traits.q_len, traits.kv_len, 0
    if _masked_prompt(spec, traits):
        rows = columns = padded_length(rows, columns)
        mask = _prompt_mask(traits)
    width = padded_width(traits.head_dim, traits.value_dim)
    heads = 1.0 * traits.batch * traits.num_heads
    return Cost(
        operations=4.0 * heads * rows * columns * width,
        bytes=3.0 * heads * (2.0 * rows + 2.0 * columns) * width * traits.dtype.itemsize,
        calls=1.0 + 2.0 * (traits.num_heads > traits.num_kv_heads) + 2.0 * (mask > 0),
        cells=4.0 * mask,
    )


def attention_cost(spec: AttentionSpec, traits: AttentionTraits) -> Cost:
    if is_310p():
        return _prompt_cost(spec, traits)
    pairs = traits.pairs if traits.seen is None else traits.seen
    passes = 3.5 if traits.requires_grad else 1.0
    mask = traits.q_len * traits.kv_len if _needs_full_mask(spec, traits) and not traits.segments else 0
    operations = 2.0 * pairs * (traits.head_dim + traits.value_dim) * passes
    calls, cells = 2.0 if traits.requires_grad else 1.0, 3.0 * mask
    if traits.dropout:  # a mask of bits, drawn in each direction
        calls, cells = 2.0 * calls, cells + calls * traits.pairs / 8.0
    return Cost(operations=operations, bytes=traits.bytes * passes, calls=calls, cells=cells)


register(
    Kernel(
        "attention",
        AttentionStrategy.ASCEND,
        attention_ascend,
        attention_reasons,
        attention_cost,
        device_types=("npu",),
        transformable=False,
    )
)
