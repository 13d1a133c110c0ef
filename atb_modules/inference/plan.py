"""DecodeStep: logits of the next token of every open row, by the shortest road that the model and machine
allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atb_modules.attention import KVCacheManager

if TYPE_CHECKING:
    from atb_modules.models.decoder import DecoderModel


class DecodeStep:
    """Runs one token a row through the model.

    Args:
        model: the model.
        cache: whose open sequences are the rows, in order.
    """

    def __init__(self, model: DecoderModel, cache: KVCacheManager) -> None:
        self.model = model
        self.cache = cache

    def __call__(self, tokens: list[int]) -> Tensor:
        """Appends one token to every row; logits (rows, vocab_size) of what follows."""
        step = self.cache.step(1)
        hidden = self.model.run_packed(torch.tensor(tokens, device=self.model.device), step, self.cache)
        return self.model.head(hidden)
