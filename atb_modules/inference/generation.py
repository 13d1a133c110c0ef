"""generate: prompts are prefilled in passes, then every open row gets one token a step until it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atb_modules.attention import KVCacheManager
from atb_modules.checks import LARGEST_COUNT, check_int

from .fitting import check_cache
from .plan import DecodeStep
from .prefill import prefill
from .prompt import Prompt
from .prompts import PromptLike, read_prompts
from .sampling import Sampler

if TYPE_CHECKING:
    from atb_modules.models.decoder import DecoderModel

TokenCallback = Callable[[int, int], None]
PromptReader = Callable[[list[list[int]]], list[Prompt]]


def generate(
    model: DecoderModel,
    ids: PromptLike,
    max_new_tokens: int,
    *,
    attention_mask: Tensor | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    eos_token_ids: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    on_token: TokenCallback | None = None,
    prefill_chunk_size: int | None = None,
    cache: KVCacheManager | None = None,
    as_prompts: PromptReader | None = None,
) -> Tensor | list[int] | list[list[int]]:
    """Continues prompts; greedy unless temperature, top_k or top_p is given.

    Rows of different lengths are packed, not padded: padding costs nothing. A row that ends leaves the
    cache. Equal prompts are computed once and share their pages until they differ.

    Args:
        ids: integers (batch, seq) or (seq,), a list of token ids, or a list of such lists of any lengths.
        max_new_tokens: most tokens that a row gets.
        attention_mask: (batch, seq) for padded `ids`, 1 = real, padding on either side.
        temperature, top_k, top_p, generator, seed: see `Sampler`.
        eos_token_ids: tokens that end a row (kept in the result); None for the model's, an empty list for
            none.
        pad_token_id: fills a tensor's rows that ended early; default the first of eos_token_ids, or 0.
        on_token: called with (row, token) as soon as a token is known.
        prefill_chunk_size: most prompt tokens in one pass; None for the model's `inference_config`.
        cache: a cache of this model's shape to work in, whose registered prefixes are used and added to, and
            in which no sequence is left open; None for one that is as large as this call needs.
        as_prompts: makes the rows of token ids, their padding gone, into `Prompt`s with images; None for text alone.

    Returns:
        Prompt and new tokens in the form of `ids`.

    Raises:
        ValueError, TypeError: an argument out of range, a prompt that does not fit `max_positions`, a cache
            that does not fit the model.
        OutOfPagesError: the given cache is too small.
    """
    config = model.config
    prompts = read_prompts(ids, attention_mask, config.vocab_size)
    options = model.inference_config
    options.validate()
    _check_counts(max_new_tokens, prefill_chunk_size)
    check_int("pad_token_id", pad_token_id, -LARGEST_COUNT, optional=True)
    if on_token is not None and not callable(on_token):
        raise TypeError(f"on_token is {type(on_token).__name__}; allowed: a function of (row, token), or None")
    sampler = Sampler(temperature, top_k, top_p, generator, seed)
    ends = _end_tokens(config.eos_token_ids if eos_token_ids is None else eos_token_ids)
    _check_positions(prompts.rows, max_new_tokens, config.max_positions)
    new: list[list[int]] = [[] for _ in prompts.rows]
    if prompts.rows and max_new_tokens:
        shared = cache is not None
        if cache is None:
            cache = _own_cache(model, prompts.rows, max_new_tokens)
        else:
            check_cache("cache", cache, config, model.device)
        if cache.batch_size:
            raise ValueError(f"cache has {cache.batch_size} open sequences; allowed: none (call cache.begin(0))")
        chunk = options.prefill_chunk_size if prefill_chunk_size is None else prefill_chunk_size
        with torch.inference_mode():
            try:
                logits = _prefill_rows(model, cache, _prompts_of(prompts.rows, as_prompts), chunk, shared)
                _decode(model, cache, logits, new, sampler, ends, max_new_tokens, on_token)
            finally:
                cache.begin(0)
    if pad_token_id is None:
        pad_token_id = min(ends, default=0)
    return prompts.joined(new, pad_token_id)


def _prompts_of(rows: list[list[int]], as_prompts: PromptReader | None) -> list[Prompt]:
    return [Prompt(row) for row in rows] if as_prompts is None else as_prompts(rows)


def _prefill_rows(
    model: DecoderModel, cache: KVCacheManager, rows: list[Prompt], chunk: int | None, shared: bool
) -> Tensor:
    """Logits of the last token of every row; equal prompts are computed once and forked."""
    order, prompts = list(range(len(rows))), rows
    if model.inference_config.enable_kv_cache_opt:
        places: dict[object, int] = {}
        order = [places.setdefault(row.key, len(places)) for row in rows]
        prompts = [rows[order.index(place)] for place in range(len(places))]
    for row, prompt in enumerate(prompts):
        cache.join_prefix(prompt.tokens[:-1], images=prompt.images_before(len(prompt.tokens) - 1))
        for begin, shift in prompt.shifts:
            cache.shift_positions(row, begin, shift)
    logits = prefill(model, cache, prompts, chunk)
    if shared:
        for row, prompt in enumerate(prompts):
            cache.register_prefix(row, prompt.tokens, images=prompt.images)
    if len(prompts) < len(rows):
        cache.reorder(order)
        logits = logits[torch.tensor(order, device=logits.device)]
    return logits


def _decode(
    model: DecoderModel,
    cache: KVCacheManager,
    logits: Tensor,
    new: list[list[int]],
    sampler: Sampler,
    ends: frozenset[int],
    max_new_tokens: int,
    on_token: TokenCallback | None,
) -> None:
    open_rows = list(range(len(new)))
    next_logits = DecodeStep(model, cache)
    while True:
        tokens = sampler(logits)
        gone = []
        for place, (row, token) in enumerate(zip(open_rows, tokens, strict=True)):
            new[row].append(token)
            if on_token is not None:
                on_token(row, token)
            if token in ends or len(new[row]) == max_new_tokens:
                gone.append(place)
        if gone:
            cache.leave(gone)
            left = set(gone)
            open_rows = [row for place, row in enumerate(open_rows) if place not in left]
            tokens = [token for place, token in enumerate(tokens) if place not in left]
        if not open_rows:
            return
        logits = next_logits(tokens)


def _own_cache(model: DecoderModel, rows: list[list[int]], max_new_tokens: int) -> KVCacheManager:
    page_size = model.inference_config.page_size
    needs = [len(row) + max_new_tokens for row in rows]
    pages = sum(-(-need // page_size) for need in needs)
    evict = model.inference_config.enable_kv_cache_opt
    return model.new_cache(max(needs), page_size=page_size, num_pages=pages, evict=evict)


def _end_tokens(eos_token_ids: int | Sequence[int]) -> frozenset[int]:
    # Not every iterable: a tensor or an array may be one and hold no Python ints.
    if isinstance(eos_token_ids, str | bytes) or not isinstance(eos_token_ids, int | Sequence | Set | Iterator):
        raise TypeError(f"eos_token_ids is {eos_token_ids!r:.80}; allowed: a token id, or a list of token ids")
    ids = [eos_token_ids] if isinstance(eos_token_ids, int) else list(eos_token_ids)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"eos_token_ids has {token!r}; allowed: token ids")
    return frozenset(ids)


def _check_counts(max_new_tokens: int, prefill_chunk_size: int | None) -> None:
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}; allowed: an int of at least 0")
    if prefill_chunk_size is not None and (
        isinstance(prefill_chunk_size, bool) or not isinstance(prefill_chunk_size, int) or prefill_chunk_size < 1
    ):
        raise ValueError(f"prefill_chunk_size is {prefill_chunk_size!r}; allowed: a positive int, None")


def _check_positions(rows: list[list[int]], max_new_tokens: int, max_positions: int) -> None:
    for index, row in enumerate(rows):
        if len(row) + max_new_tokens > max_positions:
            raise ValueError(
                f"row {index} of ids has {len(row)} tokens and max_new_tokens is {max_new_tokens}: together more "
                f"than the model's max_positions={max_positions}"
            )
