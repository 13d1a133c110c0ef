"""QFormer: trained queries that see each other and, in some layers, the vision tokens (BLIP-2, Li et al. 2023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.attention import Attention, AttentionConfig
from atb_modules.checks import check_int, check_tensor
from atb_modules.layer import LayerType, TransformerLayer
from atb_modules.linear import Linear
from atb_modules.norm import LayerNorm, NormConfig


class QFormer(nn.Module):
    """Post-norm layers over ``num_queries`` queries, with cross attention in every ``cross_every``-th, from the first.

    Args:
        hidden_size: channels of the queries.
        num_queries: tokens that come out.
        num_layers, num_heads, intermediate_size: of the layers.
        in_features: channels of the vision tokens.
        out_features: channels of a linear layer at the end; None for none.
        cross_every: how often a layer has cross attention.
        eps: of the norms.

    x: (images, tokens, in_features) -> (images, num_queries, out_features or hidden_size).
    """

    def __init__(
        self,
        hidden_size: int,
        num_queries: int = 32,
        num_layers: int = 12,
        num_heads: int = 12,
        intermediate_size: int | None = None,
        *,
        in_features: int,
        out_features: int | None = None,
        cross_every: int = 2,
        eps: float = 1e-12,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_queries", num_queries), ("in_features", in_features), ("cross_every", cross_every)):
            check_int(name, value)
        check_int("hidden_size", hidden_size)
        check_int("num_layers", num_layers, most=1024)
        check_int("out_features", out_features, optional=True)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_features, self.num_queries = in_features, num_queries
        self.queries = nn.Parameter(torch.empty(num_queries, hidden_size, **where))
        nn.init.normal_(self.queries, std=0.02)
        self.norm = LayerNorm(hidden_size, eps, **where)
        biased = AttentionConfig(causal=False, qkv_bias=True, out_bias=True)
        self.layers = nn.ModuleList()
        for index in range(num_layers):
            crosses = index % cross_every == 0
            layer = TransformerLayer(
                hidden_size,
                num_heads,
                intermediate_size=intermediate_size,
                layernorm_type="layernorm",
                mlp_type="gelu",
                norm_placement="post",
                layer_type=LayerType.CROSS_DECODER if crosses else LayerType.ENCODER,
                attention=biased,
                norm=NormConfig(eps=eps),
                bias=True,
                **where,
            )
            if crosses and in_features != hidden_size:
                layer.cross_attention = Attention(
                    hidden_size, num_heads, cross=True, kv_hidden_size=in_features, config=biased, **where
                )
            self.layers.append(layer)
        self.proj = None if out_features is None else Linear(hidden_size, out_features, **where)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """x: (images, tokens, in_features); attention_mask: (images, tokens), 1 = real."""
        check_tensor("x", x, f"a tensor (images, tokens, {self.in_features})")
        if x.dim() != 3 or x.shape[2] != self.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}; allowed: (images, tokens, {self.in_features})")
        queries = self.norm(self.queries).expand(x.shape[0], -1, -1)
        for layer in self.layers:
            if layer.layer_type is LayerType.CROSS_DECODER:
                queries = layer(queries, encoder_hidden_states=x, encoder_attention_mask=attention_mask)
            else:
                queries = layer(queries)
        return queries if self.proj is None else self.proj(queries)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_queries={self.num_queries}"
