"""The op `decode_layer`: one token a row through a whole layer, by one native call or by the modules one
after the other.

What a layer is made of is written down as words ("placement:pre", "mlp:swiglu", ...); the native kernel says
which words it knows, and everything else is a reason against it. So is whatever a user put in the place of one of our
modules.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from atb_modules.attention import Attention, KVCacheManager, RotaryLayout
from atb_modules.attention.config import QKNormOrder
from atb_modules.attention.qkv import FusedQKV
from atb_modules.kernels.costs import Cost
from atb_modules.kernels.cpu import DecodeLayerPlan, DecodeSettings, DecodeWeights, library
from atb_modules.kernels.cpu.decode_layer import MAX_BATCH
from atb_modules.kernels.cpu.structs import ACTIVATIONS, DTYPES
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import DecodeTraits
from atb_modules.layer import TransformerLayer
from atb_modules.linear import Linear
from atb_modules.mlp import FeedForward
from atb_modules.norm import RMSNorm
from atb_modules.strategies import DecodeStrategy, effective_strategy

from .slots import layer_changes, layer_slots

_KNOWN = {
    "mode": ("inference",),
    "type": ("decoder",),
    "placement": ("pre", "sandwich"),
    "mlp": tuple(f"gated {name}" for name in ACTIVATIONS),
    "qk_norm": ("None", "before_rotary"),
    "rotary": ("half", "interleaved"),
    "alibi": ("False",),
    "global tokens, prefix, chunks or blocks": ("False",),
    "layer_scale": ("False",),
    "weight dtypes": ("1",),
    "norm settings": ("1",),
}
# A word that is a reason by itself.
_CHANGED = "changed"
_OPS = {
    "paged_attention": "attention",
    "linear": "linear",
    "rms_norm": "norm",
    "rotary": "rotary",
    "rotary_append": "cache",
    "gated_activation": "mlp",
}


def layer_traits(layer: nn.Module, page_dtype: torch.dtype, batch: int, around: tuple[str, ...] = ()) -> DecodeTraits:
    """What the registry must know of a layer to choose who runs its one-token steps.

    Args:
        layer: what stands in the place of a layer, a `TransformerLayer` or anything else.
        page_dtype: of the cache.
        batch: rows of a step.
        around: reasons against the native call that lie outside of the layer.
    """
    changes = around + layer_changes(layer)
    structure = tuple(f"{_CHANGED}:{reason}" for reason in changes)
    slots = layer_slots(layer)
    linears = [module for module in slots.values() if isinstance(module, Linear)]
    if not changes and isinstance(layer, TransformerLayer):
        structure = _structure(layer, linears, [norm for norm in slots.values() if isinstance(norm, RMSNorm)])
    weight = linears[0].weight if linears else next(layer.parameters(), torch.empty(0))
    return DecodeTraits(
        device_type=weight.device.type,
        dtype=weight.dtype,
        page_dtype=page_dtype,
        batch=batch,
        structure=structure,
        requires_grad=torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters()),
    )


def _structure(layer: TransformerLayer, linears: list[Linear], norms: list[RMSNorm]) -> tuple[str, ...]:
    attention, mlp = layer.attention, layer.mlp
    order = attention.config.qk_norm
    words = {
        "mode": layer.mode.value,
        "type": layer.layer_type.value,
        "placement": layer.placement.value,
        "mlp": f"{'gated' if mlp.mlp_type.is_gated else 'plain'} {mlp.mlp_type.activation}",
        "qk_norm": "None" if order is None else QKNormOrder(order).value,
        "rotary": "None" if attention.rotary is None else RotaryLayout(attention.rotary.config.layout).value,
        "alibi": str(attention.alibi_slopes is not None),
        "global tokens, prefix, chunks or blocks": str(
            attention.spec.has_overlays or attention.spec.block_size is not None
        ),
        "layer_scale": str(layer.attention_branch.layer_scale is not None),
        "weight dtypes": str(len({linear.weight.dtype for linear in linears})),
        "norm settings": str(len({(n.config.eps, n.config.weight_offset) for n in norms})),
    }
    words |= {f"{name} strategy": _asked(layer, op) for op, name in _OPS.items()}
    return tuple(f"{key}:{value}" for key, value in words.items())


def _asked(layer: TransformerLayer, op: str) -> str:
    """The strategy in force for the part of the layer that runs `op`."""
    attention, config = layer.attention, layer.attention.config
    own = {
        "paged_attention": attention.strategy,
        "linear": config.linear_strategy,
        "rms_norm": layer.attention_norm.config.strategy,
        "rotary": "auto" if attention.rotary is None else attention.rotary.config.strategy,
        "rotary_append": config.cache_strategy,
        "gated_activation": layer.mlp.config.strategy,
    }
    return effective_strategy(op, own[op]).value


def _native_reasons(_: object, traits: DecodeTraits) -> tuple[str, ...]:
    reasons = []
    unavailable = library.unavailable_reason()
    if unavailable is not None:
        reasons.append(unavailable)
    if not 1 <= traits.batch <= MAX_BATCH:
        reasons.append(f"takes 1 to {MAX_BATCH} rows, the step has {traits.batch}")
    for name, dtype in (("weights", traits.dtype), ("pages", traits.page_dtype)):
        if dtype not in DTYPES:
            reasons.append(f"{name} are {dtype}; it takes {', '.join(map(str, DTYPES))}")
    if traits.requires_grad:
        reasons.append("has no gradient")
    for word in traits.structure:
        key, value = word.split(":", 1)
        if key == _CHANGED:
            reasons.append(value)
            continue
        known = _KNOWN.get(key, ("auto", "cpu"))
        if value not in known:
            reasons.append(f"{key} is {value}; it takes {', '.join(known)}")
    return tuple(reasons)


def _cost(calls: float) -> Callable[[object, DecodeTraits], Cost]:
    # Both read every weight once; what differs is how often Python is asked.
    return lambda _, traits: Cost(calls=calls, operations=float(traits.batch))


def native_plan(layer: TransformerLayer, cache: KVCacheManager, max_batch: int) -> DecodeLayerPlan:
    """The native call of one layer over the pages of `cache`."""
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention.qkv, FusedQKV) and isinstance(mlp, FeedForward)
    index = _index(attention)
    k_pages, v_pages = cache.pages(index)
    assert isinstance(k_pages, Tensor) and isinstance(v_pages, Tensor)
    rotary = attention.rotary
    window = attention.spec.window
    weights = DecodeWeights(
        qkv=attention.qkv.qkv_proj.weight.detach(),
        o=attention.o_proj.weight.detach(),
        gate_up=mlp.gate_up_proj.weight.detach(),
        down=mlp.down_proj.weight.detach(),
        attn_norm=norm_weight(layer.attention_norm),
        mlp_norm=norm_weight(layer.mlp_norm),
        qkv_bias=_bias(attention.qkv.qkv_proj),
        o_bias=_bias(attention.o_proj),
        gate_up_bias=_bias(mlp.gate_up_proj),
        down_bias=_bias(mlp.down_proj),
        attn_post_norm=_optional_norm_weight(getattr(layer, "attention_post_norm", None)),
        mlp_post_norm=_optional_norm_weight(getattr(layer, "mlp_post_norm", None)),
        q_norm=_optional_norm_weight(attention.q_norm),
        k_norm=_optional_norm_weight(attention.k_norm),
        sinks=None if attention.sinks is None else attention.sinks.detach().float(),
    )
    norm = layer.attention_norm.config
    settings = DecodeSettings(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rotary_dim=0 if rotary is None else rotary.rotary_dim,
        eps=norm.eps,
        weight_offset=norm.weight_offset,
        scale=attention.spec.scale,
        softcap=attention.spec.softcap,
        left=None if window is None else window[0],
        interleaved=rotary is not None and rotary.config.layout is RotaryLayout.INTERLEAVED,
        activation=mlp.mlp_type.activation,
    )
    return DecodeLayerPlan(weights, settings, k_pages, v_pages, max_batch=max_batch)


def _index(attention: Attention) -> int:
    if attention.layer_idx is None:
        raise ValueError("layer_idx is None; a layer of a model needs its number in the cache")
    return attention.layer_idx


def norm_weight(norm: nn.Module) -> Tensor:
    weight = norm.weight
    assert isinstance(weight, Tensor)
    return weight.detach().float()


def _optional_norm_weight(norm: nn.Module | None) -> Tensor | None:
    return None if norm is None else norm_weight(norm)


def _bias(module: Linear) -> Tensor | None:
    return None if module.bias is None else module.bias.detach().float()


def _modules(layer: TransformerLayer, cache: KVCacheManager, max_batch: int) -> TransformerLayer:
    return layer


register(
    Kernel(
        op="decode_layer",
        strategy=DecodeStrategy.CPU,
        function=native_plan,
        reasons=_native_reasons,
        cost=_cost(1.0),
        device_types=("cpu",),
    )
)
register(
    Kernel(
        op="decode_layer",
        strategy=DecodeStrategy.MODULES,
        function=_modules,
        reasons=lambda _, traits: (),
        cost=_cost(8.0),
    )
)
