"""The inputs of npu_fused_infer_attention_score_v2: documented rules, layouts, lengths and pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.references.attention_math import (
    require_compressed,
    require_cumulative,
    split_sequences,
)
from atb_modules.testing.npu.references.infer_codes import Codes
from atb_modules.testing.npu.references.pages import gather_pages
from atb_modules.testing.npu.references.rules import (
    HALVES,
    require_contiguous,
    require_dtype,
    require_not_310p,
    require_same_dtype,
)

#: input_layout -> layouts of the inputs and of the output
LAYOUTS = {
    "BSH": ("BSH", "BSH"), "BSND": ("BSND", "BSND"), "BNSD": ("BNSD", "BNSD"), "TND": ("TND", "TND"),
    "BNSD_BSND": ("BNSD", "BSND"), "BSH_NBSD": ("BSH", "NBSD"), "BSND_NBSD": ("BSND", "NBSD"),
    "BNSD_NBSD": ("BNSD", "NBSD"), "TND_NTD": ("TND", "NTD"), "NTD_TND": ("NTD", "TND"),
}  # fmt: skip
_LATENT = 512
_ROPE = 64


@dataclass
class InferInputs:
    """One call, checked when it is made.

    Raises:
        OperatorError: for a call that the documentation forbids.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_rope: Tensor | None
    key_rope: Tensor | None
    mask: Tensor | None
    lengths_q: Sequence[int] | None
    lengths_kv: Sequence[int] | None
    table: Tensor | None
    sink: Tensor | None
    heads: int
    kv_heads: int
    scale: float
    before: int
    after: int
    input_layout: str
    mode: int
    block_size: int
    inner_precise: int
    codes: Codes = field(default_factory=Codes)

    def __post_init__(self) -> None:
        require_not_310p()
        require(self.input_layout in LAYOUTS, f"input_layout is {self.input_layout!r}; supported: {', '.join(LAYOUTS)}")
        self.layout_in, self.layout_out = LAYOUTS[self.input_layout]
        self.packed = self.layout_in in ("TND", "NTD")
        require_dtype("query", self.query, HALVES)
        self.codes.check_dtypes(self.key, self.value)
        if not self.codes.given:
            require_same_dtype(query=self.query, key=self.key, value=self.value)
        require_contiguous(query=self.query, key=self.key, value=self.value, atten_mask=self.mask)
        require_contiguous(query_rope=self.query_rope, key_rope=self.key_rope)
        require((self.query_rope is None) == (self.key_rope is None), "query_rope and key_rope come together")
        self._read_sizes()
        self._read_lengths()
        self._check_heads()
        if self.table is not None:
            self._check_pages()
        if self.query_rope is not None:
            self._check_rope()
        elif self.packed:
            self._check_packed()
        self._check_mode()
        self._check_sink()
        if self.codes.given:
            self.codes.check_call(self.layout_in, self.longest_q, self.key, self.kv_heads, self.table, self.mask)

    @property
    def effective_mode(self) -> int:
        """ "sparse_mode has no effect where Q_S is 1 and there is no rope"."""
        return 0 if self.longest_q == 1 and not self.packed and self.query_rope is None else self.mode

    def sequences(self) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
        """(query, key, value, valid query rows) of each sequence; the rope channels stand behind the others."""
        queries = self._queries(self.query)
        keys, values = self._keys(self.key), self._keys(self.value)
        if self.codes.given:
            keys, values = self.codes.dequantised(keys, values, self.table)
        if self.query_rope is not None and self.key_rope is not None:
            queries = [torch.cat(pair, -1) for pair in zip(queries, self._queries(self.query_rope), strict=True)]
            keys = [torch.cat(pair, -1) for pair in zip(keys, self._keys(self.key_rope), strict=True)]
        yield from zip(queries, keys, values, self.rows_q, strict=True)

    def _queries(self, tensor: Tensor) -> list[Tensor]:
        packed = tensor.transpose(0, 1) if self.layout_in == "NTD" else tensor
        layout = "TND" if self.packed else self.layout_in
        return split_sequences(packed, layout, self.heads, self.ends_q)

    def _keys(self, tensor: Tensor) -> list[Tensor]:
        if self.table is not None:
            return [
                gather_pages(tensor, self.table[place], length, self.block_size, self.kv_heads)
                for place, length in enumerate(self.rows_kv)
            ]
        packed = tensor.transpose(0, 1) if self.layout_in == "NTD" else tensor
        layout = "TND" if self.packed else self.layout_in
        whole = split_sequences(packed, layout, self.kv_heads, self.ends_kv)
        return [sequence[:, :length] for sequence, length in zip(whole, self.rows_kv, strict=True)]

    def _read_sizes(self) -> None:
        dims = {"BSH": 3, "TND": 3, "NTD": 3}.get(self.layout_in, 4)
        require(self.query.dim() == dims, f"query has {self.query.dim()} dims; {self.layout_in} takes {dims}")
        if self.layout_in == "BSH":
            require(self.query.shape[-1] % self.heads == 0, "H of query is no multiple of num_query_heads")
            self.head_dim = self.query.shape[-1] // self.heads
        else:
            self.head_dim = self.query.shape[-1]
            axis = {"BNSD": 1, "BSND": 2, "TND": 1, "NTD": 0}[self.layout_in]
            found = self.query.shape[axis]
            require(found == self.heads, f"num_query_heads is {self.heads}, query has {found} heads")
        self.total_q = self.query.shape[1 if self.layout_in == "NTD" else 0] if self.packed else 0

    def _read_lengths(self) -> None:
        """Valid rows of each sequence; cumulative in packed layouts, except of keys in pages."""
        self.ends_q: list[int] = []
        self.ends_kv: list[int] = []
        if self.packed:
            given = self.lengths_q is not None and self.lengths_kv is not None
            require(given, f"{self.input_layout} needs actual_seq_qlen and actual_seq_kvlen")
            assert self.lengths_q is not None and self.lengths_kv is not None
            require(len(self.lengths_q) <= 4096, "at most 4096 sequences in packed layouts")
            require(self.total_q <= 2**20, f"T is {self.total_q}; at most 1M")
            self.ends_q = require_cumulative("actual_seq_qlen", self.lengths_q, self.total_q)
            batch = len(self.ends_q)
            self.rows_q = [b - a for a, b in zip([0, *self.ends_q], self.ends_q, strict=False)]
            if self.table is None:
                total = self.key.shape[1 if self.layout_in == "NTD" else 0]
                self.ends_kv = require_cumulative("actual_seq_kvlen", self.lengths_kv, total)
                self.rows_kv = [b - a for a, b in zip([0, *self.ends_kv], self.ends_kv, strict=False)]
            else:
                self.rows_kv = [int(length) for length in self.lengths_kv]
            require(len(self.rows_kv) == batch, f"{batch} query sequences, {len(self.rows_kv)} key sequences")
            self.longest_q = max(self.rows_q, default=0)
            return
        batch = self.query.shape[0]
        rows = self.query.shape[2 if self.layout_in == "BNSD" else 1]
        self.longest_q = rows
        asked = None if rows == 1 else self.lengths_q  # "where Q_S is 1 the argument has no effect"
        self.rows_q = _lengths("actual_seq_qlen", asked, batch, rows)
        if self.table is None:
            require(self.key.shape[0] == batch, f"batch of query is {batch}, of key {self.key.shape[0]}")
            room = self.key.shape[2 if self.layout_in == "BNSD" else 1]
        else:
            require(self.lengths_kv is not None, "with pages, actual_seq_kvlen is required")
            room = self.table.shape[1] * self.block_size
        self.rows_kv = _lengths("actual_seq_kvlen", self.lengths_kv, batch, room)

    def _check_heads(self) -> None:
        divides = self.kv_heads > 0 and self.heads % self.kv_heads == 0
        require(divides, f"num_query_heads {self.heads} is no multiple of num_key_value_heads {self.kv_heads}")
        require(self.heads // self.kv_heads <= 64, f"heads / kv heads is {self.heads // self.kv_heads}; at most 64")
        require(self.heads <= 256, f"N is {self.heads}; at most 256")
        require(self.head_dim <= 512, f"D is {self.head_dim}; at most 512")
        if self.longest_q > 1:
            require(self.head_dim % 16 == 0, f"D is {self.head_dim}; a multiple of 16 where Q_S > 1")
            flat = self.layout_in in ("BSH", "BSND")
            require(not flat or self.heads * self.head_dim < 65535, "N * D must be below 65535 in BSH and BSND")
        require(not (self.input_layout == "BNSD_BSND" and self.longest_q == 1), "BNSD_BSND takes Q_S > 1 only")
        if self.table is None:
            axis = {"BNSD": 1, "BSND": 2, "TND": 1, "NTD": 0}.get(self.layout_in)
            width = self.key.shape[-1] // self.head_dim if axis is None else self.key.shape[axis]
            require(width == self.kv_heads, f"num_key_value_heads is {self.kv_heads}, key has {width} heads")
        same = self.key.shape == self.value.shape or (self.packed and self.key.shape[:-1] == self.value.shape[:-1])
        require(same, "key and value must have the same shape")

    def _check_pages(self) -> None:
        assert self.table is not None
        table, size = self.table, self.block_size
        require(table.dtype == torch.int32, f"block_table is {table.dtype}; int32")
        require(table.dim() == 2 and table.shape[0] == len(self.rows_kv), "block_table must be (batch, max_blocks)")
        wide = self.key.dim() == 4
        require(self.key.dim() in (3, 4), "pages are (blocks, block_size, H) or (blocks, kv heads, block_size, D)")
        axis = 2 if wide else 1
        require(self.key.shape[axis] == size, f"block_size is {size}, the pages hold {self.key.shape[axis]}")
        takes_wide = self.layout_in in ("BNSD", "TND")
        require(takes_wide or not wide, f"{self.layout_in} takes pages (blocks, block_size, H) only")
        if wide:
            require(self.key.shape[1] == self.kv_heads, "axis 1 of the pages must be num_key_value_heads")
        else:
            require(self.key.shape[-1] <= 65535, f"H is {self.key.shape[-1]}; at most 65535 in (blocks, block_size, H)")
        if self.query_rope is not None:
            require(size in (16, 128), f"block_size is {size}; 16 or 128 with query_rope")
        elif self.longest_q > 1:
            good = size % 128 == 0 and 128 <= size <= 512
            require(good, f"block_size is {size}; where Q_S > 1, a multiple of 128 from 128 to 512")
        else:
            require(size % 16 == 0 and 16 <= size <= 512, f"block_size is {size}; a multiple of 16 up to 512")
        needed = [-(-length // size) for length in self.rows_kv]
        require(table.shape[1] >= max(needed, default=0), "block_table has too few columns for the longest sequence")
        require(self.key.shape[0] >= sum(needed), f"{self.key.shape[0]} blocks; the sequences have {sum(needed)}")
        require(self.key.numel() < 2**31, "pages of more elements than int32 counts are not supported")

    def _check_rope(self) -> None:
        assert self.query_rope is not None and self.key_rope is not None
        require_same_dtype(query=self.query, query_rope=self.query_rope)
        require_same_dtype(key=self.key, key_rope=self.key_rope)
        require(self.head_dim in (128, _LATENT), f"D is {self.head_dim}; 128 or 512 with query_rope")
        per_head = self.query_rope.shape[-1] // (self.heads if self.layout_in == "BSH" else 1)
        require(per_head == _ROPE, f"query_rope has D {per_head}; 64")
        if self.head_dim == 128:
            require(self.input_layout in ("TND", "NTD_TND"), "D 128 with query_rope takes TND and NTD_TND")
            require(self.table is None, "D 128 with query_rope does not support pages")
            return
        require(self.input_layout not in ("NTD_TND", "BNSD_BSND"), f"D 512 does not support {self.input_layout}")
        require(self.table is not None, "D 512 with query_rope needs pages")
        require(self.longest_q <= 16, f"Q_S is {self.longest_q}; 1 to 16 with D 512")
        powers = self.heads & (self.heads - 1) == 0 and self.heads <= 128
        require(powers and self.kv_heads == 1, "D 512 takes 1, 2, 4, ... 128 query heads and 1 key head")

    def _check_packed(self) -> None:
        """ "TND where D of query is not 512": bfloat16; D 128, or 192 with D of value 128 or 192."""
        require(self.input_layout in ("TND", "NTD_TND"), f"{self.input_layout} needs D 512 with query_rope")
        require(self.query.dtype == torch.bfloat16, f"query is {self.query.dtype}; packed layouts take bfloat16 only")
        value_dim = self.head_dim if self.table is not None else self.value.shape[-1]
        good = (self.head_dim, value_dim) in ((128, 128), (192, 128), (192, 192))
        require(good, f"D is {self.head_dim}, of value {value_dim}; packed layouts take 128, 192 with 128, 192")

    def _check_mode(self) -> None:
        require(self.mode in (0, 1, 2, 3, 4), f"sparse_mode is {self.mode}; supported: 0 to 4")
        require(self.inner_precise in (0, 1, 2, 3), f"inner_precise is {self.inner_precise}; 0 to 3")
        if self.longest_q == 1 and not self.packed:
            require(self.inner_precise in (0, 1), "where Q_S is 1, inner_precise is 0 or 1")
        if self.mask is not None:
            dtypes = (torch.bool, torch.int8, torch.uint8)
            require(self.mask.dtype in dtypes, f"atten_mask is {self.mask.dtype}; bool, int8 or uint8")
        mode = self.effective_mode
        if self.packed or self.query_rope is not None:
            plain = mode == 0 and self.mask is None
            masked = mode in ((3,) if self.query_rope is not None else (3, 4)) and self.mask is not None
            require(plain or masked, f"sparse_mode {mode} is 0 without atten_mask, or 3 (or 4) with it, in this layout")
        if mode in (2, 3, 4):
            require_compressed(self.mask, mode)
        elif mode == 1:
            require(self.mask is not None, "sparse_mode 1 needs atten_mask")
        if mode == 3 and self.packed:
            longer = [place for place, (q, k) in enumerate(zip(self.rows_q, self.rows_kv, strict=True)) if q > k]
            require(not longer, f"sparse_mode 3 in packed layouts: sequence {longer[:1]} has more queries than keys")
        if mode in (0, 1) and self.mask is not None:
            self._check_full_mask(mode)

    def _check_full_mask(self, mode: int) -> None:
        assert self.mask is not None
        shape, rows, columns = tuple(self.mask.shape), self.longest_q, max(self.rows_kv, default=0)
        batch = len(self.rows_q)
        if self.table is not None:
            columns = self.table.shape[1] * self.block_size
        if len(shape) == 2:
            fits = shape[0] == batch if rows == 1 else shape[0] >= rows
        else:
            fits = shape[-2] >= rows and shape[:-2] in ((1,), (1, 1), (batch, 1))
        enough = fits and shape[-1] >= columns
        require(enough, f"atten_mask has shape {shape}; Q_S is {rows}, KV_S {columns}, B {batch}")
        if rows > 1 and mode == 0 and (self.before < 2**30 or self.after < 2**30):
            i, j = torch.arange(rows)[:, None], torch.arange(columns)[None]
            outside = (j - i > self.after) | (j - i < -self.before)
            agrees = bool((self.mask[..., :rows, :columns].bool() | ~outside).all())
            require(agrees, "atten_mask shows pairs outside pre_tokens and next_tokens; the two must agree in mode 0")

    def _check_sink(self) -> None:
        if self.sink is None:
            return
        require(self.sink.dtype == torch.bfloat16, f"learnable_sink is {self.sink.dtype}; bfloat16")
        require(tuple(self.sink.shape) == (self.heads,), "learnable_sink must have shape (num_query_heads,)")
        require(self.input_layout in ("TND", "NTD_TND"), "learnable_sink is supported in TND and NTD_TND only")
        value_dim = self.head_dim if self.table is not None else self.value.shape[-1]
        require(value_dim <= 128, f"D of value is {value_dim}; at most 128 with learnable_sink")


def _lengths(name: str, given: Sequence[int] | None, batch: int, room: int) -> list[int]:
    """ "A length of 1 serves every batch; of at least B, the first B are taken; others are not supported"."""
    if given is None:
        return [room] * batch
    require(len(given) == 1 or len(given) >= batch, f"{name} has {len(given)} entries for {batch} sequences")
    lengths = [int(given[0])] * batch if len(given) == 1 else [int(length) for length in given[:batch]]
    worst = max(lengths, default=0)
    require(worst <= room, f"{name} holds {worst}, there is room for {room} (are these cumulative?)")
    require(min(lengths, default=0) >= 0, f"{name} holds a negative length")
    return lengths
