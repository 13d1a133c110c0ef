"""What stands in the slots of a model that native calls read past: only our own untouched modules may be read.

A native call takes weights out of modules instead of calling them. That is right only where a call would have done
nothing else: no hook, no wrapper, no subclass, no forward of the instance's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules import module as torch_module

from atb_modules.attention import Attention
from atb_modules.attention.qkv import FusedQKV
from atb_modules.kernels.cpu.structs import DTYPES
from atb_modules.layer import TransformerLayer
from atb_modules.linear import Linear
from atb_modules.mlp import FeedForward
from atb_modules.norm import RMSNorm
from atb_modules.residual import ResidualBranch

if TYPE_CHECKING:
    from atb_modules.models.decoder import DecoderModel

_LAYER = {
    "": (TransformerLayer,),
    "attention": (Attention,),
    "attention.qkv": (FusedQKV,),
    "attention.qkv.qkv_proj": (Linear,),
    "attention.o_proj": (Linear,),
    "attention.q_norm": (RMSNorm, NoneType),
    "attention.k_norm": (RMSNorm, NoneType),
    "attention_branch": (ResidualBranch,),
    "attention_norm": (RMSNorm,),
    "attention_post_norm": (RMSNorm, NoneType),
    "mlp": (FeedForward,),
    "mlp.gate_up_proj": (Linear, NoneType),
    "mlp.down_proj": (Linear,),
    "mlp.dropout": (nn.Dropout, nn.Identity),
    "mlp_branch": (ResidualBranch,),
    "mlp_norm": (RMSNorm, NoneType),
    "mlp_post_norm": (RMSNorm, NoneType),
}
_MODEL = {"norm": (RMSNorm,), "lm_head": (Linear,)}
# What the long road calls of a model, besides its modules.
_METHODS = ("run_packed", "rotary_tables", "head")


def layer_changes(layer: nn.Module) -> tuple[str, ...]:
    """Reasons against reading the weights of `layer` past its modules; empty for a layer of ours."""
    return tuple(_changes(layer, _LAYER, "layer"))


def model_changes(model: DecoderModel) -> tuple[str, ...]:
    """Reasons against reading past the modules of `model` around its layers: the norm, the head, the methods.

    The embedding is not among them: every road calls it.
    """
    reasons = _changes(model, _MODEL, "model")
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        reasons.append("forward hooks of all modules are set")
    for name in _METHODS:
        ours = next(base for base in type(model).__mro__ if name in base.__dict__)
        if name in model.__dict__ or ours.__module__ != "atb_modules.models.decoder":
            reasons.append(f"{name} of the model is overridden")
    if reasons:
        return tuple(reasons)
    head = model.lm_head
    if head.bias is not None:
        reasons.append("lm_head has a bias")
    if head.weight.dtype not in DTYPES:
        reasons.append(f"lm_head is {head.weight.dtype}; it takes {', '.join(map(str, DTYPES))}")
    for where, strategy in (("norm", model.norm.config.strategy), ("lm_head", head.strategy)):
        if strategy not in ("auto", "cpu"):
            reasons.append(f"{where} strategy is {strategy}; it takes auto, cpu")
    return tuple(reasons)


def layer_slots(layer: nn.Module) -> dict[str, nn.Module]:
    """The modules in the slots of a layer, by path; slots that are empty or not there are left out."""
    found = {path: _at(layer, path) for path in _LAYER}
    return {path: module for path, module in found.items() if isinstance(module, nn.Module)}


def _at(root: nn.Module, path: str) -> object:
    module: object = root
    for name in path.split(".") if path else ():
        module = getattr(module, name, None)
    return module


def _changes(root: nn.Module, slots: Mapping[str, tuple[type, ...]], name: str) -> list[str]:
    reasons = []
    foreign: list[str] = []
    for path, kinds in slots.items():
        if any(path.startswith(outer) for outer in foreign):
            continue  # what is inside of a foreign module is its own affair
        module = _at(root, path)
        where = path or name
        kind = type(module)
        if kind not in kinds:
            foreign.append(f"{path}." if path else "")
            allowed = ", ".join(k.__name__ for k in kinds if k is not NoneType)
            reasons.append(f"{where} is {kind.__module__}.{kind.__qualname__}; it takes {allowed}")
        elif isinstance(module, nn.Module):
            if module._forward_hooks or module._forward_pre_hooks:
                reasons.append(f"{where} has forward hooks")
            if "forward" in module.__dict__:
                reasons.append(f"{where} has a forward of its own")
            if kind is RMSNorm and module.weight is None:
                reasons.append(f"{where} has no weight")
    return reasons
