"""The functional mixture of experts: the feed-forwards that each token was routed to, weighted and summed."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules import kernels  # noqa: F401  (registers every kernel)
from atb_modules.checks import check_bool, check_floating, check_tensor
from atb_modules.kernels.experts import has_grouped_products, vectorising
from atb_modules.kernels.registry import resolve
from atb_modules.kernels.traits import MoETraits, count, under_autocast
from atb_modules.mlp.functional import KINDS

_INTEGERS = (torch.int64, torch.int32)


def moe(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    kind: str = "silu",
    gated: bool = True,
    strategy: str = "auto",
) -> Tensor:
    """``sum_k weights[t, k] * expert[experts[t, k]](x[t])`` with the feed-forwards of a mixture (Shazeer et al., 2017).

    An expert is ``down(activation(gate(x)) * up(x))``, or ``down(activation(up(x)))`` where not ``gated``. Tokens are
    sorted by expert; each expert is one product over its own rows, without padding or dropped tokens.

    Args:
        x: (..., hidden).
        experts: int64 or int32 (..., top_k), numbers of experts, different ones for a token.
        weights: (..., top_k), floating; products with them and their sum are float32 (float64 for such an x).
        up_proj: (num_experts, 2 * intermediate, hidden), gate first; (num_experts, intermediate, hidden) where not
            gated.
        down_proj: (num_experts, hidden, intermediate).
        up_bias, down_bias: (num_experts, rows of the weight), or None.
        kind: "silu", "gelu", "gelu_tanh" or "relu2".

    Returns:
        (..., hidden) in x's dtype.

    Raises:
        ValueError, TypeError: for what does not fit, naming the argument.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed: {', '.join(KINDS)}")
    check_bool("gated", gated)
    parts = {"weights": weights, "up_proj": up_proj, "down_proj": down_proj}
    for name, part in ({"x": x} | parts).items():
        check_floating(name, part)
    biases = {name: b for name, b in (("up_bias", up_bias), ("down_bias", down_bias)) if b is not None}
    for name, part in biases.items():
        check_floating(name, part, optional=True)
    _check_experts(x, experts, weights, up_proj)
    _check_weights(x, up_proj, down_proj, up_bias, down_bias, gated)
    for name, part in (parts | biases | {"experts": experts}).items():
        if part.device != x.device:
            raise ValueError(f"{name} is on {part.device}; x is on {x.device}, they must be equal")
    tensors = (x, *parts.values(), *biases.values())
    traits = MoETraits(
        device_type=x.device.type,
        dtype=x.dtype,
        weight_dtype=up_proj.dtype,
        tokens=count(x.shape[:-1]),
        top_k=experts.shape[-1],
        num_experts=up_proj.shape[0],
        hidden_size=x.shape[-1],
        intermediate_size=down_proj.shape[-1],
        gated=gated,
        grouped_products=has_grouped_products(x, up_proj, down_proj),
        requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        autocast=under_autocast(x.device.type),
        contiguous=x.is_contiguous(),
    )
    kernel = resolve("moe", None, traits, strategy)
    flat, top_k = x.reshape(traits.tokens, traits.hidden_size), traits.top_k
    experts, weights = experts.reshape(traits.tokens, top_k), weights.reshape(traits.tokens, top_k)
    out = kernel.function(flat, experts, weights, up_proj, down_proj, up_bias, down_bias, kind, gated)
    return out.reshape(x.shape)


def _check_experts(x: Tensor, experts: Tensor, weights: Tensor, up_proj: Tensor) -> None:
    """Raises unless experts and weights are (..., top_k) for x (..., hidden), and the numbers are those of experts."""
    check_tensor("experts", experts, "a tensor (..., top_k) of integers")
    if experts.dtype not in _INTEGERS:
        raise TypeError(f"experts is {experts.dtype}; allowed: torch.int64, torch.int32")
    if not x.dim() or experts.dim() != x.dim() or experts.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"experts has shape {tuple(experts.shape)} and x {tuple(x.shape)}; allowed: (..., top_k) and (..., hidden)"
        )
    if weights.shape != experts.shape:
        raise ValueError(f"weights has shape {tuple(weights.shape)}; experts has {tuple(experts.shape)}, must be equal")
    if up_proj.dim() != 3:
        raise ValueError(f"up_proj has shape {tuple(up_proj.shape)}; allowed: (num_experts, rows, hidden)")
    if torch.compiler.is_compiling() or experts.device.type != "cpu" or not experts.numel() or vectorising():
        return
    low, high = (int(end) for end in experts.aminmax())
    if low < 0 or high >= up_proj.shape[0]:
        raise ValueError(f"experts has numbers from {low} to {high}; up_proj has {up_proj.shape[0]} experts")


def _check_weights(
    x: Tensor, up_proj: Tensor, down_proj: Tensor, up_bias: Tensor | None, down_bias: Tensor | None, gated: bool
) -> None:
    num_experts, rows, hidden = up_proj.shape
    if hidden != x.shape[-1] or (gated and rows % 2):
        allowed = f"({num_experts}, {'an even number of ' if gated else ''}rows, {x.shape[-1]})"
        raise ValueError(f"up_proj has shape {tuple(up_proj.shape)}; x allows {allowed}")
    shape = (num_experts, hidden, rows // 2 if gated else rows)
    if tuple(down_proj.shape) != shape:
        raise ValueError(f"down_proj has shape {tuple(down_proj.shape)}; x and up_proj allow {shape}")
    if down_proj.dtype != up_proj.dtype:
        raise TypeError(f"down_proj is {down_proj.dtype}; up_proj is {up_proj.dtype}, they must be equal")
    for name, bias, width in (("up_bias", up_bias, rows), ("down_bias", down_bias, hidden)):
        if bias is not None and tuple(bias.shape) != (num_experts, width):
            raise ValueError(f"{name} has shape {tuple(bias.shape)}; allowed: ({num_experts}, {width})")
        if bias is not None and bias.dtype != up_proj.dtype:
            raise TypeError(f"{name} is {bias.dtype}; up_proj is {up_proj.dtype}, they must be equal")
