"""RMSNorm and LayerNorm as modules. Called with a residual they add it first and return both."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.checks import check_bool, check_device, check_int, check_number, check_parameter_dtype, check_type
from atb_modules.norm.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from atb_modules.strategies import NormStrategy, parse_enum


class NormCastOrder(StrEnum):
    """Where the normalised values are rounded to the input's dtype; differs in half precision alone."""

    WEIGHT_LAST = "weight_last"  # rounded, then multiplied by the weight: Llama, Mistral, Qwen
    CAST_LAST = "cast_last"  # multiplied in float32, then rounded: Gemma, torch.nn.RMSNorm


@dataclass(frozen=True)
class NormConfig:
    """Options of the norms of a layer.

    Args:
        eps: added to the variance, inside the square root.
        weight_offset: added to the weight in float32; 1.0 for Gemma's ``1 + w``.
        cast_order: a ``NormCastOrder`` or its word (RMSNorm).
        bias: whether LayerNorm has a bias.
        elementwise_affine: whether there is a weight.
        strategy: a ``NormStrategy`` or its word.
    """

    eps: float = 1e-6
    weight_offset: float = 0.0
    cast_order: NormCastOrder | str = NormCastOrder.CAST_LAST
    bias: bool = True
    elementwise_affine: bool = True
    strategy: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cast_order", parse_enum(NormCastOrder, self.cast_order, "cast_order"))
        object.__setattr__(self, "strategy", parse_enum(NormStrategy, self.strategy, "strategy"))
        check_number("eps", self.eps, "a finite number >= 0", lambda eps: eps >= 0)
        check_number("weight_offset", self.weight_offset)
        for name in ("eps", "weight_offset"):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("bias", "elementwise_affine"):
            check_bool(name, getattr(self, name))


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis; the weight starts so that ``weight_offset + weight`` is 1.

    ``norm(x)`` gives the normed x; ``norm(x, residual)`` gives ``(norm(x + residual), x + residual)`` in one pass, and
    ``overwrite`` lets the sum take x's memory where a kernel can.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        weight_offset: float = 0.0,
        cast_order: NormCastOrder | str = NormCastOrder.CAST_LAST,
        elementwise_affine: bool = True,
        strategy: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size)
        check_device(device)
        check_parameter_dtype(dtype)
        self.hidden_size = hidden_size
        self.config = NormConfig(
            eps, weight_offset, cast_order, elementwise_affine=elementwise_affine, strategy=strategy
        )
        self.weight = None
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def cast_first(self) -> bool:
        return self.config.cast_order is NormCastOrder.WEIGHT_LAST

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.config.weight_offset)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, overwrite: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        config = self.config
        options: dict[str, Any] = {
            "weight_offset": config.weight_offset,
            "cast_first": self.cast_first,
            "strategy": config.strategy,
        }
        if residual is None:
            return rms_norm(x, self.weight, config.eps, **options)
        return add_rms_norm(x, residual, self.weight, config.eps, overwrite=overwrite, **options)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.config.weight_offset:g}" if self.config.weight_offset else ""
        return f"{self.hidden_size}, eps={self.config.eps:g}{offset}, cast_order={self.config.cast_order}"


class LayerNorm(nn.Module):
    """Layer norm over the last axis, weight 1 and bias 0 at the start; see ``RMSNorm`` for the residual form."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        elementwise_affine: bool = True,
        strategy: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size)
        check_device(device)
        check_parameter_dtype(dtype)
        self.hidden_size = hidden_size
        self.config = NormConfig(eps, bias=bias, elementwise_affine=elementwise_affine, strategy=strategy)
        self.weight = self.bias = None
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
            if bias:
                self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, overwrite: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        config = self.config
        if residual is None:
            return layer_norm(x, self.weight, self.bias, config.eps, strategy=config.strategy)
        return add_layer_norm(x, residual, self.weight, self.bias, config.eps, strategy=config.strategy)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.config.eps:g}, bias={self.bias is not None}"


class NormType(StrEnum):
    """The words of ``layernorm_type``."""

    RMSNORM = "rmsnorm"
    LAYERNORM = "layernorm"


def build_norm(
    layernorm_type: str,
    hidden_size: int,
    config: NormConfig,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> RMSNorm | LayerNorm:
    """The norm that ``layernorm_type`` names ("rmsnorm" or "layernorm")."""
    check_type("config", config, NormConfig)
    if parse_enum(NormType, layernorm_type, "layernorm_type") is NormType.RMSNORM:
        return RMSNorm(
            hidden_size,
            config.eps,
            weight_offset=config.weight_offset,
            cast_order=config.cast_order,
            elementwise_affine=config.elementwise_affine,
            strategy=config.strategy,
            device=device,
            dtype=dtype,
        )
    if config.weight_offset:
        raise ValueError(f"weight_offset is {config.weight_offset}; layernorm_type 'layernorm' allows 0.0")
    return LayerNorm(
        hidden_size,
        config.eps,
        bias=config.bias,
        elementwise_affine=config.elementwise_affine,
        strategy=config.strategy,
        device=device,
        dtype=dtype,
    )
