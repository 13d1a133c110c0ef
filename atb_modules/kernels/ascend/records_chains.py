"""The registry's records of chains and of mixtures of experts on NPUs."""

from __future__ import annotations

from collections.abc import Iterator

from atb_modules.kernels.ascend import ops_chains
from atb_modules.kernels.ascend.rules import FLOATS, chip_and_dtype, short
from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import MLPChainTraits, MoETraits, NormTraits
from atb_modules.strategies import MLPStrategy, NormStrategy


def _modulated(spec: None, traits: NormTraits) -> tuple[str, ...]:
    return tuple(chip_and_dtype(traits, "npu_rms_norm", FLOATS))


def _modulated_cost(spec: None, traits: NormTraits) -> Cost:
    passes = 2.5 if traits.requires_grad else 1.0
    return Cost(bytes=20.0 * passes * traits.rows * traits.width, calls=3.0 * passes)


def _chain(spec: None, traits: MLPChainTraits) -> tuple[str, ...]:
    def reasons() -> Iterator[str]:
        yield from chip_and_dtype(traits, "npu_swiglu", FLOATS, on_310p=not traits.gated)
        if traits.autocast:
            yield "autocast decides the dtype of the products"

    return tuple(reasons())


def _chain_cost(spec: None, traits: MLPChainTraits) -> Cost:
    passes = 3.0 if traits.requires_grad else 1.0
    elements = 8.0 * traits.intermediate_size + 6.0 * traits.hidden_size
    moved = traits.weights * traits.weight_dtype.itemsize + traits.rows * elements * traits.dtype.itemsize
    return Cost(operations=2.0 * passes * traits.rows * traits.weights, bytes=passes * moved, calls=5.0 * passes)


def _moe(spec: None, traits: MoETraits) -> tuple[str, ...]:
    def reasons() -> Iterator[str]:
        operator = "npu_grouped_matmul"
        yield from chip_and_dtype(traits, operator, FLOATS, on_310p=False)
        if traits.requires_grad:
            yield f"{operator} has no derivative"
        if traits.autocast:
            yield "autocast decides the dtype of the products"
        if traits.weight_dtype != traits.dtype:
            yield f"{operator} takes weights of {short(traits.dtype)}, these are {short(traits.weight_dtype)}"
        if traits.num_experts > 1024:
            yield f"{operator} takes up to 1024 groups, the call has {traits.num_experts}"
        if max(traits.hidden_size, 2 * traits.intermediate_size) >= 65536:
            yield f"{operator} takes axes below 65536"

    return tuple(reasons())


def _moe_cost(spec: None, traits: MoETraits) -> Cost:
    pairs = 1.0 * traits.tokens * traits.top_k
    live = min(float(traits.num_experts), pairs)
    moved = live * traits.expert_weights + pairs * (6.0 * traits.intermediate_size + 8.0 * traits.hidden_size)
    return Cost(operations=2.0 * pairs * traits.expert_weights, bytes=moved * traits.dtype.itemsize, calls=12.0)


for _op, _strategy, _function, _reasons, _cost in (
    ("modulated_norm", NormStrategy.ASCEND, ops_chains.modulated_norm_ascend, _modulated, _modulated_cost),
    ("fused_mlp_residual_norm", MLPStrategy.ASCEND, ops_chains.mlp_residual_norm_ascend, _chain, _chain_cost),
    ("moe", MLPStrategy.ASCEND, ops_chains.moe_ascend, _moe, _moe_cost),
):
    register(Kernel(_op, _strategy, _function, _reasons, _cost, device_types=("npu",), transformable=False))
