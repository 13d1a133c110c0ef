"""Projectors that look at one token at a time: linear (LLaVA), two and more layers (LLaVA 1.5)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from atb_modules.checks import check_bool, check_int
from atb_modules.linear import Linear
from atb_modules.mlp.functional import PLAIN_KINDS, activation


class LinearProjector(Linear):
    """One linear map of each token (LLaVA, Liu et al. 2023): (..., in_features) -> (..., out_features)."""


class MLPProjector(nn.Module):
    """``Linear``, then ``depth - 1`` times an activation and a ``Linear`` (LLaVA 1.5, Liu et al. 2024).

    Args:
        in_features: channels of the vision tokens.
        out_features: channels of the language model, and of the layers between.
        hidden_features: channels of the layers between, where they are others.
        depth: linear layers, at least 1.
        kind: "gelu", "gelu_tanh", "quick_gelu", "silu", "relu" or "relu2".
        bias: whether the layers have biases.

    x: (..., in_features) -> (..., out_features).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden_features: int | None = None,
        *,
        depth: int = 2,
        kind: str = "gelu",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("in_features", in_features)
        check_int("out_features", out_features)
        check_int("hidden_features", hidden_features, optional=True)
        check_int("depth", depth, most=64)
        check_bool("bias", bias)
        if kind not in PLAIN_KINDS:
            raise ValueError(f"kind is {kind!r}; allowed: {', '.join(PLAIN_KINDS)}")
        self.in_features, self.out_features, self.kind = in_features, out_features, kind
        middle = out_features if hidden_features is None else hidden_features
        widths = [in_features, *[middle] * (depth - 1), out_features]
        self.layers = nn.ModuleList(
            Linear(a, b, bias, device=device, dtype=dtype) for a, b in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(activation(x, self.kind) if index else x)
        return x

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, kind={self.kind}"
