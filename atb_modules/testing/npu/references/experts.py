"""Mixtures of experts: choice of experts, and products by groups of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.errors import NoReferenceError
from atb_modules.testing.npu.references.quantised import as_dtype
from atb_modules.testing.npu.references.registry import reference
from atb_modules.testing.npu.references.rules import (
    FLOATS,
    is_310p,
    require_dtype,
    require_not_310p,
    require_same_dtype,
)

_MOST_GROUPS = 1024
_INNER = 65536


@reference("npu::npu_moe_gating_top_k_softmax")
def moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Docs: "softmax of x, then top k"; "x of 2 or 3 dims; finished: bool, x[:-1]; 0 < k <= the last axis, k <=
    1024"; "y: the top values; expert_idx int32; row_idx: the row of each place" (column first: row + place * rows, as
    the routing operators read it). aclnnMoeGatingTopKSoftmax: a finished row gets the expert index "number of experts".
    """
    require_not_310p()
    require_dtype("x", x)
    require(x.dim() in (2, 3), f"x has {x.dim()} dims; 2 or 3")
    experts = x.shape[-1]
    require(0 < k <= min(experts, 1024), f"k is {k}; 1 to {min(experts, 1024)}")
    weights, chosen = torch.softmax(x.float(), -1).topk(k, -1)
    chosen = chosen.to(torch.int32)
    if finished is not None:
        good = finished.dtype == torch.bool and finished.shape == x.shape[:-1]
        require(good, "finished must be bool, of x's shape without the last axis")
        chosen = chosen.masked_fill(finished[..., None], experts)
    rows = x.shape[:-1].numel()
    row = torch.arange(rows * k, dtype=torch.int32).view(k, rows).t().reshape(chosen.shape)
    return weights.to(x.dtype), chosen, row.contiguous()


@reference("npu::npu_grouped_matmul")
def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: int | None = None,
) -> list[Tensor]:
    """Docs: "y_i = x_i weight_i + bias_i"; "group_type -1: not grouped, several of each; 0: rows grouped, one
    output"; "-1 takes split_item 0 or 1 and no group_list, 0 takes split_item 2 or 3 and needs group_list";
    "group_list: int64, the cumulated rows (type 0, its last value the rows of x) or the rows of each group (type 1)";
    "at most 1024 groups, lists of 128"; "bias float16 for float16, float32 for bfloat16 and float32"; "without
    quantisation no activation"; on 310P float16 only, group_type 0, N a multiple of 16.
    """
    require(1 <= len(x) <= 128 and 1 <= len(weight) <= 128, "lists of 1 to 128 tensors")
    kinds = (torch.float16,) if is_310p() else FLOATS
    for name, tensors in (("x", x), ("weight", weight)):
        for tensor in tensors:
            if tensor.dtype == torch.int8:
                raise NoReferenceError("npu_grouped_matmul: quantised products are not emulated")
            require_dtype(name, tensor, kinds)
            require(tensor.shape[-1] < _INNER, f"the last axis of {name} is {tensor.shape[-1]}; below 65536")
    require_same_dtype(x=x[0], weight=weight[0])
    require(group_type in (-1, 0), f"group_type is {group_type}; -1 or 0")
    require(act_type == 0, "only per-token quantised products have an activation")
    dtype = as_dtype(output_dtype, x[0].dtype)
    require(dtype == x[0].dtype, f"the output is {dtype}, x {x[0].dtype}; they must agree")
    if bias is not None and len(bias):
        wanted = torch.float16 if x[0].dtype == torch.float16 else torch.float32
        require(all(b.dtype == wanted for b in bias), f"bias is {wanted} with x {x[0].dtype}")
    shifts = [None] * 2**16 if not bias else list(bias)
    if group_type == -1:
        require(not is_310p(), "310P takes group_type 0 only")
        require(split_item in (0, 1) and group_list is None, "group_type -1 takes split_item 0 or 1, no group_list")
        require(len(x) == len(weight), f"{len(x)} left sides, {len(weight)} weights")
        require(all(w.dim() == 2 for w in weight), "weights of group_type -1 have 2 dims")
        return [_product(a, w, b, dtype) for a, w, b in zip(x, weight, shifts, strict=False)]
    require(split_item in (2, 3), f"split_item is {split_item}; group_type 0 takes 2 or 3")
    rows = x[0] if len(x) == 1 else torch.cat(list(x))
    weights = list(weight[0].unbind(0)) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    ends = _ends(group_list, group_list_type, rows.shape[0], len(weights), [t.shape[0] for t in x])
    require(not is_310p() or weights[0].shape[-1] % 16 == 0, f"N is {weights[0].shape[-1]}; a multiple of 16 on 310P")
    if bias and len(bias) == 1 and bias[0].dim() == 2:
        shifts = list(bias[0].unbind(0))
    out = rows.new_full((rows.shape[0], weights[0].shape[-1]), float("nan"), dtype=dtype)
    for begin, end, w, b in zip([0, *ends], ends, weights, shifts, strict=False):
        out[begin:end] = _product(rows[begin:end], w, b, dtype)
    return [out]


def _product(left: Tensor, right: Tensor, shift: Tensor | None, dtype: torch.dtype) -> Tensor:
    require(left.shape[-1] == right.shape[-2], f"K of x is {left.shape[-1]}, of weight {right.shape[-2]}")
    product = left.float() @ right.float()
    return (product if shift is None else product + shift.float()).to(dtype)


def _ends(given: Tensor | None, kind: int | None, rows: int, groups: int, parts: list[int]) -> list[int]:
    """The last row (exclusive) of each group."""
    if given is None:
        require(len(parts) == groups > 1, "group_type 0 needs group_list")
        given, kind = torch.tensor(parts), 1
    require(given.dtype == torch.int64, f"group_list is {given.dtype}; int64")
    require(given.numel() == groups <= _MOST_GROUPS, f"group_list has {given.numel()} entries for {groups} groups")
    values = [int(value) for value in given.tolist()]
    if kind == 1:
        ends = torch.tensor(values).cumsum(0).tolist()
        require(all(value >= 0 for value in values), "group_list holds a negative size")
    else:
        ends = values
        rising = all(b >= a for a, b in zip([0, *ends], ends, strict=False))
        require(rising, f"group_list {ends[:8]} must be cumulated with group_list_type 0")
    require(ends[-1] == rows, f"group_list ends at {ends[-1]}, x has {rows} rows")
    return [int(end) for end in ends]
