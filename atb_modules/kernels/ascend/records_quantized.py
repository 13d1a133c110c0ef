"""The registry's records of products with int8 weights on NPUs: what the documentation of the operators allows."""

from __future__ import annotations

from collections.abc import Iterator

from atb_modules.kernels.ascend.ops_quantized import quantized_linear_ascend, weight_only_linear_ascend
from atb_modules.kernels.ascend.rules import HALVES, chip_and_dtype, is_310p
from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import QuantizedLinearTraits
from atb_modules.strategies import LinearStrategy

#: most channels of either axis of a weight, as the documentation of both operators has it
_LONGEST = 65535


def _sizes(operator: str, traits: QuantizedLinearTraits) -> Iterator[str]:
    for name, size in (("in_features", traits.in_features), ("out_features", traits.out_features)):
        if size > _LONGEST:
            yield f"{operator} takes {name} up to {_LONGEST}, the call has {size}"


def _weight_only(traits: QuantizedLinearTraits) -> Iterator[str]:
    operator = "npu_weight_quant_batchmatmul"
    yield from chip_and_dtype(traits, operator, HALVES)
    yield from _sizes(operator, traits)
    if traits.group and is_310p():
        yield f"{operator} takes one scale an output channel on Ascend310P3, the call has groups of {traits.group}"
    elif traits.group and (traits.group % 32 or traits.group >= traits.in_features):
        last = traits.in_features - 1
        yield f"{operator} takes groups of 32 to {last} channels in steps of 32, the call has {traits.group}"


def _quantized(traits: QuantizedLinearTraits) -> Iterator[str]:
    yield from chip_and_dtype(traits, "npu_dynamic_quant", HALVES, on_310p=False)
    if is_310p():
        yield "npu_quant_matmul takes no scale a row on Ascend310P3"
    yield from _sizes("npu_quant_matmul", traits)


def _weight_only_cost(spec: None, traits: QuantizedLinearTraits) -> Cost:
    cost = Cost(operations=traits.operations, bytes=traits.bytes)
    if not traits.requires_grad:
        return cost
    written = 6.0 * traits.in_features * traits.out_features
    return Cost(operations=2 * cost.operations, bytes=2 * cost.bytes + written, calls=5.0)


def _quantized_cost(spec: None, traits: QuantizedLinearTraits) -> Cost:
    """An operation on int8 takes half the time of one on float16."""
    codes = 2.0 * traits.rows * traits.in_features
    return Cost(operations=0.5 * traits.operations, bytes=traits.bytes + codes, calls=2.0)


register(
    Kernel(
        "weight_only_linear",
        LinearStrategy.ASCEND,
        weight_only_linear_ascend,
        lambda spec, traits: tuple(_weight_only(traits)),
        _weight_only_cost,
        device_types=("npu",),
        transformable=False,
    )
)
register(
    Kernel(
        "quantized_linear",
        LinearStrategy.ASCEND,
        quantized_linear_ascend,
        lambda spec, traits: tuple(_quantized(traits)),
        _quantized_cost,
        device_types=("npu",),
        transformable=False,
    )
)
