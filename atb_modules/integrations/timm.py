"""timm's attention, norms and feed-forwards with our kernels inside; ``optimize.swap`` gives modules these classes."""

from __future__ import annotations

from typing import Any

import timm.layers as layers
import torch
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from atb_modules.attention.functional import attention
from atb_modules.integrations.modules import is_watched, normed, over_last_axis, project
from atb_modules.mlp.functional import gated_activation
from atb_modules.norm.functional import rms_norm
from atb_modules.spec import AttentionSpec

_ALL, _CAUSAL = AttentionSpec(), AttentionSpec(causal=True)


def _heads(x: Tensor, parts: int, num_heads: int) -> tuple[Tensor, ...]:
    """(batch, tokens, parts * heads * dim) -> parts times (batch, heads, tokens, dim), views."""
    return x.unflatten(-1, (parts, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _separate_bias(module: Any) -> Tensor | None:
    """The bias of EVA and BEiT: queries and values have one, keys zeros."""
    return None if module.q_bias is None else torch.cat((module.q_bias, module.k_bias, module.v_bias))


def _rotate(module: Any, x: Tensor, rope: Tensor, like: Tensor) -> Tensor:
    """All tokens but the prefix rotated, in the values' dtype."""
    prefix = module.num_prefix_tokens
    rotated = apply_rot_embed_cat(x[:, :, prefix:], rope, half=getattr(module, "rotate_half", False))
    return torch.cat([x[:, :, :prefix], rotated], dim=2).type_as(like)


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """(batch, tokens, heads * dim)."""
    dropout = module.attn_drop.p if module.training else 0.0
    out, _ = attention(q, k, v, _CAUSAL if is_causal else _ALL, mask=mask, dropout_p=dropout)
    return out.transpose(1, 2).flatten(2)


def _finish(module: Any, out: Tensor, gate: Tensor | None) -> Tensor:
    out = module.norm(out)
    if gate is not None:
        out = out * gate
    return module.proj_drop(project(module.proj, out))


def _gate(module: Any, x: Tensor) -> Tensor | None:
    return None if module.gate is None else project(module.gate, x).sigmoid()


# Where ``fused_attn`` is off somebody wants the attention weights (hooks on the softmax): then timm's own forward runs,
# as it does for a mask beside a causal flag, which the two forms of timm read differently.


class FusedAttention(layers.Attention):
    """ViT, DeiT and SigLIP."""

    def forward(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if not self.fused_attn or (is_causal and attn_mask is not None):
            return super().forward(x, attn_mask, is_causal)
        gate = _gate(self, x)
        q, k, v = _heads(project(self.qkv, x), 3, self.num_heads)
        return _finish(self, _attend(self, self.q_norm(q), self.k_norm(k), v, attn_mask, is_causal), gate)


class _RotaryAttention(nn.Module):
    """What EVA's two attention modules share; they differ in their biases and in grouped heads."""

    def forward(
        self: Any, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if not self.fused_attn or (is_causal and attn_mask is not None):
            return super().forward(x, rope, attn_mask, is_causal)
        gate = _gate(self, x)
        if self.qkv is not None:
            bias = _separate_bias(self) if isinstance(self, EvaAttention) else None
            q, k, v = _heads(project(self.qkv, x, bias), 3, self.num_heads)
        else:
            kv_heads = getattr(self, "num_kv_heads", self.num_heads)
            (q,) = _heads(project(self.q_proj, x), 1, self.num_heads)
            (k,) = _heads(project(self.k_proj, x), 1, kv_heads)
            (v,) = _heads(project(self.v_proj, x), 1, kv_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = _rotate(self, q, rope, v), _rotate(self, k, rope, v)
        return _finish(self, _attend(self, q, k, v, attn_mask, is_causal), gate)


class FusedAttentionRope(_RotaryAttention, layers.AttentionRope):
    """DINOv3 and other models of EVA's file with ``attn_type="rope"``; grouped heads are not expanded."""


class FusedEvaAttention(_RotaryAttention, EvaAttention):
    """EVA and EVA-02."""


class FusedBeitAttention(BeitAttention):
    """BEiT: the bias of relative positions, the layer's own and the shared one, is added to the scores."""

    def forward(self: Any, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        if not self.fused_attn:
            return super().forward(x, shared_rel_pos_bias)
        q, k, v = _heads(project(self.qkv, x, _separate_bias(self)), 3, self.num_heads)
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()
            bias = own if bias is None else own + bias
        return self.proj_drop(project(self.proj, _attend(self, q, k, v, bias, False)))


class FusedAttentionPoolLatent(layers.AttentionPoolLatent):
    """The pooling head of SigLIP: a few learned queries over all tokens."""

    def forward(self: Any, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if not self.fused_attn:
            return super().forward(x, attn_mask)
        if self.pos_embed is not None:
            x = x + self.pos_embed.unsqueeze(0).to(x.dtype)
        (q,) = _heads(project(self.q, self.latent.expand(x.shape[0], -1, -1)), 1, self.num_heads)
        k, v = _heads(project(self.kv, x), 2, self.num_heads)
        out, _ = attention(self.q_norm(q), self.k_norm(k), v, _ALL, mask=attn_mask)
        out = self.proj_drop(project(self.proj, out.transpose(1, 2).flatten(2)))
        if self.mlp is not None:
            out = out + self.mlp(self.norm(out))
        if self.pool == "token":
            return out[:, 0]
        return out.mean(1) if self.pool == "avg" else out


class FusedLayerNorm(layers.LayerNorm):
    """One pass over each row."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return normed(self, x) if over_last_axis(self) else super().forward(x)


class FusedRmsNorm(layers.RmsNorm):
    """One pass over each row, statistics in float32."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, float(self.eps)) if over_last_axis(self) else super().forward(x)


class FusedMlp(layers.Mlp):
    """Two products and an activation between them."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return _out(self, self.act(project(self.fc1, x)))


class FusedGluMlp(layers.GluMlp):
    """One product for gate and value; SiLU gates by one pass over both halves."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not _is_silu(self.act) or self.chunk_dim != -1:
            return super().forward(x)
        first, second = project(self.fc1, x).chunk(2, dim=-1)
        gate, value = (second, first) if self.gate_last else (first, second)
        return _out(self, gated_activation(gate, value))


class FusedSwiGLU(layers.SwiGLU):
    """The same with a product each."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not _is_silu(self.act):
            return super().forward(x)
        return _out(self, gated_activation(project(self.fc1_g, x), project(self.fc1_x, x)))


def _is_silu(act: nn.Module) -> bool:
    return type(act) is nn.SiLU and not is_watched(act)


def _out(mlp: Any, hidden: Tensor) -> Tensor:
    return mlp.drop2(project(mlp.fc2, mlp.norm(mlp.drop1(hidden))))


#: timm's class -> ours
CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    layers.Attention: FusedAttention,
    layers.AttentionRope: FusedAttentionRope,
    layers.AttentionPoolLatent: FusedAttentionPoolLatent,
    EvaAttention: FusedEvaAttention,
    BeitAttention: FusedBeitAttention,
    layers.LayerNorm: FusedLayerNorm,
    layers.RmsNorm: FusedRmsNorm,
    layers.Mlp: FusedMlp,
    layers.GluMlp: FusedGluMlp,
    layers.SwiGLU: FusedSwiGLU,
}
