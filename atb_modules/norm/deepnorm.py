"""DeepNorm (Wang et al., 2022): post-norm residuals whose stream is scaled up and whose branches start small."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atb_modules.checks import check_int, check_positive
from atb_modules.norm.add import add_norm
from atb_modules.norm.modules import NormConfig, NormType, build_norm


@dataclass(frozen=True)
class DeepNorm:
    """The two numbers of a stack of layers (table 1 of the paper).

    Args:
        alpha: what the stream is multiplied with before a branch is added: ``norm(alpha * x + f(x))``.
        beta: gain of the initial weights of the value, output and feed-forward projections (``deepnorm_init_``).
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)
        check_positive("beta", self.beta)

    @classmethod
    def of_encoder(cls, num_layers: int) -> DeepNorm:
        """A stack alone, BERT-like: (2 N)^(1/4) and (8 N)^(-1/4)."""
        check_int("num_layers", num_layers)
        return cls((2.0 * num_layers) ** 0.25, (8.0 * num_layers) ** -0.25)

    @classmethod
    def of_decoder(cls, num_layers: int) -> DeepNorm:
        """A stack alone, GPT-like: (2 M)^(1/4) and (8 M)^(-1/4)."""
        return cls.of_encoder(num_layers)

    @classmethod
    def of_encoder_decoder(cls, encoder_layers: int, decoder_layers: int) -> tuple[DeepNorm, DeepNorm]:
        """Those of the encoder, 0.81 (N^4 M)^(1/16) and 0.87 (N^4 M)^(-1/16), and of the decoder, (3 M)^(1/4) and
        (12 M)^(-1/4), whose layers attend to the encoder too."""
        check_int("encoder_layers", encoder_layers)
        check_int("decoder_layers", decoder_layers)
        depth = float(encoder_layers) ** 0.25 * float(decoder_layers) ** 0.0625
        encoder = cls(0.81 * depth, 0.87 / depth)
        return encoder, cls((3.0 * decoder_layers) ** 0.25, (12.0 * decoder_layers) ** -0.25)


class DeepNormResidual(nn.Module):
    """``norm(alpha * x + branch)`` over the last axis.

    Args:
        hidden_size: channels.
        alpha: see ``DeepNorm``.
        layernorm_type: "layernorm" or "rmsnorm".
        config: a ``NormConfig``.

    branch, x: (..., hidden_size) -> (..., hidden_size).
    """

    def __init__(
        self,
        hidden_size: int,
        alpha: float,
        layernorm_type: str = NormType.LAYERNORM,
        *,
        config: NormConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("alpha", alpha)
        self.alpha = float(alpha)
        self.norm = build_norm(
            layernorm_type, hidden_size, config if config is not None else NormConfig(), device, dtype
        )

    def forward(self, branch: Tensor, x: Tensor) -> Tensor:
        return add_norm(self.norm, branch, x * self.alpha)[0]

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:g}"
