"""Sampler: the next token of each row from its logits: greedy, or drawn with temperature, top-k and top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.checks import check_int, check_number, check_type

#: Temperatures below it are taken for it: logits that differ at all are then infinitely far apart, and none is NaN.
_COLDEST = 1e-30


class Sampler:
    """Chooses tokens.

    Args:
        temperature: logits are divided by it; 0 is greedy. None: greedy, or 1 when top_k or top_p is given.
        top_k: draw from this many likeliest tokens.
        top_p: draw from the smallest set of likeliest tokens whose probabilities add up to at least this
            (nucleus sampling, Holtzman et al., 2020), after temperature and top_k.
        generator, seed: where randomness comes from; give at most one. Tokens are drawn on the generator's device, and
            with a seed on the host, so that a seed gives the same tokens wherever the model runs.
    """

    def __init__(
        self,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
    ) -> None:
        if temperature is None:
            temperature = 0.0 if top_k is None and top_p is None else 1.0
        check_number("temperature", temperature, "a finite number of at least 0", lambda value: value >= 0)
        check_int("top_k", top_k, optional=True)
        check_number("top_p", top_p, "0 < top_p <= 1", lambda share: 0 < share <= 1, optional=True)
        check_type("generator", generator, torch.Generator, optional=True)
        check_int("seed", seed, -(2**63), 2**64 - 1, optional=True)
        if generator is not None and seed is not None:
            raise ValueError("generator and seed are both given; allowed: one of them")
        self.temperature, self.top_k, self.top_p = float(temperature), top_k, top_p
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        self.generator = generator

    def __call__(self, logits: Tensor) -> list[int]:
        """One token id a row of logits (rows, vocab_size)."""
        if self.temperature == 0.0:
            return logits.argmax(dim=-1).tolist()
        probabilities = self.probabilities(logits)
        if self.generator is not None:
            probabilities = probabilities.to(self.generator.device)
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(-1).tolist()

    def probabilities(self, logits: Tensor) -> Tensor:
        """What is drawn from, float32 (rows, vocab_size)."""
        scores = logits.float()
        # From the greatest down: divided by a small temperature, no score can become inf, nor inf - inf NaN.
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / max(self.temperature, _COLDEST)
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        probabilities = scores.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            # A token stays when those likelier than it do not reach top_p yet, so the likeliest always stays.
            beyond = ordered.cumsum(dim=-1) - ordered >= self.top_p
            beyond[..., 0] = False
            ordered = ordered.masked_fill(beyond, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
            probabilities /= probabilities.sum(dim=-1, keepdim=True)
        return probabilities
