"""PatchMerger: neighbouring patches become one token (Qwen-VL)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atb_modules.checks import check_bool, check_floating, check_int
from atb_modules.norm import NormConfig, build_norm

from .linear import MLPProjector


class PatchMerger(nn.Module):
    """A norm, then the channels of ``merge_size ** 2`` patches side by side, then two layers with GELU between.

    As Qwen2-VL has it (Wang et al. 2024); Qwen2.5-VL with an RMSNorm; Qwen3-VL's deepstack mergers norm what is
    joined (``norm_joined``)::

        patches, fed block after block       0 1 | 4 5          tokens    0 | 1
        of merge_size x merge_size           2 3 | 6 7

    Args:
        in_features: channels of a patch.
        out_features: channels of the language model.
        merge_size: patches a side of a block.
        layernorm_type: "layernorm" or "rmsnorm".
        norm_joined: whether the norm comes after the channels are joined.
        eps: of the norm.

    x: (..., patches, in_features), the patches of a block one after the other -> (..., patches / merge_size ** 2,
    out_features).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        merge_size: int = 2,
        *,
        layernorm_type: str = "layernorm",
        norm_joined: bool = False,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("in_features", in_features)
        check_int("merge_size", merge_size, most=1024)
        check_bool("norm_joined", norm_joined)
        self.in_features, self.out_features, self.merge_size = in_features, out_features, merge_size
        self.norm_joined = norm_joined
        joined = in_features * merge_size**2
        width = joined if norm_joined else in_features
        self.norm = build_norm(layernorm_type, width, NormConfig(eps=eps), device, dtype)
        self.mlp = MLPProjector(joined, out_features, joined, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        check_floating("x", x)
        block = self.merge_size**2
        if x.dim() < 2 or x.shape[-1] != self.in_features or x.shape[-2] % block:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; allowed: (..., patches, {self.in_features}), a multiple of {block} "
                f"patches (merge_size {self.merge_size})"
            )
        tokens = (*x.shape[:-2], x.shape[-2] // block, block * self.in_features)
        if self.norm_joined:
            return self.mlp(self.norm(x.reshape(tokens)))
        return self.mlp(self.norm(x).reshape(tokens))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, merge_size={self.merge_size}"
