"""Norms and feed-forwards of transformers' Llama-like models with our kernels inside, and "atb" as their attention."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralMLP, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3RMSNorm

from atb_modules.integrations.modules import is_watched, project
from atb_modules.integrations.transformers import NAME, register
from atb_modules.mlp.functional import gated_activation
from atb_modules.norm.functional import rms_norm

#: ``config.model_type`` of the models whose attention is set
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: their attention, which asks the config
ATTENTION: tuple[type[nn.Module], ...] = (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)
#: where a model keeps what its attention was before
_FORMER = "_atb_former_attention"


class _RMSNorm(nn.Module):
    """Llama's: normalised values are rounded before the weight multiplies them."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, float(self.variance_epsilon), cast_first=True)


class _MLP(nn.Module):
    """Gate and value in two products, SiLU and their product in one pass."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.config.hidden_act not in ("silu", "swish") or is_watched(self.act_fn):
            return super().forward(x)
        return project(self.down_proj, gated_activation(project(self.gate_proj, x), project(self.up_proj, x)))


class FusedLlamaRMSNorm(_RMSNorm, LlamaRMSNorm):
    pass


class FusedMistralRMSNorm(_RMSNorm, MistralRMSNorm):
    pass


class FusedQwen2RMSNorm(_RMSNorm, Qwen2RMSNorm):
    pass


class FusedQwen3RMSNorm(_RMSNorm, Qwen3RMSNorm):
    pass


class FusedLlamaMLP(_MLP, LlamaMLP):
    pass


class FusedMistralMLP(_MLP, MistralMLP):
    pass


class FusedQwen2MLP(_MLP, Qwen2MLP):
    pass


class FusedQwen3MLP(_MLP, Qwen3MLP):
    pass


#: transformers' class -> ours
CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    LlamaRMSNorm: FusedLlamaRMSNorm,
    MistralRMSNorm: FusedMistralRMSNorm,
    Qwen2RMSNorm: FusedQwen2RMSNorm,
    Qwen3RMSNorm: FusedQwen3RMSNorm,
    LlamaMLP: FusedLlamaMLP,
    MistralMLP: FusedMistralMLP,
    Qwen2MLP: FusedQwen2MLP,
    Qwen3MLP: FusedQwen3MLP,
}


def set_attention(model: nn.Module) -> list[str]:
    """Set the attention of every known model inside ``model`` to ours; the names of their classes.

    Modules read the choice from their config, which models may share: ``model`` gets a copy of its own.
    """
    register()
    changed = []
    for inner in model.modules():
        if not isinstance(inner, PreTrainedModel) or inner.config.model_type not in FAMILIES:
            continue
        former = inner.config._attn_implementation
        if former == NAME:
            continue
        copies: dict[int, Any] = {}
        copy.deepcopy(inner.config, copies)
        for module in model.modules():
            config = module.__dict__.get("config")
            if id(config) in copies:
                module.config = copies[id(config)]
        setattr(inner, _FORMER, former)
        inner.set_attn_implementation(NAME)
        changed.append(type(inner).__name__)
    return changed


def restore_attention(model: nn.Module) -> None:
    """Undo ``set_attention``."""
    for inner in model.modules():
        former = inner.__dict__.pop(_FORMER, None)
        if isinstance(inner, PreTrainedModel) and former is not None:
            inner.set_attn_implementation(former)
