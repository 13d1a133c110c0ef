"""ModelOutput: what a language model returns, in the form that users of transformers know."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from atb_modules.attention import KVCacheManager


class ModelOutput(NamedTuple):
    """Result of `DecoderModel.forward`; a tuple, so that `torch.export` and `torch.compile` know it.

    Attributes:
        logits: (batch, seq, vocab_size); rows at padding are 0 when a cache is used.
        loss: mean cross entropy of the next token, when labels were given.
        past_key_values: the cache that was given.
    """

    logits: Tensor
    loss: Tensor | None = None
    past_key_values: KVCacheManager | None = None
