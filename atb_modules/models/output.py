"""ModelOutput: what a language model returns, in the form that users of transformers know."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from atb_modules.attention import KVCacheManager


@dataclass(frozen=True, eq=False)
class ModelOutput:
    """Result of `DecoderModel.forward`.

    Attributes:
        logits: (batch, seq, vocab_size); rows at padding are 0 when a cache is used.
        loss: mean cross entropy of the next token, when labels were given.
        past_key_values: the cache that was given.
    """

    logits: Tensor
    loss: Tensor | None = None
    past_key_values: KVCacheManager | None = None
