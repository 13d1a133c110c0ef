"""FeedForward: up, activation, down; gated or plain."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.checks import check_bool, check_int, check_probability, check_type
from atb_modules.fusions import DEFAULT_FUSIONS, Fusion
from atb_modules.linear import Linear, fuse_on_load, may_overwrite
from atb_modules.mlp.functional import activation, gated_activation
from atb_modules.mlp.routing import MoEConfig
from atb_modules.strategies import LinearStrategy, MLPStrategy, parse_enum


class MLPType(StrEnum):
    """The words of ``mlp_type``."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    GEGLU_TANH = "geglu_tanh"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    QUICK_GELU = "quick_gelu"
    SILU = "silu"
    RELU = "relu"
    RELU2 = "relu2"

    @property
    def is_gated(self) -> bool:
        return self in (MLPType.SWIGLU, MLPType.GEGLU, MLPType.GEGLU_TANH)

    @property
    def activation(self) -> str:
        """The activation's name."""
        return {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}.get(self.value, self.value)


@dataclass(frozen=True)
class MLPConfig:
    """Options of a feed-forward.

    Args:
        bias: whether the projections have biases.
        dropout: probability of dropping an activation before the down projection, in training.
        strategy: an ``MLPStrategy`` or its word, for the activation.
        linear_strategy: a ``LinearStrategy`` or its word, for the projections.
        moe: a ``MoEConfig`` where the feed-forward is a mixture of experts (``MoE``), None for a ``FeedForward``.
    """

    bias: bool = False
    dropout: float = 0.0
    strategy: str = "auto"
    linear_strategy: str = "auto"
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        check_bool("bias", self.bias)
        check_probability("dropout", self.dropout)
        object.__setattr__(self, "strategy", parse_enum(MLPStrategy, self.strategy, "strategy"))
        object.__setattr__(self, "linear_strategy", parse_enum(LinearStrategy, self.linear_strategy, "linear_strategy"))
        check_type("moe", self.moe, MoEConfig, optional=True)
        if self.moe is not None and self.dropout:
            raise ValueError(f"dropout is {self.dropout}; a mixture of experts (moe) allows 0.0")


class FeedForward(nn.Module):
    """``down(activation(gate(x)) * up(x))``, or ``down(activation(up(x)))`` where the type is not gated.

    Gate and up are stored as one weight, ``gate_up_proj`` (2 * intermediate_size, hidden_size), gate first; a state
    dict with ``gate_proj`` and ``up_proj`` loads all the same. Weights start as in ``Linear``.

    x: (..., hidden_size) -> (..., hidden_size).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        mlp_type: MLPType | str = MLPType.SWIGLU,
        *,
        config: MLPConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size)
        check_int("intermediate_size", intermediate_size)
        check_type("config", config, MLPConfig, optional=True)
        if config is not None and config.moe is not None:
            raise ValueError("config.moe is a MoEConfig, which MoE takes; a FeedForward allows None")
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.mlp_type = parse_enum(MLPType, mlp_type, "mlp_type")
        self.config = config if config is not None else MLPConfig()
        options: dict[str, Any] = {"strategy": self.config.linear_strategy, "device": device, "dtype": dtype}
        if self.mlp_type.is_gated:
            self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, self.config.bias, **options)
            fuse_on_load(self, "gate_up_proj", {"gate_proj": intermediate_size, "up_proj": intermediate_size})
        else:
            self.up_proj = Linear(hidden_size, intermediate_size, self.config.bias, **options)
        self.down_proj = Linear(intermediate_size, hidden_size, self.config.bias, **options)
        self.dropout = nn.Dropout(self.config.dropout)

    #: what runs as one kernel; see ``TransformerLayer.use_fusions``
    fusions: frozenset[Fusion] = DEFAULT_FUSIONS

    def forward(self, x: Tensor) -> Tensor:
        kind = self.mlp_type.activation
        if self.mlp_type.is_gated:
            gate, up = self.gate_up_proj(x).split(self.intermediate_size, dim=-1)
            overwrite = may_overwrite(self, self.gate_up_proj)
            if Fusion.GATE in self.fusions:
                hidden = gated_activation(gate, up, kind, strategy=self.config.strategy, overwrite=overwrite)
            else:
                hidden = activation(gate, kind) * up
        else:
            hidden = activation(self.up_proj(x), kind, overwrite=may_overwrite(self, self.up_proj))
        return self.down_proj(self.dropout(hidden))

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.intermediate_size}, mlp_type={self.mlp_type.value}"
