"""What happens to a branch's output before it joins the residual stream: layer scale, dropout, drop path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atb_modules.checks import (
    check_device,
    check_int,
    check_number,
    check_parameter_dtype,
    check_positive,
    check_probability,
    check_type,
)


@dataclass(frozen=True)
class ResidualConfig:
    """Options of the residual branches.

    Args:
        dropout: probability of dropping a hidden value, in training.
        drop_path: probability of dropping a whole branch of a sample, in training (Huang et al., 2016).
        layer_scale: initial value of a trained factor a channel, None for none (Touvron et al., 2021).
        residual_scale: what the stream is multiplied with where a branch joins it, before the norm of a post-norm
            layer: DeepNorm's alpha (Wang et al., 2022; ``DeepNorm``).
    """

    dropout: float = 0.0
    drop_path: float = 0.0
    layer_scale: float | None = None
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("dropout", "drop_path"):
            check_probability(name, getattr(self, name))
        check_number("layer_scale", self.layer_scale, optional=True)
        check_positive("residual_scale", self.residual_scale)


class ResidualBranch(nn.Module):
    """Layer scale, then dropout, then drop path, each where configured; kept samples are scaled up by 1 / keep."""

    def __init__(
        self,
        hidden_size: int,
        config: ResidualConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size)
        check_type("config", config, ResidualConfig)
        check_device(device)
        check_parameter_dtype(dtype)
        self.config = config
        self.layer_scale = None
        if config.layer_scale is not None:
            self.layer_scale = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
            nn.init.constant_(self.layer_scale, config.layer_scale)

    def forward(self, branch: Tensor) -> Tensor:
        if self.layer_scale is not None:
            branch = (branch * self.layer_scale).to(branch.dtype)
        if not self.training:
            return branch
        if self.config.dropout:
            branch = nn.functional.dropout(branch, self.config.dropout)
        if self.config.drop_path:
            keep = 1.0 - self.config.drop_path
            kept = branch.new_empty(branch.shape[0], *(1,) * (branch.dim() - 1)).bernoulli_(keep)
            branch = branch * kept / keep
        return branch

    def extra_repr(self) -> str:
        config = self.config
        return f"dropout={config.dropout}, drop_path={config.drop_path}, layer_scale={config.layer_scale}"
