"""The registry's records of the native CPU kernels: what they cannot do, and what they cost."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.kernels.costs import Cost, uneven
from atb_modules.kernels.memory import apart, elements_apart, may_take, row_layout
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import (
    ActivationTraits,
    AttentionTraits,
    LinearTraits,
    NormTraits,
    RotaryTraits,
)
from atb_modules.overlays import Overlays
from atb_modules.reach import reach
from atb_modules.spec import AttentionSpec, Causal
from atb_modules.strategies import (
    AttentionStrategy,
    LinearStrategy,
    MLPStrategy,
    NormStrategy,
    RotaryStrategy,
)

from . import library, structs
from .ops_attention import LANES
from .ops_linear import GEMV_ROWS

_OPS = torch.ops.atb_modules
#: asked once: whether there is a library does not change, and torch.compile cannot trace the question
_UNAVAILABLE = library.unavailable_reason()


def _supported(parameter: Tensor | None) -> Tensor | None:
    """A weight in a dtype that the kernels read; float64 is rounded to the float32 that they compute in."""
    return parameter if parameter is None or parameter.dtype in structs.DTYPES else parameter.float()


def rms_norm_cpu(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, cast_first: bool = False
) -> Tensor:
    """One native pass over each row."""
    return _OPS.rms_norm(x, _supported(weight), eps, weight_offset, cast_first)


def add_rms_norm_cpu(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """The sum and its norm in one native pass over each row."""
    return _OPS.add_rms_norm(x, residual, _supported(weight), eps, weight_offset, cast_first)


def layer_norm_cpu(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """One native pass over each row."""
    return _OPS.layer_norm(x, _supported(weight), _supported(bias), eps)


def add_layer_norm_cpu(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum and its norm in one native pass over each row."""
    return _OPS.add_layer_norm(x, residual, _supported(weight), _supported(bias), eps)


def gated_activation_cpu(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """One native pass; halves of a fused product are read in place."""
    return _OPS.gated_activation(gate, up, kind)


def gated_activation_cpu_(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """The same into the memory of gate."""
    if row_layout(gate) is None or not may_take(gate, up):
        return gated_activation_cpu(gate, up, kind)
    _OPS.gated_activation.out(gate, up, kind, out=gate)
    return gate


def rotary_cpu_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The same into the memory of x."""
    if x.stride(-1) != 1 or not (elements_apart(x) and apart(x, cos) and apart(x, sin)):
        return rotary_cpu(x, cos, sin, interleaved)
    _OPS.rotary.out(x, cos, sin, interleaved, out=x)
    return x


def add_rms_norm_cpu_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same with the sum in the memory of x."""
    if not x.is_contiguous() or not may_take(x, residual) or not (weight is None or apart(x, weight)):
        return add_rms_norm_cpu(x, residual, weight, eps, weight_offset, cast_first)
    normed = torch.empty_like(x)
    _OPS.add_rms_norm.out(x, residual, _supported(weight), eps, weight_offset, cast_first, out=normed, sum_out=x)
    return normed, x


def rotary_cpu(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (tokens, heads, head_dim) of any strides, cos and sin (tokens, rotary_dim / 2)."""
    return _OPS.rotary(x, cos, sin, interleaved)


def linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Few rows by the native GEMV, more in float32 panels."""
    return _OPS.linear(x, weight, bias)


def static_parts(spec: AttentionSpec, head_dim: int) -> tuple[int, int, float, float]:
    """(left, right, scale, softcap) as the ops take them."""
    left = -1 if spec.left is None else spec.left
    right = -1 if spec.right is None else spec.right
    return left, right, spec.scale_for(head_dim), spec.softcap or 0.0


def causal_code(spec: AttentionSpec) -> int:
    """``causal`` as the ops take it."""
    return 0 if not spec.is_causal else 2 if spec.causal is Causal.TOP_LEFT else 1


def attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    overlays: Overlays | None = None,
    dropout_p: float = 0.0,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Flash attention with a query in each vector lane; any strides, grouped heads share what is read."""
    causal = causal_code(spec)
    ranges = reach(spec, q.shape[2], k.shape[2], overlays, q.device) if spec.has_overlays or overlays else None
    blocks = None if overlays is None else overlays.block_mask
    starts = None if overlays is None else overlays.query_blocks(q.shape[1] // k.shape[1], LANES)
    options = (ranges, blocks, spec.block_size or 0, causal, *static_parts(spec, q.shape[-1]), starts)
    out, lse = _OPS.attention(q, k, v, mask, sinks, alibi_slopes, *options)
    return out, lse if need_lse else None


def attention_pair_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    other_k: Tensor,
    other_v: Tensor,
    spec: AttentionSpec,
    overlays: Overlays | None,
    other_overlays: Overlays | None,
) -> tuple[Tensor, Tensor]:
    """One softmax over two sets of keys that lie apart: k under ``spec``, and all of other_k; (out, lse).

    The overlays are packed segments, of either set its own, or None for both.
    """
    group = q.shape[1] // k.shape[1]
    ranges, starts = [], []
    full = AttentionSpec()
    for structure, its, keys in ((spec, overlays, k), (full, other_overlays, other_k)):
        ranges.append(None if its is None else reach(structure, q.shape[2], keys.shape[2], its, q.device))
        starts.append(None if its is None else its.query_blocks(group, LANES))
    _, _, scale, softcap = static_parts(spec, q.shape[-1])
    return _OPS.attention_pair(q, k, v, other_k, other_v, *ranges, *starts, causal_code(spec), scale, softcap)


def common_reasons(*dtypes: torch.dtype) -> list[str]:
    reasons = []
    if _UNAVAILABLE is not None:
        reasons.append(_UNAVAILABLE)
    for dtype in dict.fromkeys(dtypes):
        if dtype not in structs.DTYPES:
            reasons.append(f"the CPU kernels know float32, bfloat16 and float16, not {dtype}")
    return reasons


def _plain_reasons(spec: None, traits: NormTraits | ActivationTraits | RotaryTraits) -> tuple[str, ...]:
    return tuple(common_reasons(traits.dtype))


def _linear_reasons(spec: None, traits: LinearTraits) -> tuple[str, ...]:
    reasons = common_reasons(traits.dtype, traits.weight_dtype)
    if traits.autocast:
        reasons.append("autocast decides the dtype of the product")
    return tuple(reasons)


def _attention_reasons(spec: AttentionSpec, traits: AttentionTraits) -> tuple[str, ...]:
    reasons = common_reasons(traits.dtype)
    if traits.bias_requires_grad:
        reasons.append("the CPU attention kernel has no gradient of a mask or of ALiBi slopes")
    if traits.dropout:
        reasons.append("the CPU attention kernel has no dropout")
    if traits.value_dim != traits.head_dim:
        reasons.append(
            f"value_dim {traits.value_dim} must equal head_dim {traits.head_dim} in the CPU attention kernel"
        )
    return tuple(reasons)


def _norm_cost(spec: None, traits: NormTraits) -> Cost:
    tensors = 4.0 if traits.fused_add else 2.0
    return Cost(bytes=tensors * traits.dtype.itemsize * traits.rows * traits.width)


def _activation_cost(spec: None, traits: ActivationTraits) -> Cost:
    return Cost(bytes=3.0 * traits.dtype.itemsize * traits.rows * traits.width)


def _rotary_cost(spec: None, traits: RotaryTraits) -> Cost:
    elements = 1.0 * traits.tokens * traits.num_heads * traits.head_dim
    # Interleaved pairs are rotated one at a time.
    return Cost(bytes=(12.0 if traits.interleaved else 2.0) * traits.dtype.itemsize * elements)


def _linear_cost(spec: None, traits: LinearTraits) -> Cost:
    weights = 1.0 * traits.in_features * traits.out_features
    operations = 2.0 * traits.rows * weights
    moved = traits.weight_dtype.itemsize * weights
    if traits.rows <= GEMV_ROWS:
        return Cost(operations=operations, bytes=moved)
    # The panels' products are torch's: its rate is higher than the one of our kernels, and without panels it is
    # better left to itself.
    if traits.weight_dtype == traits.dtype == torch.float32:
        return Cost(operations=operations, bytes=moved, calls=2.0)
    if traits.weight_dtype != torch.float32:
        moved += 8.0 * weights
    if traits.dtype != torch.float32:
        moved += 8.0 * traits.rows * (traits.in_features + traits.out_features)
    return Cost(operations=0.73 * operations, bytes=moved, calls=1.0 + traits.out_features // 1024)


def visible_share(spec: AttentionSpec, q_len: int, kv_len: int) -> float:
    """The share of the scores that lies in tiles which some query sees."""
    width = float(kv_len)
    if spec.left is not None and spec.right is not None:
        width = min(width, spec.left + spec.right + 64.0)
    if spec.is_causal and spec.left is None:
        width = min(width, max(kv_len - 0.5 * q_len, 0.5 * kv_len) + 24.0)
    return width / kv_len if kv_len else 1.0


def _attention_cost(spec: AttentionSpec, traits: AttentionTraits) -> Cost:
    scores = traits.pairs * visible_share(spec, traits.q_len, traits.kv_len) if traits.seen is None else traits.seen
    overlaid = spec.has_overlays or traits.has_overlays
    reached = 2.0 * overlaid + 3.0 * (traits.segments > 0) + traits.has_block_mask
    if traits.q_len == 1 and traits.mask == "none" and not overlaid and spec.causal is not Causal.TOP_LEFT:
        # as over pages: vectors along the channels, keys shared out evenly
        return Cost(operations=2.0 * scores * traits.head_dim, bytes=traits.bytes, scores=scores)
    # queries of a kv head, 64 at a time in vectors of 16
    lanes = traits.num_heads // traits.num_kv_heads * traits.q_len
    items = traits.batch * traits.num_kv_heads * max(-(-lanes // LANES), traits.segments)
    scores *= -(-lanes // 16) * 16 / lanes * uneven(items)
    return Cost(
        operations=4.0 * scores * traits.head_dim,
        bytes=traits.bytes,
        calls=1.0 + reached,
        scores=scores,
        cells=scores if traits.mask != "none" or spec.softcap is not None else 0.0,
        steps=uneven(items) * items,
    )


_CPU = ("cpu",)
register(Kernel("rms_norm", NormStrategy.CPU, rms_norm_cpu, _plain_reasons, _norm_cost, _CPU, transformable=False))
register(
    Kernel(
        "add_rms_norm",
        NormStrategy.CPU,
        add_rms_norm_cpu,
        _plain_reasons,
        _norm_cost,
        _CPU,
        transformable=False,
        inplace=add_rms_norm_cpu_,
    )
)
register(Kernel("layer_norm", NormStrategy.CPU, layer_norm_cpu, _plain_reasons, _norm_cost, _CPU, transformable=False))
register(
    Kernel(
        "add_layer_norm", NormStrategy.CPU, add_layer_norm_cpu, _plain_reasons, _norm_cost, _CPU, transformable=False
    )
)
register(
    Kernel(
        "gated_activation",
        MLPStrategy.CPU,
        gated_activation_cpu,
        _plain_reasons,
        _activation_cost,
        _CPU,
        transformable=False,
        inplace=gated_activation_cpu_,
    )
)
register(
    Kernel(
        "rotary",
        RotaryStrategy.CPU,
        rotary_cpu,
        _plain_reasons,
        _rotary_cost,
        _CPU,
        transformable=False,
        inplace=rotary_cpu_,
    )
)
register(Kernel("linear", LinearStrategy.CPU, linear_cpu, _linear_reasons, _linear_cost, _CPU, transformable=False))
register(
    Kernel(
        "attention",
        AttentionStrategy.CPU,
        attention_cpu,
        _attention_reasons,
        _attention_cost,
        _CPU,
        transformable=False,
    )
)
