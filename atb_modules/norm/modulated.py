"""Adaptive layer norm: a norm whose scale and shift come from a conditioning vector, as in diffusion transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atb_modules import kernels  # noqa: F401  (registers every kernel)
from atb_modules.checks import check_bool, check_floating, check_int, check_number
from atb_modules.kernels.registry import resolve
from atb_modules.kernels.traits import NormTraits, count, under_autocast
from atb_modules.linear import Linear
from atb_modules.norm.modules import NormType
from atb_modules.strategies import NormStrategy, parse_enum


def modulated_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm_type: str = NormType.LAYERNORM,
    strategy: str = "auto",
) -> Tensor:
    """``norm(x) * (1 + scale) + shift`` in one pass, float32 inside (FiLM: Perez et al., 2018; DiT: Peebles and Xie,
    2023).

    Args:
        x: (..., width), normalised over the last axis.
        scale, shift: of equal shapes in x's dtype: (batch, width) for all tokens of a row of x (batch, ..., width), or
            as many axes as x, each x's or 1.
        weight, bias: (width,) of the norm itself, or None; RMSNorm has no bias.
        norm_type: "layernorm" or "rmsnorm".

    Returns:
        x's shape and dtype.

    Raises:
        ValueError, TypeError: for what does not fit, naming the argument.
    """
    layer_norm = parse_enum(NormType, norm_type, "norm_type") is NormType.LAYERNORM
    check_number("eps", eps, "a finite number >= 0", lambda value: value >= 0)
    for name, tensor in (("x", x), ("scale", scale), ("shift", shift)):
        check_floating(name, tensor)
    if bias is not None and not layer_norm:
        raise ValueError("bias is given with norm_type 'rmsnorm'; allowed: None")
    if not x.dim():
        raise ValueError("x has no axis; allowed: at least one, the last is normalised")
    if under_autocast(x.device.type):
        scale, shift = scale.to(x.dtype), shift.to(x.dtype)
    groups = _rows_of_modulation(x, scale, shift)
    for name, parameter in (("weight", weight), ("bias", bias)):
        check_floating(name, parameter, optional=True)
        if parameter is not None and tuple(parameter.shape) != (x.shape[-1],):
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}; x of width {x.shape[-1]} allows it alone")
    others = {"scale": scale, "shift": shift, "weight": weight, "bias": bias}
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise ValueError(f"{name} is on {other.device}; x is on {x.device}, they must be equal")
    tensors = [t for t in (x, *others.values()) if t is not None]
    rows, width = count(x.shape[:-1]), x.shape[-1]
    traits = NormTraits(
        device_type=x.device.type,
        dtype=x.dtype,
        rows=rows,
        width=width,
        requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        contiguous=x.is_contiguous(),
    )
    kernel = resolve("modulated_norm", None, traits, strategy)
    flat = (x.contiguous() if kernel.needs_contiguous else x).reshape(rows, width)
    out = kernel.function(flat, *(t.reshape(-1, width) for t in groups), weight, bias, eps, layer_norm)
    return out.reshape(x.shape)


def _rows_of_modulation(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """scale and shift with one row for each run of rows of x that share it."""
    if scale.shape != shift.shape:
        raise ValueError(f"scale has shape {tuple(scale.shape)}; shift has {tuple(shift.shape)}, they must be equal")
    for name, tensor in (("scale", scale), ("shift", shift)):
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} is {tensor.dtype}; x is {x.dtype}, they must be equal")
    lead = tuple(scale.shape[:-1])
    if len(lead) == 1 and x.dim() > 2:
        lead = (*lead, *(1,) * (x.dim() - 2))
    fits = len(lead) == x.dim() - 1 and all(have in (1, want) for have, want in zip(lead, x.shape, strict=False))
    if not fits or not scale.dim() or scale.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}; x of shape {tuple(x.shape)} allows (batch, width) or its own axes, "
            "each whole or 1"
        )
    last = max((axis for axis, size in enumerate(lead) if size == x.shape[axis] != 1), default=-1)
    if any(lead[axis] != x.shape[axis] for axis in range(last)):
        # Rows that share a modulation do not follow one another.
        shape = (*x.shape[: last + 1], *lead[last + 1 :], x.shape[-1])
        scale, shift = (t.reshape(*lead, x.shape[-1]).expand(shape) for t in (scale, shift))
    return scale, shift


class _Conditioned(nn.Module):
    """What both adaptive norms have: SiLU and a projection of the conditioning to ``chunks`` vectors a row."""

    def __init__(
        self,
        chunks: int,
        hidden_size: int,
        cond_size: int | None = None,
        eps: float = 1e-6,
        *,
        norm_type: str = NormType.LAYERNORM,
        elementwise_affine: bool = False,
        strategy: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size)
        check_int("cond_size", cond_size, optional=True)
        check_number("eps", eps, "a finite number >= 0", lambda value: value >= 0)
        check_bool("elementwise_affine", elementwise_affine)
        self.hidden_size, self.eps, self._chunks = hidden_size, float(eps), chunks
        self.cond_size = hidden_size if cond_size is None else cond_size
        self.norm_type = parse_enum(NormType, norm_type, "norm_type")
        self.strategy = parse_enum(NormStrategy, strategy, "strategy")
        self.modulation = Linear(self.cond_size, chunks * hidden_size, device=device, dtype=dtype)
        self.weight = self.bias = None
        if elementwise_affine:
            where: dict[str, Any] = {"device": device, "dtype": dtype}
            self.weight = nn.Parameter(torch.ones(hidden_size, **where))
            if self.norm_type is NormType.LAYERNORM:
                self.bias = nn.Parameter(torch.zeros(hidden_size, **where))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def _modulation(self, x: Tensor, cond: Tensor) -> tuple[Tensor, ...]:
        check_floating("x", x, "a tensor (batch, ..., hidden_size)")
        check_floating("cond", cond, "a tensor (batch, cond_size) or (batch, seq, cond_size)")
        if x.dim() < 2 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {tuple(x.shape)}; allowed: (batch, ..., hidden_size={self.hidden_size})")
        per_row, per_token = (x.shape[0], self.cond_size), (*x.shape[:-1], self.cond_size)
        if tuple(cond.shape) not in (per_row, per_token):
            raise ValueError(
                f"cond has shape {tuple(cond.shape)}; x allows {per_row} for a row, {per_token} for a token"
            )
        projected = self.modulation(F.silu(cond)).to(x.dtype)
        if cond.dim() < x.dim():
            projected = projected.reshape(x.shape[0], *(1,) * (x.dim() - 2), projected.shape[-1])
        return projected.chunk(self._chunks, dim=-1)

    def _norm(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        options: dict[str, Any] = {"norm_type": self.norm_type, "strategy": self.strategy}
        return modulated_norm(x, scale, shift, self.weight, self.bias, self.eps, **options)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, cond_size={self.cond_size}, eps={self.eps:g}, norm_type={self.norm_type.value}"


class AdaLayerNorm(_Conditioned):
    """``norm(x) * (1 + scale) + shift`` with ``shift, scale = linear(silu(cond))`` (DiT: Peebles and Xie, 2023).

    The projection starts at 0, so that the norm begins as a plain one.

    Args:
        hidden_size: channels of x.
        cond_size: channels of the conditioning; default hidden_size.
        eps, norm_type ("layernorm" or "rmsnorm"), elementwise_affine (a weight and bias of the norm's own): the norm.
        scale_first: whether the projection's first half is the scale (diffusers' AdaLayerNorm), not the shift.
        strategy: a ``NormStrategy`` or its word.

    x (batch, ..., hidden_size), cond (batch, cond_size) or one a token (batch, ..., cond_size) -> x's shape.
    """

    def __init__(
        self,
        hidden_size: int,
        cond_size: int | None = None,
        eps: float = 1e-6,
        *,
        scale_first: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(2, hidden_size, cond_size, eps, **options)
        check_bool("scale_first", scale_first)
        self.scale_first = scale_first

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        first, second = self._modulation(x, cond)
        return self._norm(x, first, second) if self.scale_first else self._norm(x, second, first)


class Modulation(NamedTuple):
    """What ``AdaLayerNormZero`` returns; all but the first broadcast to x: (batch, 1, hidden_size), or one a token."""

    hidden_states: Tensor
    attention_gate: Tensor
    mlp_shift: Tensor
    mlp_scale: Tensor
    mlp_gate: Tensor


class AdaLayerNormZero(_Conditioned):
    """Both norms of a DiT block from one projection: shift, scale and gate of the attention, then of the feed-forward.

    The projection starts at 0, and with it the gates, so that the block begins as the identity::

        m = ada(x, cond)
        x = x + m.attention_gate * attention(m.hidden_states)
        x = x + m.mlp_gate * mlp(ada.norm_mlp(x, m))

    Arguments and shapes as ``AdaLayerNorm``.
    """

    def __init__(self, hidden_size: int, cond_size: int | None = None, eps: float = 1e-6, **options: Any) -> None:
        super().__init__(6, hidden_size, cond_size, eps, **options)

    def forward(self, x: Tensor, cond: Tensor) -> Modulation:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self._modulation(x, cond)
        return Modulation(self._norm(x, scale, shift), gate, mlp_shift, mlp_scale, mlp_gate)

    def norm_mlp(self, x: Tensor, modulation: Modulation) -> Tensor:
        """The norm before the feed-forward, of the stream after the attention."""
        return self._norm(x, modulation.mlp_scale, modulation.mlp_shift)
