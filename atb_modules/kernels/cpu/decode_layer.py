"""One token through a whole decoder layer in one native call: the plan that holds its pointers and workspace."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from . import library, structs
from .library_ops import check_same, check_vector, pointer

MAX_BATCH = 16


@dataclass(frozen=True, eq=False)
class DecodeWeights:
    """The weights of one layer, matrices (out, in) contiguous in one of float32, bfloat16, float16.

    ``qkv`` holds the rows of q, then k, then v; ``gate_up`` those of the gate, then of the other factor. Biases, norm
    weights and sinks are float32. ``attn_norm`` and ``mlp_norm`` stand before the two branches, the post norms (a
    sandwich layer) behind them.
    """

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    attn_norm: Tensor
    mlp_norm: Tensor
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    attn_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class DecodeSettings:
    """What the layer computes beyond its weights: head counts, norm, rotary layout, mask and activation.

    ``left`` is the inclusive window to the left, None for unbounded; ``softcap`` None for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    eps: float
    weight_offset: float = 0.0
    scale: float | None = None
    softcap: float | None = None
    left: int | None = None
    interleaved: bool = False
    activation: str = "silu"


def _check_weights(weights: DecodeWeights, settings: DecodeSettings) -> tuple[int, int]:
    """(hidden size, intermediate size); raises where shapes, dtypes or strides do not fit."""
    heads, kv_heads, head_dim = settings.num_heads, settings.num_kv_heads, settings.head_dim
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {heads} and {kv_heads}")
    if settings.rotary_dim % 2 or not 0 <= settings.rotary_dim <= head_dim:
        raise ValueError(f"rotary_dim must be even and at most head_dim {head_dim}, got {settings.rotary_dim}")
    if settings.activation not in structs.ACTIVATIONS:
        raise ValueError(f"activation must be one of {tuple(structs.ACTIVATIONS)}, got {settings.activation!r}")
    hidden, intermediate = weights.qkv.shape[1], weights.down.shape[1]
    library.dtype_code("qkv", weights.qkv.dtype)
    shapes = {
        "qkv": ((heads + 2 * kv_heads) * head_dim, hidden),
        "o": (hidden, heads * head_dim),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
    }
    for name, shape in shapes.items():
        matrix = getattr(weights, name)
        check_same(name, matrix, "the layer", shape, weights.qkv.dtype)
        if not matrix.is_contiguous() or matrix.device.type != "cpu":
            raise ValueError(f"{name} must be contiguous on the CPU, got {matrix.stride()} on {matrix.device}")
    vectors = {
        "attn_norm": hidden,
        "mlp_norm": hidden,
        "attn_post_norm": hidden,
        "mlp_post_norm": hidden,
        "q_norm": head_dim,
        "k_norm": head_dim,
        "sinks": heads,
        "qkv_bias": shapes["qkv"][0],
        "o_bias": hidden,
        "gate_up_bias": 2 * intermediate,
        "down_bias": hidden,
    }
    for name, size in vectors.items():
        vector = getattr(weights, name)
        check_vector(name, vector, size)
        if vector is not None and (vector.dtype != torch.float32 or not vector.is_contiguous()):
            raise TypeError(f"{name} must be contiguous float32, got {vector.dtype} with strides {vector.stride()}")
    return hidden, intermediate


class DecodeLayerPlan:
    """The native call of one layer, built once: weights, pages and workspace stay where they are between calls.

    Args:
        weights, settings: the layer.
        k_pages, v_pages: (num_pages, num_kv_heads, page_size, head_dim), contiguous, one of the three dtypes; written
            by every call.
        max_batch: the largest number of rows of a call, at most 16.

    Raises:
        ValueError, TypeError: a tensor does not fit; the message names it. RuntimeError: no native library.
    """

    def __init__(
        self,
        weights: DecodeWeights,
        settings: DecodeSettings,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        max_batch: int = 1,
    ) -> None:
        if not 1 <= max_batch <= MAX_BATCH:
            raise ValueError(f"max_batch must be between 1 and {MAX_BATCH}, got {max_batch}")
        hidden, intermediate = _check_weights(weights, settings)
        expected = (k_pages.shape[0], settings.num_kv_heads, k_pages.shape[2], settings.head_dim)
        check_same("k_pages", k_pages, "the layer", expected, k_pages.dtype)
        check_same("v_pages", v_pages, "k_pages", k_pages.shape, k_pages.dtype)
        if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
            raise ValueError("k_pages and v_pages must be contiguous")
        # The plan keeps the tensors alive whose addresses it holds.
        self.weights, self.settings, self.max_batch = weights, settings, max_batch
        self.k_pages, self.v_pages = k_pages, v_pages
        self._function = library.get().atb_decode_layer
        w = weights
        self._args = structs.DecodeArgs(
            *(pointer(t.detach()) for t in (w.qkv, w.o, w.gate_up, w.down)),
            *(pointer(t) for t in (w.qkv_bias, w.o_bias, w.gate_up_bias, w.down_bias)),
            *(pointer(t) for t in (w.attn_norm, w.attn_post_norm, w.mlp_norm, w.mlp_post_norm)),
            *(pointer(t) for t in (w.q_norm, w.k_norm, w.sinks, k_pages, v_pages)),
        )
        args = self._args
        args.hidden_size, args.intermediate_size = hidden, intermediate
        args.heads, args.kv_heads, args.head_dim = settings.num_heads, settings.num_kv_heads, settings.head_dim
        args.half, args.page_size = settings.rotary_dim // 2, k_pages.shape[2]
        args.left = -1 if settings.left is None else settings.left
        args.eps, args.weight_offset = settings.eps, settings.weight_offset
        args.scale = settings.head_dim**-0.5 if settings.scale is None else settings.scale
        args.softcap = settings.softcap or 0.0
        args.weight_dtype = structs.DTYPES[weights.qkv.dtype]
        args.page_dtype = library.dtype_code("k_pages", k_pages.dtype)
        args.interleaved = settings.interleaved
        args.activation = structs.ACTIVATIONS[settings.activation]
        self._reference = ctypes.byref(args)
        self._workspace_threads = 0
        self._workspace = torch.empty(0)

    @property
    def arguments(self) -> structs.DecodeArgs:
        """The arguments of the native call, but for what changes from step to step."""
        return self._args

    def share_workspace(self, other: DecodeLayerPlan) -> None:
        """Uses another plan's workspace: layers of one model run one after the other and need only one."""
        self._ensure_workspace(torch.get_num_threads())
        other._ensure_workspace(torch.get_num_threads())
        if other._workspace.numel() >= self._workspace.numel():
            self._workspace = other._workspace
            self._args.workspace = self._workspace.data_ptr()

    def _ensure_workspace(self, threads: int) -> None:
        if threads == self._workspace_threads:
            return
        self._args.batch, self._args.threads = self.max_batch, threads
        floats = library.get().atb_decode_workspace(self._reference)
        if self._workspace.numel() < floats:
            self._workspace = torch.empty(floats, dtype=torch.float32)
        self._args.workspace = self._workspace.data_ptr()
        self._workspace_threads = threads

    def run(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, block_table: Tensor, kv_lengths: Tensor
    ) -> None:
        """Updates hidden (batch, hidden_size) float32 in place; trusts its inputs, which all layers of a step share.

        cos and sin (batch, rotary_dim / 2) float32, slots (batch,) int64 (-1: not written), block_table
        (batch, max_blocks) int32, kv_lengths (batch,) int32 with the new token counted; all contiguous.
        """
        batch = hidden.shape[0]
        if batch > self.max_batch:
            raise ValueError(f"hidden must have at most max_batch {self.max_batch} rows, got {batch}")
        threads = torch.get_num_threads()
        if threads != self._workspace_threads:
            self._ensure_workspace(threads)
        args = self._args
        args.hidden, args.cos, args.sin = hidden.data_ptr(), cos.data_ptr(), sin.data_ptr()
        args.slots, args.block_table = slots.data_ptr(), block_table.data_ptr()
        args.kv_lengths = kv_lengths.data_ptr()
        args.batch, args.max_blocks, args.threads = batch, block_table.shape[1], threads
        self._function(self._reference)
