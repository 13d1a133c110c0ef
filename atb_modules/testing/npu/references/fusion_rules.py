"""The inputs of npu_fusion_attention: documented rules, and what each sequence of a batch sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.errors import NoReferenceError
from atb_modules.testing.npu.references.attention_math import (
    require_compressed,
    require_cumulative,
    split_sequences,
    structure,
)
from atb_modules.testing.npu.references.rules import require_dtype, require_not_310p, require_same_dtype

LAYOUTS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}
_ALIBI_ROWS = 1024


@dataclass
class Inputs:
    """One call, checked when it is made. ``sequences`` yields what each sequence computes.

    Raises:
        OperatorError: for a call that the documentation forbids.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    head_num: int
    layout: str
    pse: Tensor | None
    mask: Tensor | None
    scale: float
    before: int
    after: int
    inner_precise: int
    prefix: Sequence[int] | None
    lengths_q: Sequence[int] | None
    lengths_kv: Sequence[int] | None
    mode: int
    softmax_layout: str
    sink: Tensor | None
    ends_q: list[int] = field(init=False, default_factory=list)
    ends_kv: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        require_not_310p()
        require(self.layout in LAYOUTS, f"input_layout is {self.layout!r}; supported: {', '.join(LAYOUTS)}")
        for name, tensor in (("query", self.query), ("key", self.key), ("value", self.value)):
            require_dtype(name, tensor)
            require(tensor.dim() == LAYOUTS[self.layout], f"{self.layout} takes {LAYOUTS[self.layout]} dims for {name}")
        require_same_dtype(query=self.query, key=self.key, value=self.value, pse=self.pse)
        require(0 <= self.mode <= 8, f"sparse_mode is {self.mode}; supported: 0 to 8")
        require(self.inner_precise in (0, 1, 2), f"inner_precise is {self.inner_precise}; supported: 0, 1, 2")
        self._check_lengths()
        self._check_sizes()
        self._check_mask()
        self._check_extras()

    @property
    def packed(self) -> bool:
        return self.layout == "TND"

    @property
    def kv_heads(self) -> int:
        """Heads of key and value, which BSH and SBH carry in their width."""
        if self.layout in ("BSH", "SBH"):
            return self.key.shape[-1] // (self.query.shape[-1] // self.head_num)
        return self.key.shape[1 if self.layout in ("BNSD", "TND") else 2]

    def sequences(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool]]:
        """(query, key, value, masked, bias, rows without effect give 0) of each sequence, tensors (N, S, D)."""
        queries = split_sequences(self.query, self.layout, self.head_num, self.ends_q)
        keys = split_sequences(self.key, self.layout, self.kv_heads, self.ends_kv)
        values = split_sequences(self.value, self.layout, self.kv_heads, self.ends_kv)
        for place, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
            masked = self._masked(place, len(queries), q.shape[1], k.shape[1])
            bias = None if self.pse is None else self.pse[place % self.pse.shape[0]]
            # "switched on by itself where it can be seen, e.g. sparse_mode 3 with Sq > Skv"
            seen = self.mask is not None and self.mode == 3 and q.shape[1] > k.shape[1]
            yield q, k, v, masked, bias, self.inner_precise == 2 or seen

    def _masked(self, place: int, count: int, rows: int, columns: int) -> Tensor | None:
        if self.mask is None:
            return None  # "sparse_mode and the tokens have no effect: everything is computed"
        if self.mode in (0, 1):
            return self._given(place, rows, columns)
        if self.mode == 5:
            wanted = structure(5, rows, columns, 0, 0, self._prefix(place))
            require(torch.equal(self._given(place, rows, columns).expand(self.head_num, -1, -1).any(0), wanted)
                    and torch.equal(self._given(place, rows, columns).expand(self.head_num, -1, -1).all(0), wanted),
                    "atten_mask of sparse_mode 5 is not causal with the given prefix")  # fmt: skip
            return wanted
        if self.mode in (7, 8):
            split = place == (count - 1 if self.mode == 7 else 0)
            return structure(4 if split else 3 if self.mode == 7 else 2, rows, columns, self.before, self.after)
        prefix = self._prefix(place) if self.mode == 6 else 0
        return structure(self.mode, rows, columns, self.before, self.after, prefix)

    def _given(self, place: int, rows: int, columns: int) -> Tensor:
        """The full mask of a sequence (1 or N, Sq, Skv); in mode 0 it must agree with the tokens."""
        assert self.mask is not None
        mask = self.mask.bool()
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask[place % mask.shape[0]][..., :rows, :columns]
        if self.mode == 0:
            i, j = torch.arange(rows)[:, None], torch.arange(columns)[None]
            outside = (j - i > self.after) | (j - i < -self.before)
            agrees = bool((mask | ~outside).all())
            require(agrees, "atten_mask shows pairs outside pre_tockens and next_tockens; the two must agree in mode 0")
        return mask

    def _prefix(self, place: int) -> int:
        require(self.prefix is not None, f"sparse_mode {self.mode} needs prefix")
        assert self.prefix is not None
        return int(self.prefix[place])

    def _check_lengths(self) -> None:
        if not self.packed:
            given = self.lengths_q is not None or self.lengths_kv is not None
            require(not given, f"actual_seq_qlen and actual_seq_kvlen belong to TND, the layout is {self.layout}")
            return
        require(self.lengths_q is not None and self.lengths_kv is not None, "TND needs actual_seq_qlen and _kvlen")
        assert self.lengths_q is not None and self.lengths_kv is not None
        require(len(self.lengths_q) == len(self.lengths_kv), "actual_seq_qlen and actual_seq_kvlen differ in length")
        require(len(self.lengths_q) <= 2048, f"{len(self.lengths_q)} sequences; at most 2048 in TND")
        self.ends_q = require_cumulative("actual_seq_qlen", self.lengths_q, self.query.shape[0])
        self.ends_kv = require_cumulative("actual_seq_kvlen", self.lengths_kv, self.key.shape[0])
        require(len(self.ends_q) == len(self.ends_kv), "actual_seq_qlen and _kvlen leave out different sequences")

    def _check_sizes(self) -> None:
        heads_axis = {"BNSD": 1, "BSND": 2, "TND": 1}.get(self.layout)
        if heads_axis is None:
            require(self.query.shape[-1] % self.head_num == 0, f"H {self.query.shape[-1]} is no multiple of head_num")
            head_dim = self.query.shape[-1] // self.head_num
            require(self.key.shape[-1] % head_dim == 0, f"H of key {self.key.shape[-1]} is no multiple of D {head_dim}")
        else:
            head_dim = self.query.shape[-1]
            found = self.query.shape[heads_axis]
            require(found == self.head_num, f"head_num is {self.head_num}, query in {self.layout} has {found} heads")
            require(self.key.shape[-1] == head_dim, f"D of query is {head_dim}, of key {self.key.shape[-1]}")
            require(self.value.shape[-1] <= head_dim, "D of value must not exceed that of key")
        require(1 <= head_dim <= 768, f"D is {head_dim}; supported: 1 to 768")
        require(self.key.shape[:-1] == self.value.shape[:-1], "key and value must have the same shape (but for D)")
        kv = self.kv_heads
        divides = kv > 0 and self.head_num % kv == 0
        require(divides, f"query has {self.head_num} heads, key {kv}; the ratio must be a whole number above 0")
        require(1 <= self.head_num <= 256, f"N is {self.head_num}; supported: 1 to 256")
        if not self.packed:
            axis = 1 if self.layout == "SBH" else 0
            require(self.query.shape[axis] == self.key.shape[axis], "the batch sizes of query and key differ")
            require(self.query.numel() > 0 and self.key.numel() > 0, "B and S of at least 1 are supported")

    def _check_mask(self) -> None:
        if self.mask is None:
            return
        require(self.mask.dtype in (torch.bool, torch.uint8), f"atten_mask is {self.mask.dtype}; bool or uint8")
        if self.mode in (2, 3, 4, 6, 7, 8):
            require_compressed(self.mask, self.mode)
        else:
            self._check_full_mask()
        if self.mode in (5, 6):
            self._check_prefix()
        if self.mode in (7, 8):
            require(self.packed, f"sparse_mode {self.mode} is for TND")
            require(self.pse is None, f"sparse_mode {self.mode} does not support pse")
        if self.mode == 7:
            last = self.ends_kv[-1] - (self.ends_kv[-2] if len(self.ends_kv) > 1 else 0)
            require(self.before >= last and self.after <= 0, "mode 7 needs pre_tockens >= last Skv, next_tockens <= 0")
        if self.mode == 8:
            require(self.before >= self.ends_kv[0], "mode 8 needs pre_tockens >= first Skv")
        if self.mode == 4:
            require(self.before + self.after >= 0, "pre_tockens and next_tockens must overlap in band mode")

    def _check_full_mask(self) -> None:
        assert self.mask is not None
        rows, columns = self._longest()
        shape = tuple(self.mask.shape)
        if self.packed:
            require(self.mode != 5, "sparse_mode 5 is not supported in TND")
            require(
                shape == (rows, columns), f"atten_mask of TND must be (maxSq, maxSkv) = {(rows, columns)}, got {shape}"
            )
            require(not bool(self.mask.bool().all(-1).any()), "atten_mask of TND must not mask a whole row")
            return
        batch = self.query.shape[1 if self.layout == "SBH" else 0]
        allowed: list[tuple[int, ...]] = [(batch, self.head_num, rows, columns), (batch, 1, rows, columns)]
        if self.mode != 5:
            allowed += [(1, 1, rows, columns), (rows, columns)]
        require(shape in allowed, f"atten_mask has shape {shape}; supported: {', '.join(map(str, allowed))}")

    def _check_prefix(self) -> None:
        require(self.prefix is not None, f"sparse_mode {self.mode} needs prefix")
        assert self.prefix is not None
        require(len(self.prefix) <= 32, f"{len(self.prefix)} prefixes; B must not exceed 32 in prefix modes")
        rows, columns = self._longest()
        low = 0 if rows > columns else columns - rows
        fits = all(low <= n <= columns for n in self.prefix)
        require(fits or self.packed, f"prefix {list(self.prefix)[:4]} must lie in [{low}, {columns}]")

    def _check_extras(self) -> None:
        require(self.softmax_layout in ("", "TND"), f"softmax_layout is {self.softmax_layout!r}; '' or 'TND'")
        require(self.softmax_layout == "" or self.packed, "softmax_layout belongs to TND")
        if self.sink is not None:
            require(self.sink.dtype == torch.float32, f"sink is {self.sink.dtype}; float32 is supported")
            require(tuple(self.sink.shape) == (self.head_num,), "sink must have shape (head_num,)")
        if self.pse is None:
            return
        if self.packed:
            raise NoReferenceError("npu_fusion_attention: pse in TND is not emulated")
        rows, columns = self._longest()
        if rows > _ALIBI_ROWS and self.pse.shape[-2] == _ALIBI_ROWS:
            raise NoReferenceError("npu_fusion_attention: the compressed pse of 1024 rows is not emulated")
        batch = self.query.shape[1 if self.layout == "SBH" else 0]
        heads = self.head_num
        allowed = [(batch, heads, rows, columns), (batch, heads, 1, columns), (1, heads, rows, columns)]
        shape = tuple(self.pse.shape)
        require(shape in allowed, f"pse has shape {shape}; supported: BNSS, BN1S and 1NSS")

    def _longest(self) -> tuple[int, int]:
        """The longest query and key sequence."""
        if self.packed:
            longest = [
                max(b - a for a, b in zip([0, *ends], ends, strict=False)) for ends in (self.ends_q, self.ends_kv)
            ]
            return longest[0], longest[1]
        axis = {"BNSD": 2, "SBH": 0}.get(self.layout, 1)
        return self.query.shape[axis], self.key.shape[axis]
