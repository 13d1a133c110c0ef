"""Prompts: what users pass as `ids`, checked and turned into one token list a row, and the result turned
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atb_modules.checks import check_tensor

_FORMS = "integers (batch, seq) or (seq,), a list of token ids, or a list of such lists"
PromptLike = Tensor | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Prompts:
    """One token list a row, and the form that the user gave them in."""

    rows: list[list[int]]
    given: PromptLike

    def joined(self, new: list[list[int]], pad_token_id: int) -> Tensor | list[int] | list[list[int]]:
        """Prompt and new tokens in the form that the prompt was given in.

        A tensor (batch, seq) gives (batch, seq + longest answer); answers that ended earlier are filled up
        with `pad_token_id`. Lists give lists, without filling.
        """
        if isinstance(self.given, Tensor):
            longest = max(map(len, new), default=0)
            filled = [row + [pad_token_id] * (longest - len(row)) for row in new]
            answer = torch.tensor(filled, dtype=self.given.dtype).reshape(len(new), longest)
            if self.given.dim() == 1:
                return torch.cat([self.given, answer[0].to(self.given.device)])
            return torch.cat([self.given, answer.to(self.given.device)], dim=1)
        rows = [prompt + row for prompt, row in zip(self.rows, new, strict=True)]
        return rows[0] if len(self.given) and isinstance(self.given[0], int) else rows


def read_prompts(ids: PromptLike, attention_mask: Tensor | None, vocab_size: int) -> Prompts:
    """Checks `ids` and takes the padding off.

    Args:
        ids: integers (batch, seq) or (seq,), a list of token ids, or a list of such lists of any lengths.
        attention_mask: for a tensor (batch, seq), 1 = real; padding on the left or the right of a row.

    Raises:
        TypeError, ValueError: naming the row and what is wrong with it.
    """
    if isinstance(ids, Tensor):
        if ids.dtype not in (torch.int64, torch.int32) or ids.dim() not in (1, 2):
            raise ValueError(f"ids must be int64 or int32 (batch, seq), got {ids.dtype} {tuple(ids.shape)}")
        rows = ids.tolist() if ids.dim() == 2 else [ids.tolist()]
        if attention_mask is not None:
            rows = _without_padding(rows, ids, attention_mask)
    else:
        if attention_mask is not None:
            raise ValueError("attention_mask is for a padded tensor; lists of token ids have no padding")
        rows = _rows(_sequence("ids", ids))
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"ids has no token in row {index}; allowed: at least one a row")
        for token in row:
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"ids has {token!r} ({type(token).__name__}) in row {index}; allowed: int")
            if not 0 <= token < vocab_size:
                raise ValueError(f"ids has token {token} in row {index}; vocab_size is {vocab_size}")
    return Prompts(rows, ids)


def _rows(given: list[Any]) -> list[list[int]]:
    if given and isinstance(given[0], int):
        return [given]
    return [_sequence(f"ids[{index}]", row) for index, row in enumerate(given)]


def _sequence(name: str, value: Any) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"{name} is {value!r:.80} ({type(value).__name__}); allowed: {_FORMS}")
    return list(value)


def _without_padding(rows: list[list[int]], ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    check_tensor("attention_mask", attention_mask, "a tensor or None")
    if attention_mask.dtype.is_floating_point or attention_mask.dtype.is_complex:
        raise TypeError(f"attention_mask is {attention_mask.dtype}; allowed: bool or integer 0/1, 1 = real")
    if attention_mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; ids has {tuple(ids.shape)}")
    real_rows = (attention_mask != 0).reshape(len(rows), -1).tolist()
    kept = []
    for index, (row, real) in enumerate(zip(rows, real_rows, strict=True)):
        count = sum(real)
        first = real.index(True) if count else 0
        if not all(real[first : first + count]):
            raise ValueError(f"attention_mask has a hole in row {index}; allowed: padding on one or both sides")
        kept.append(row[first : first + count])
    return kept
