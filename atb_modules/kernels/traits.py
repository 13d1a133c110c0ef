"""What a kernel may know of a call before it runs: shapes, dtypes, device and needs, as frozen data.

Traits are built by the functional fronts, read by ``reasons()`` and ``cost()``, and never hold a tensor.
Sizes may be symbolic while torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def count(sizes: Sequence[int]) -> int:
    """Product of sizes that may be symbolic; ``torch.Size.numel`` would fix them to numbers."""
    product = 1
    for size in sizes:
        product = product * size
    return product


def under_autocast(device_type: str) -> bool:
    """Whether autocast is on for this device; meta tensors have none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements share memory (an expanded axis), so that nothing can be written in place."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass(frozen=True)
class AttentionTraits:
    """A dense call: q (batch, num_heads, q_len, head_dim) over k, v (batch, num_kv_heads, kv_len, head_dim)."""

    device_type: str
    dtype: torch.dtype
    batch: int
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    mask: str = "none"  # "none", "bool" or "float"
    mask_elements: int = 0
    has_sinks: bool = False
    has_alibi: bool = False
    segments: int = 0  # sequences of a packed batch
    has_images: bool = False
    has_block_mask: bool = False
    seen: float | None = None  # query-key pairs that the structure leaves, all heads and rows; None: not counted
    dropout: bool = False
    need_lse: bool = False
    requires_grad: bool = False
    bias_requires_grad: bool = False  # the mask's or the slopes' gradient is wanted
    contiguous: bool = True

    @property
    def has_overlays(self) -> bool:
        return bool(self.segments or self.has_images or self.has_block_mask)

    @property
    def pairs(self) -> float:
        """All query-key pairs, hidden ones included."""
        return 1.0 * self.batch * self.num_heads * self.q_len * self.kv_len

    @property
    def bytes(self) -> float:
        """Of q, k, v and the output."""
        queries = self.num_heads * self.q_len * (self.head_dim + self.value_dim)
        keys = self.num_kv_heads * self.kv_len * (self.head_dim + self.value_dim)
        return 1.0 * self.batch * (queries + keys) * self.dtype.itemsize


@dataclass(frozen=True)
class MultiModalTraits:
    """Vision and text tokens, each with q, k and v; dense rows of a batch, or (batch 1) packed samples."""

    device_type: str
    dtype: torch.dtype
    batch: int
    num_heads: int
    num_kv_heads: int
    vision_len: int
    text_len: int
    head_dim: int
    value_dim: int
    samples: int = 0  # of a packed batch
    images: int = 0  # of a packed batch
    #: a packed batch: query-key pairs of a head that vision over itself, text over itself, and vision with text make
    packed_pairs: tuple[float, float, float] | None = None
    attention_strategy: str = "auto"  # of the calls inside
    dropout: bool = False
    need_lse: bool = False
    requires_grad: bool = False
    contiguous: bool = True


@dataclass(frozen=True)
class PagedAttentionTraits:
    """Packed queries (total, num_heads, head_dim) over pages (num_pages, num_kv_heads, page_size, head_dim)."""

    device_type: str
    dtype: torch.dtype
    page_dtype: torch.dtype
    batch: int
    total: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_blocks: int
    latent_dim: int = 0  # the values are so many first channels of the keys, one tensor of pages; 0: two tensors
    has_sinks: bool = False
    has_alibi: bool = False
    need_lse: bool = False
    requires_grad: bool = False
    contiguous: bool = True


@dataclass(frozen=True)
class NormTraits:
    """Rows of ``width`` elements, normalised each; ``fused_add`` adds a residual first."""

    device_type: str
    dtype: torch.dtype
    rows: int
    width: int
    fused_add: bool = False
    requires_grad: bool = False
    contiguous: bool = True


@dataclass(frozen=True)
class ActivationTraits:
    """Rows of ``width`` gate elements (and as many up elements)."""

    device_type: str
    dtype: torch.dtype
    kind: str
    rows: int
    width: int
    requires_grad: bool = False
    contiguous: bool = True


@dataclass(frozen=True)
class MoETraits:
    """``tokens`` rows of hidden_size channels, each through ``top_k`` of ``num_experts`` feed-forwards."""

    device_type: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gated: bool = True
    grouped_products: bool = False  # one launch serves all experts, whatever the routing
    requires_grad: bool = False
    autocast: bool = False
    contiguous: bool = True

    @property
    def expert_weights(self) -> float:
        """Elements of the matrices of one expert."""
        return (3.0 if self.gated else 2.0) * self.hidden_size * self.intermediate_size


@dataclass(frozen=True)
class MLPChainTraits:
    """``rows`` of hidden_size channels through a feed-forward, onto the residual stream and through a norm."""

    device_type: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    rows: int
    hidden_size: int
    intermediate_size: int
    gated: bool = True
    dropout: bool = False
    requires_grad: bool = False
    autocast: bool = False
    contiguous: bool = True

    @property
    def weights(self) -> float:
        """Elements of the matrices."""
        return (3.0 if self.gated else 2.0) * self.hidden_size * self.intermediate_size


@dataclass(frozen=True)
class LinearTraits:
    """x (rows, in_features) times weight (out_features, in_features) transposed."""

    device_type: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    rows: int
    in_features: int
    out_features: int
    has_bias: bool = False
    weight_contiguous: bool = True
    requires_grad: bool = False
    autocast: bool = False
    contiguous: bool = True


@dataclass(frozen=True)
class QuantizedLinearTraits:
    """x (rows, in_features) times int8 codes (out_features, in_features) transposed, with float32 scales."""

    device_type: str
    dtype: torch.dtype
    rows: int
    in_features: int
    out_features: int
    group: int = 0  # input channels that share a scale; 0: all channels of an output
    has_bias: bool = False
    requires_grad: bool = False
    contiguous: bool = True

    @property
    def operations(self) -> float:
        """Of the product."""
        return 2.0 * self.rows * self.in_features * self.out_features

    @property
    def bytes(self) -> float:
        """Of codes, scales, x and the output, each once."""
        codes = 1.0 * self.in_features * self.out_features
        scales = 4.0 * self.out_features * (self.in_features // self.group if self.group else 1)
        return codes + scales + 1.0 * self.rows * (self.in_features + self.out_features) * self.dtype.itemsize


@dataclass(frozen=True)
class RotaryTraits:
    """tokens x heads vectors of head_dim channels, the first rotary_dim of them rotated."""

    device_type: str
    dtype: torch.dtype
    tokens: int
    num_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    requires_grad: bool = False
    contiguous: bool = True


@dataclass(frozen=True)
class CacheAppendTraits:
    """tokens x num_kv_heads vectors written into pages; ``rotary`` rotates queries and keys on the way."""

    device_type: str
    dtype: torch.dtype
    page_dtype: torch.dtype
    tokens: int
    num_kv_heads: int
    head_dim: int
    rotary: bool = False
    requires_grad: bool = False
    contiguous: bool = True


@dataclass(frozen=True)
class DecodeTraits:
    """One token for each of ``batch`` rows through a whole layer in inference mode."""

    device_type: str
    dtype: torch.dtype
    page_dtype: torch.dtype
    batch: int
    #: what the layer is made of beyond the sizes, e.g. "norm:rmsnorm", "placement:pre"
    structure: tuple[str, ...] = ()
    requires_grad: bool = False
    contiguous: bool = True


Traits = (
    AttentionTraits
    | MultiModalTraits
    | PagedAttentionTraits
    | NormTraits
    | ActivationTraits
    | MoETraits
    | MLPChainTraits
    | LinearTraits
    | QuantizedLinearTraits
    | RotaryTraits
    | CacheAppendTraits
    | DecodeTraits
)
