"""PerceiverResampler: a fixed number of trained latents read any number of vision tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.attention import Attention, AttentionConfig
from atb_modules.checks import check_int, check_tensor
from atb_modules.mlp import FeedForward
from atb_modules.norm import NormConfig, build_norm


class PerceiverBlock(nn.Module):
    """Latents read the tokens and themselves, then a feed-forward; as drawn at ``PerceiverResampler``."""

    def __init__(
        self,
        attention: Attention,
        mlp: FeedForward,
        layernorm_type: str,
        norm: NormConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width = attention.hidden_size
        self.latents_norm = build_norm(layernorm_type, width, norm, device, dtype)
        self.context_norm = build_norm(layernorm_type, width, norm, device, dtype)
        self.attention = attention
        self.mlp_norm = build_norm(layernorm_type, width, norm, device, dtype)
        self.mlp = mlp

    def forward(self, latents: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        queries = self.latents_norm(latents)
        keys = torch.cat([self.context_norm(x), queries], dim=1)
        latents = latents + self.attention(queries, mask, key_value_states=keys)
        return latents + self.mlp(self.mlp_norm(latents))


class PerceiverResampler(nn.Module):
    """``depth`` blocks in which latents attend to the tokens and to themselves, then a norm.

    Flamingo's (Alayrac et al. 2022) has ``layernorm_type="layernorm", mlp_type="relu"``, Idefics 2's an RMSNorm, SwiGLU
    and grouped heads::

        latents = latents + attn(norm(latents), [norm(x), norm(latents)])
        latents = latents + mlp(norm(latents))

    Args:
        hidden_size: channels of tokens and latents.
        num_latents: tokens that come out.
        depth: blocks.
        num_heads, head_dim, num_kv_heads: of the attention.
        intermediate_size: of the feed-forwards; default 4 * hidden_size.
        layernorm_type, eps: of the norms.
        mlp_type: of the feed-forwards.
        qk_norm: None, or "layernorm" or "rmsnorm" of each head's queries and keys.

    x: (images, tokens, hidden_size) -> (images, num_latents, hidden_size).
    """

    def __init__(
        self,
        hidden_size: int,
        num_latents: int = 64,
        depth: int = 3,
        *,
        num_heads: int = 16,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        intermediate_size: int | None = None,
        layernorm_type: str = "rmsnorm",
        mlp_type: str = "swiglu",
        qk_norm: str | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size)
        check_int("num_latents", num_latents)
        check_int("depth", depth, most=1024)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        norm = NormConfig(eps=eps)
        self.hidden_size, self.num_latents = hidden_size, num_latents
        self.latents = nn.Parameter(torch.empty(num_latents, hidden_size, **where))
        nn.init.normal_(self.latents)
        options: dict[str, Any] = {"num_kv_heads": num_kv_heads, **where}
        options["config"] = AttentionConfig(
            qk_norm=None if qk_norm is None else "before_rotary", qk_norm_type=qk_norm or "rmsnorm", qk_norm_config=norm
        )
        width = 4 * hidden_size if intermediate_size is None else intermediate_size
        self.blocks = nn.ModuleList(
            PerceiverBlock(
                Attention(hidden_size, num_heads, head_dim, cross=True, **options),
                FeedForward(hidden_size, width, mlp_type, **where),
                layernorm_type,
                norm,
                **where,
            )
            for _ in range(depth)
        )
        self.norm = build_norm(layernorm_type, hidden_size, norm, **where)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """x: (images, tokens, hidden_size); attention_mask: (images, tokens), 1 = real."""
        check_tensor("x", x, f"a tensor (images, tokens, {self.hidden_size})")
        if x.dim() != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(f"x has shape {tuple(x.shape)}; allowed: (images, tokens, {self.hidden_size})")
        latents = self.latents.expand(x.shape[0], -1, -1)
        mask = None
        if attention_mask is not None:
            check_tensor("attention_mask", attention_mask, "a tensor (images, tokens) or None")
            if attention_mask.shape != x.shape[:2]:
                raise ValueError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}; x has {tuple(x.shape[:2])} tokens"
                )
            mask = torch.nn.functional.pad(attention_mask != 0, (0, self.num_latents), value=True)
        for block in self.blocks:
            latents = block(latents, x, mask)
        return self.norm(latents)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, num_latents={self.num_latents}"
