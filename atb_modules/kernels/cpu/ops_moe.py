"""torch.library op of a mixture of experts: tokens sorted by expert, native products of each expert's rows.

All between the first product and the weighted sum is float32, whatever the dtypes of x and of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from atb_modules.kernels.activation import activation_torch
from atb_modules.kernels.experts import sort_by_expert

from . import library
from .library_ops import LIB, define
from .ops_activation import gated_activation_out, gated_backward_out
from .ops_linear import linear_out


def _ranges(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, with those rows."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            yield expert, slice(begin, end)
        begin = end


def _idle(ends: Tensor) -> list[int]:
    """The experts that have no rows."""
    numbers = [0, *ends.tolist()]
    return [expert for expert in range(len(numbers) - 1) if numbers[expert] == numbers[expert + 1]]


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a b into ``out``; fresh memory for the gradient of a weight would cost more than the product."""
    if out.dtype == torch.float32:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _of(parameter: Tensor | None, expert: int) -> Tensor | None:
    return None if parameter is None else parameter[expert]


def _width(up_proj: Tensor, gated: bool) -> int:
    return up_proj.shape[1] // 2 if gated else up_proj.shape[1]


def _moe(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kind: str,
    gated: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """The mixture, and where ``keep`` the up products (tokens * top_k, width) in sorted order, for the backward."""
    for name, tensor in (("x", x), ("up_proj", up_proj), ("down_proj", down_proj)):
        library.dtype_code(name, tensor.dtype)
    tokens, top_k = experts.shape
    with torch.no_grad():
        order, inverse, ends = sort_by_expert(experts, up_proj.shape[0])
        rows = x[order // top_k].float()
        width = _width(up_proj, gated)
        # Kept for the backward, or one expert's worth that all of them use: fresh memory costs another pass over it.
        most = rows.shape[0] if keep else max((mine.stop - mine.start for _, mine in _ranges(ends)), default=0)
        product = rows.new_empty(most, up_proj.shape[1])
        space = rows.new_empty(0 if gated and not keep else most, width)
        out = torch.empty_like(rows)
        for expert, mine in _ranges(ends):
            here = mine if keep else slice(0, mine.stop - mine.start)
            linear_out(rows[mine], up_proj[expert], _of(up_bias, expert), out=product[here])
            # Where no gradient needs the products, the activation takes the place of the gate.
            hidden = product[here, :width] if gated and not keep else space[here]
            if gated:
                gated_activation_out(product[here, :width], product[here, width:], kind, out=hidden)
            else:
                hidden.copy_(activation_torch(product[here], kind))
            linear_out(hidden, down_proj[expert], _of(down_bias, expert), out=out[mine])
        chosen = out[inverse].view(tokens, top_k, x.shape[1])
        mixed = (chosen * weights.float().unsqueeze(-1)).sum(1).to(x.dtype)
    return mixed, product if keep else rows.new_empty(0)


def _meta(x, experts, weights, up_proj, down_proj, up_bias, down_bias, kind, gated, keep):
    shape = (experts.shape[0] * experts.shape[1], up_proj.shape[1]) if keep else (0,)
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(shape, dtype=torch.float32)


def _activation_gradients(
    product: Tensor, back: Tensor, factors: Tensor, kind: str, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden values, gradient of factors, gradient of product), for all experts at once: each call has its price.

    ``back`` is what reaches the hidden values before the weight of a choice.
    """
    width = back.shape[1]
    hidden, d_product, d_factors = torch.empty_like(back), torch.empty_like(product), torch.empty_like(factors)
    up, d_up = (t[:, width:] if gated else None for t in (product, d_product))
    gated_backward_out(
        back, product[:, :width], up, kind, d_product[:, :width], d_up, factors=factors, out=hidden,
        d_factors=d_factors,
    )  # fmt: skip
    return hidden, d_factors.unsqueeze(-1), d_product


def _moe_backward(
    grad: Tensor,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    product: Tensor,
    kind: str,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weights, up_proj, down_proj, up_bias and down_bias (the last two empty where there is none)."""
    tokens, top_k = experts.shape
    order, inverse, ends = sort_by_expert(experts, up_proj.shape[0])
    token = order // top_k
    rows, grads, factors = x[token].float(), grad[token].float(), weights.reshape(-1)[order].float()
    d_rows = torch.empty_like(rows)
    d_up, d_down, d_up_bias, d_down_bias = (
        x.new_empty(0) if p is None else torch.empty(p.shape, dtype=p.dtype)
        for p in (up_proj, down_proj, up_bias, down_bias)
    )
    for expert in _idle(ends):
        for gradient in (d_up, d_down, d_up_bias, d_down_bias):
            gradient[expert : expert + 1].zero_()
    back = rows.new_empty(rows.shape[0], down_proj.shape[2])
    for expert, mine in _ranges(ends):
        torch.mm(grads[mine], down_proj[expert].float(), out=back[mine])
    hidden, d_factors, d_product = _activation_gradients(product, back, factors, kind, gated)
    weighted = grads * factors.unsqueeze(-1)
    for expert, mine in _ranges(ends):
        _product(weighted[mine].t(), hidden[mine], d_down[expert])
        _product(d_product[mine].t(), rows[mine], d_up[expert])
        if down_bias is not None:
            d_factors[mine] += grads[mine] @ down_bias[expert].float().unsqueeze(-1)
            d_down_bias[expert] = weighted[mine].sum(0)
        if up_bias is not None:
            d_up_bias[expert] = d_product[mine].sum(0)
        torch.mm(d_product[mine], up_proj[expert].float(), out=d_rows[mine])
    d_x = d_rows[inverse].view(tokens, top_k, x.shape[1]).sum(1).to(x.dtype)
    d_weights = d_factors[inverse].view(tokens, top_k).to(weights.dtype)
    return d_x, d_weights, d_up, d_down, d_up_bias, d_down_bias


def _meta_backward(grad, x, experts, weights, up_proj, down_proj, up_bias, down_bias, product, kind, gated):
    return tuple(
        x.new_empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
        for t in (x, weights, up_proj, down_proj, up_bias, down_bias)
    )


_ARGUMENTS = (
    "Tensor x, Tensor experts, Tensor weights, Tensor up_proj, Tensor down_proj, Tensor? up_bias, Tensor? down_bias"
)
define(f"moe({_ARGUMENTS}, str kind, bool gated, bool keep) -> (Tensor, Tensor)", _moe, _meta)
define(
    f"moe_backward(Tensor grad, {_ARGUMENTS}, Tensor product, str kind, bool gated)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _moe_backward,
    _meta_backward,
)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.kind, ctx.gated, _ = inputs
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx, grad, _):
    tensors = ctx.saved_tensors
    d_x, d_weights, d_up, d_down, d_up_bias, d_down_bias = torch.ops.atb_modules.moe_backward(
        grad, *tensors, ctx.kind, ctx.gated
    )
    biases = (d_up_bias if tensors[5] is not None else None, d_down_bias if tensors[6] is not None else None)
    return d_x, None, d_weights, d_up, d_down, *biases, None, None, None


torch.library.register_autograd("atb_modules::moe", _backward, setup_context=_save, lib=LIB)
