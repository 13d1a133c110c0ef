"""int8 keys and values of npu_fused_infer_attention_score_v2: which scales go with them, and what they stand for.

Only the modes of a scale for each token and head are emulated: 3 ("per-token with per-head") and 5 (the same, "managed
by page attention").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.errors import NoReferenceError

BY_TOKEN_AND_HEAD, BY_PLACE_AND_HEAD = 3, 5


@dataclass
class Codes:
    """``dequant_scale_key``, ``dequant_scale_value`` and their modes."""

    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    key_mode: int = 0
    value_mode: int = 0

    @property
    def given(self) -> bool:
        return self.key_scale is not None or self.value_scale is not None

    def check_dtypes(self, key: Tensor, value: Tensor) -> None:
        """ "dequant_scale_key and dequant_scale_value are both empty, or neither is"; "of one shape"."""
        both = self.key_scale is not None and self.value_scale is not None
        require(not self.given or both, "dequant_scale_key and dequant_scale_value come together")
        if not self.given:
            require(key.dtype != torch.int8 and value.dtype != torch.int8, "int8 needs dequant_scale_key and _value")
            return
        assert self.key_scale is not None and self.value_scale is not None
        if key.dtype != torch.int8 or value.dtype != torch.int8:
            raise NoReferenceError("npu_fused_infer_attention_score_v2: scales for others than int8 are not emulated")
        require(self.key_mode == self.value_mode, "key_quant_mode and value_quant_mode must agree")
        if self.key_mode not in (BY_TOKEN_AND_HEAD, BY_PLACE_AND_HEAD):
            raise NoReferenceError(
                f"npu_fused_infer_attention_score_v2: key_quant_mode {self.key_mode} is not emulated"
            )
        require(self.key_scale.shape == self.value_scale.shape, "the scales of key and value must have one shape")
        for name, scale in (("dequant_scale_key", self.key_scale), ("dequant_scale_value", self.value_scale)):
            require(scale.dtype == torch.float32, f"{name} is {scale.dtype}; float32 in mode {self.key_mode}")
            require(scale.is_contiguous(), f"{name} is not contiguous")

    def check_call(
        self, layout: str, longest_q: int, key: Tensor, kv_heads: int, table: Tensor | None, mask: Tensor | None
    ) -> None:
        """Docs of torch_npu: "A2 and A3: where Q_S > 1, key_quant_mode is 0 or 1"; "page attention does not support
        pseudo-quantisation (Q_S > 1)"; "where Q_S is 1, block_size in steps of 32 for int8"; "mode 3: both of shape (B,
        KV_N, KV_S), float32"; "mode 5: (blocknum, KV_N, blocksize), float32".

        aclnnFusedInferAttentionScoreV5, of all products: "int8: the layout of query is not TND"; "Q_S > 1: int8 does
        not support modes 2, 3, 4, 5"; "with page attention the last axis of the scale is at least maxBlockNumPerBatch
        * blockSize"; "blockSize up to 512"; "where Q_S is 1, attenMask has 3 or 4 dims". The longer queries that
        torch_npu's page allows on the 950 are left out here, since the other page forbids them.
        """
        assert self.key_scale is not None
        require(layout not in ("TND", "NTD"), f"{layout} does not go with int8 keys and values")
        require(longest_q == 1, f"Q_S is {longest_q}; modes 3 and 5 take one query")
        require(mask is None or mask.dim() in (3, 4), "atten_mask has 3 or 4 dims where keys are int8 and Q_S is 1")
        shape = tuple(self.key_scale.shape)
        if table is None:
            require(self.key_mode == BY_TOKEN_AND_HEAD, "mode 5 is of pages")
            rows, columns = key.shape[0], key.shape[2 if layout == "BNSD" else 1]
        else:
            if key.dim() != 4:
                raise NoReferenceError("npu_fused_infer_attention_score_v2: int8 pages by H are not emulated")
            blocks, heads, size, _ = key.shape
            require(size % 32 == 0 and size <= 512, f"block_size is {size}; for int8 a multiple of 32 up to 512")
            rows, columns = table.shape[0], table.shape[1] * size
            if self.key_mode == BY_PLACE_AND_HEAD:
                require(shape == (blocks, heads, size), f"scales have shape {shape}; ({blocks}, {heads}, {size})")
                return
        fits = len(shape) == 3 and shape[:2] == (rows, kv_heads) and shape[2] >= columns
        require(fits, f"scales have shape {shape}; ({rows}, {kv_heads}, at least {columns})")

    def dequantised(
        self, keys: list[Tensor], values: list[Tensor], table: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Sequences (N, S, D) of codes as what they stand for: code * scale, no offset."""
        assert self.key_scale is not None and self.value_scale is not None
        scaled = []
        for scale, sequences in ((self.key_scale, keys), (self.value_scale, values)):
            rows = []
            for place, codes in enumerate(sequences):
                if self.key_mode == BY_PLACE_AND_HEAD:
                    assert table is not None
                    own = scale[table[place].long().clamp(min=0)].transpose(0, 1).flatten(1)
                else:
                    own = scale[place]
                rows.append(codes.float() * own[:, : codes.shape[1], None])
            scaled.append(rows)
        return scaled[0], scaled[1]
