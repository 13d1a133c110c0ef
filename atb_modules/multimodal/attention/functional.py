"""The functional op: attention of vision and text tokens that are already projected, by any strategy."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.attention.calls import autocast, check_layout
from atb_modules.checks import check_bool, check_probability, check_type
from atb_modules.kernels.registry import resolve
from atb_modules.kernels.traits import MultiModalTraits
from atb_modules.multimodal.attention import records  # noqa: F401  (registers the strategies)
from atb_modules.multimodal.attention.spec import MultiModalLayout, MultiModalSpec
from atb_modules.multimodal.attention.strategies import QKV, MultiModalCall, unpacked
from atb_modules.overlays import Overlays
from atb_modules.reach import seen_pairs
from atb_modules.strategies import AttentionStrategy, parse_enum

_DEFAULT = MultiModalSpec()


def multimodal_attention(
    vision: QKV,
    text: QKV,
    spec: MultiModalSpec = _DEFAULT,
    *,
    layout: MultiModalLayout | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    strategy: str = "auto",
    attention_strategy: str = "auto",
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention in which vision sees vision, text sees text, and each the other as ``spec.cross`` says.

    Whatever the strategy, this is one softmax a query over all the keys that it sees, to rounding: parts are merged
    by their log-sum-exps in float32 (Milakov and Gimelshein, 2018), and each part's gradient comes of the merged
    output and LSE.

    Args:
        vision: q (batch, num_heads, vision_len, head_dim), k and v (batch, num_kv_heads, vision_len, head_dim).
        text: the same with text_len tokens.
        spec: who sees whom, scale and softcap.
        layout: samples and images of a packed batch; q, k, v are then (tokens, heads, head_dim).
        dropout_p: probability of dropping an attention weight.
        return_lse: whether the log-sum-exp of each row is wanted.
        strategy: a ``MultiModalStrategy`` or its word.
        attention_strategy: an ``AttentionStrategy`` for the calls inside.

    Returns:
        (vision_out, text_out), of the shapes and dtype of the queries; with ``return_lse``
        (vision_out, text_out, vision_lse, text_lse), the LSEs (batch, num_heads, tokens) or packed
        (num_heads, tokens). A row that sees no key gives output 0, LSE -inf and gradients 0.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or devices, or a strategy that cannot serve the call.
    """
    check_type("spec", spec, MultiModalSpec)
    check_type("layout", layout, MultiModalLayout, optional=True)
    check_bool("return_lse", return_lse)
    check_probability("dropout_p", dropout_p)
    inner = parse_enum(AttentionStrategy, attention_strategy, "attention_strategy")
    vision, text = (_checked(name, qkv, layout) for name, qkv in (("vision", vision), ("text", text)))
    if layout is not None:
        layout.check(vision[0].shape[0], text[0].shape[0])
        if layout.cu_vision.device != vision[0].device:
            raise ValueError(f"layout is on {layout.cu_vision.device}; vision is on {vision[0].device}")
        vision, text = unpacked(vision), unpacked(text)
    _check_together(vision, text)
    vision, text = autocast(*vision), autocast(*text)
    call = MultiModalCall(vision, text, spec, layout, float(dropout_p), return_lse, inner.value)
    kernel = resolve("multimodal_attention", spec, _traits(call), strategy)
    vision_out, vision_lse, text_out, text_lse = kernel.function(call)
    if layout is not None:
        vision_out, text_out = (out[0].transpose(0, 1) for out in (vision_out, text_out))
        vision_lse, text_lse = (None if lse is None else lse[0] for lse in (vision_lse, text_lse))
    if return_lse:
        return vision_out, text_out, vision_lse, text_lse
    return vision_out, text_out


def _checked(name: str, qkv: QKV, layout: MultiModalLayout | None) -> QKV:
    """The three tensors of a modality, which agree with each other."""
    if not isinstance(qkv, (tuple, list)) or len(qkv) != 3:
        raise TypeError(f"{name} is {type(qkv).__name__}; allowed: the tuple (q, k, v)")
    dims, words = (4, "(batch, heads, tokens, head_dim)") if layout is None else (3, "(tokens, heads, head_dim)")
    for letter, tensor in zip("qkv", qkv, strict=True):
        check_layout(f"{name}'s {letter}", tensor, dims, words)
    q, k, v = qkv
    tokens = 2 if layout is None else 0
    for letter, tensor in (("k", k), ("v", v)):
        if tensor.shape[tokens] != q.shape[tokens]:
            raise ValueError(
                f"{name}'s {letter} has {tensor.shape[tokens]} tokens; its q has {q.shape[tokens]}, they must be equal"
            )
    return q, k, v


def _check_together(vision: QKV, text: QKV) -> None:
    """Raises unless both modalities have the same rows, heads, dtype and device; the calls check the rest."""
    for letter, one, other in zip("qkv", vision, text, strict=True):
        if one.shape[0] != other.shape[0]:
            raise ValueError(f"vision's {letter} has batch {one.shape[0]} and text's {other.shape[0]}; must be equal")
        if one.shape[1] != other.shape[1] or one.shape[3] != other.shape[3]:
            raise ValueError(
                f"vision's {letter} has {one.shape[1]} heads of {one.shape[3]} and text's {other.shape[1]} of "
                f"{other.shape[3]}; they must be equal"
            )
        if one.dtype != other.dtype or one.device != other.device:
            raise TypeError(
                f"vision's {letter} is {one.dtype} on {one.device} and text's {other.dtype} on {other.device}; "
                "they must be equal"
            )
    q, k, _ = vision
    if q.shape[3] != k.shape[3] or not q.shape[3]:
        raise ValueError(f"k has head_dim {k.shape[3]}; q has {q.shape[3]}, they must be equal and at least 1")
    if not k.shape[1] or q.shape[1] % k.shape[1] or vision[2].shape[1] != k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads, k {k.shape[1]} and v {vision[2].shape[1]}; the first must be a multiple of the "
            "others, which are equal"
        )


def _traits(call: MultiModalCall) -> MultiModalTraits:
    q, k, v = call.vision
    text_len = call.text[0].shape[2]
    tensors = (*call.vision, *call.text)
    layout = call.layout
    samples = 0 if layout is None else layout.samples
    return MultiModalTraits(
        device_type=q.device.type,
        dtype=q.dtype,
        batch=q.shape[0],
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        vision_len=q.shape[2],
        text_len=text_len,
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        samples=samples,
        images=0 if layout is None else samples if layout.cu_images is None else layout.cu_images.numel() - 1,
        packed_pairs=None if layout is None else _pairs(call.spec, layout, q.shape[2], text_len),
        attention_strategy=call.attention_strategy,
        dropout=call.dropout_p > 0.0,
        need_lse=call.need_lse,
        requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        contiguous=all(t.is_contiguous() for t in tensors),
    )


def _pairs(
    spec: MultiModalSpec, layout: MultiModalLayout, vision_len: int, text_len: int
) -> tuple[float, float, float] | None:
    """Pairs of a head that vision over itself, text over itself and vision with text make; None while tracing."""
    images, text, vision = layout.images, layout.cu_text, layout.cu_vision
    counted = (
        seen_pairs(spec.full, Overlays(images, images), (1, 1, vision_len, vision_len)),
        seen_pairs(spec.text, Overlays(text, text), (1, 1, text_len, text_len)),
        seen_pairs(spec.full, Overlays(text, vision), (1, 1, text_len, vision_len)),
    )
    of_vision, of_text, across = counted
    if of_vision is None or of_text is None or across is None:
        return None
    return of_vision, of_text, across
