"""How a spec is said to the fused attentions: mask polarity, compressed masks, modes, tokens, lengths. One place each.

``npu_fusion_attention`` and ``npu_fused_infer_attention_score_v2`` agree on these rules of their documentation:

* a mask's True (1) takes *no* part: the opposite of ours;
* modes 2 (causal, aligned at the upper left), 3 (causal, aligned at the lower right) and 4 (band) take one compressed
  2048 x 2048 mask, the upper triangle, whatever the sizes;
* without a mask the mode and the tokens are ignored in silence, and everything attends to everything;
* in mode 4 a query sees ``pre`` keys before and ``next`` keys after it, counted from the lower right corner;
* lengths of packed sequences are cumulative, without the leading 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atb_modules.kernels.ascend.derived import constant
from atb_modules.kernels.torch.attention import bias_and_visible
from atb_modules.overlays import Overlays
from atb_modules.reach import reach
from atb_modules.spec import AttentionSpec, Causal

#: edge of the compressed mask
COMPRESSED = 2048
#: "no limit", as the operators say it
UNLIMITED = 2147483647
#: elements of a full mask above which a call is refused: it would take as many bytes
LARGEST_MASK = 2**28


@dataclass(frozen=True, eq=False)
class Structure:
    """What hides keys, as the operators take it.

    Args:
        mask: bool, True = hidden; the compressed triangle, a full mask, or None where everything is seen.
        mode: ``sparse_mode``.
        before, after: ``pre_tockens`` and ``next_tockens``.
        bias: what is added to the scaled scores, or None.
        visible: of a full mask, the same with True = seen.
    """

    mask: Tensor | None = None
    mode: int = 0
    before: int = UNLIMITED
    after: int = UNLIMITED
    bias: Tensor | None = None
    visible: Tensor | None = None


def triangle(device: torch.device) -> Tensor:
    """The compressed mask: bool (2048, 2048), True above the diagonal; one a device, made once."""

    def make() -> Tensor:
        return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)

    return constant("triangle", device, make)


def compressible(spec: AttentionSpec, q_len: int, kv_len: int, packed: bool = False) -> bool:
    """Whether the structure alone has a mode of its own; the rest needs a mask of q_len by kv_len."""
    if spec.has_overlays or spec.block_size is not None:
        return False
    if spec.causal is Causal.TOP_LEFT and (packed or q_len != kv_len):
        return spec.window is None and not packed
    return True


def structure_of(
    spec: AttentionSpec,
    q: Tensor,
    kv_len: int,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    overlays: Overlays | None = None,
) -> Structure:
    """The structure of a call; q (batch, heads, q_len, head_dim). Segments of ``overlays`` are said by lengths."""
    q_len = q.shape[2]
    packed = overlays is not None and overlays.cu_seqlens_q is not None
    bare = mask is None and alibi_slopes is None and (overlays is None or (overlays.image_ids is None))
    if bare and compressible(spec, q_len, kv_len, packed):
        if not spec.masks_keys:
            return Structure()
        if spec.window is None:
            lower_right = spec.causal is Causal.BOTTOM_RIGHT or q_len == kv_len
            return Structure(triangle(q.device), 3 if lower_right else 2)
        before, after = (UNLIMITED if side is None else side for side in (spec.left, spec.right))
        return Structure(triangle(q.device), 4, before, after)
    bias, visible = bias_and_visible(spec, q, kv_len, mask, alibi_slopes, overlays)
    if bias is not None:
        hidden = bias.isneginf()
        visible = ~hidden if visible is None else visible & ~hidden
        bias = bias.masked_fill(hidden, 0.0)
    if visible is None:
        return Structure(bias=bias)
    visible = visible[(None,) * (4 - visible.dim())]
    if visible.shape[1] == 1:
        visible = visible.expand(q.shape[0] if visible.shape[0] > 1 else 1, 1, q_len, kv_len)
    else:
        visible = visible.expand(q.shape[0], q.shape[1], q_len, kv_len)
    return Structure((~visible).contiguous(), 0, UNLIMITED, UNLIMITED, bias, visible)


def empty_rows(
    spec: AttentionSpec, structure: Structure, q_len: int, kv_len: int, overlays: Overlays | None, device: torch.device
) -> Tensor | None:
    """Which queries see no key, bool broadcasting to (batch, heads, q_len); None where each sees one for certain."""
    if structure.visible is not None:
        return ~structure.visible.any(-1)
    if structure.mask is None and overlays is None:
        return None
    if overlays is None and q_len <= kv_len and (spec.right is None or spec.right >= 0) and spec.left is None:
        return None
    low, high, far_low, far_high, _ = reach(spec, q_len, kv_len, overlays, device).unbind(-1)
    return ((high <= low) & (far_high <= far_low)).unsqueeze(1)
