"""What a ``PagedCache`` hands to attention instead of dense keys and values, and attention over its pages.

``update`` of a transformers cache returns keys and values. Dense ones would have to be gathered from the pages for
every layer at every step, so our door gets a ``CachedStates`` and reads the pages where they lie. Anybody else who
takes it for a tensor gets the dense one, and that is logged once.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atb_modules.attention.cache import CacheStep
from atb_modules.attention.functional import cache_append, paged_attention
from atb_modules.integrations.transformers_masks import StructuredMask, log_once
from atb_modules.kernels.pages import take_tokens
from atb_modules.spec import AttentionSpec

if TYPE_CHECKING:
    from atb_modules.integrations.transformers_cache import PagedCache


#: the window of a query that sees every key before it
EVERY = -1


class ForwardPass:
    """The new tokens that one forward pass of a model brings to all layers of a cache.

    Attributes:
        past, tokens: tokens of a row before the pass, and in it; padding counts, as transformers counts it.
        served: the layers that have brought theirs.
        step: the step of the pages, opened by the first layer that writes.
        real: bool (batch, tokens), the tokens that are not left padding; None where all are real.
    """

    def __init__(self, past: int, tokens: int, batch: int) -> None:
        self.past, self.tokens, self.batch = past, tokens, batch
        self.served: set[int] = set()
        self.step: CacheStep | None = None
        self.real: Tensor | None = None
        self.padding_kept: dict[tuple[int, int], tuple[Any, bool]] = {}
        self.places: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}


class LayerUpdate:
    """The keys and values (batch, kv_heads, tokens, head_dim) that one layer brings in a forward pass."""

    def __init__(self, cache: PagedCache, layer_idx: int, forward: ForwardPass, keys: Tensor, values: Tensor) -> None:
        self.cache, self.layer_idx, self.forward = cache, layer_idx, forward
        self.keys, self.values = keys, values
        self.written = False

    def write(self, real: Tensor | None = None) -> CacheStep:
        """Writes the pages, once; ``real``, bool (batch, tokens), counts where no layer wrote before in this pass."""
        step = self.forward.step
        if step is None:
            step = self.cache.open_step(self.forward, real)
        if not self.written:
            self.written = True
            self.cache.note_written(self)
            slots = step.slots(self.layer_idx)
            keys, values = (packed(states, self.forward.real) for states in (self.keys, self.values))
            cache_append(keys, values, *self.cache.pages(self.layer_idx), slots, trusted=True)
        return step

    @functools.cached_property
    def dense(self) -> tuple[Tensor, Tensor]:
        """All keys and values that this layer's mask is about, padding as zeros: (batch, kv_heads, n, head_dim)."""
        step, forward = self.write(), self.forward
        if not forward.past:
            return self.keys, self.values
        first = self.cache.first_key(self.layer_idx, forward.past)
        which = self.cache.layer_group(self.layer_idx), first
        places = forward.places.get(which)
        if places is None:
            table = step.block_table(self.layer_idx).long()
            places = forward.places[which] = self.cache.places(table, first, forward.past + forward.tokens)
        page, offset, hidden = places
        k, v = (take_tokens(pages, page, offset) for pages in self.cache.pages(self.layer_idx))
        if hidden is not None:
            k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        return k.transpose(1, 2).to(self.keys.dtype), v.transpose(1, 2).to(self.values.dtype)

    def attend(
        self,
        query: Tensor,
        mask: StructuredMask | Tensor | None,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor | None:
        """Writes the pages, and attends over them: (batch, tokens, heads, head_dim), or None where dense keys and
        values are needed, or are at hand because there is no past.
        """
        structure = mask if isinstance(mask, StructuredMask) else None
        step = self.write(_newest(structure, self.forward.tokens))
        if not self.forward.past or not self._pages_hold(mask) or isinstance(mask, Tensor):
            return None
        kept = self.forward.past - self.cache.first_key(self.layer_idx, self.forward.past)
        left = _window(structure, query.shape[2], self.forward.past, kept)
        if left is None:
            return None
        real = self.forward.real
        out, _ = paged_attention(
            packed(query, real),
            *self.cache.pages(self.layer_idx),
            step.block_table(self.layer_idx),
            step.kv_lengths,
            step.cu_seqlens_q,
            _causal_spec(left, scale, softcap),
            sinks=sinks,
            trusted=True,
        )
        if real is None:
            return out.reshape(query.shape[0], query.shape[2], *out.shape[1:])
        whole = out.new_zeros(*real.shape, *out.shape[1:])
        whole[real] = out
        return whole

    def _pages_hold(self, mask: StructuredMask | Tensor | None) -> bool:
        """Whether the pages hold exactly the tokens that the mask calls real; raises where they lack one."""
        padding, forward = self.cache.padding, self.forward
        unpadded = mask is None or (isinstance(mask, StructuredMask) and mask.padding is None)
        if not any(padding):
            return unpadded
        first = self.cache.first_key(self.layer_idx, forward.past)
        known = forward.padding_kept.get((id(mask), first))
        if known is None:
            begin, end = mask.keys if isinstance(mask, StructuredMask) else (0, forward.past + forward.tokens - first)
            kept = torch.arange(first + begin, first + end) >= torch.tensor(padding)[:, None]
            shown = _shown(mask)
            shown = torch.ones_like(kept) if shown is None else shown.cpu()
            if bool((shown & ~kept).any()):
                raise ValueError(
                    "attention_mask shows tokens that were padding when they were cached; PagedCache keeps no padding"
                )
            known = forward.padding_kept[id(mask), first] = mask, torch.equal(shown, kept)
        return known[1]


def _shown(mask: StructuredMask | Tensor | None) -> Tensor | None:
    """bool (batch, keys): the keys that are real, or that some query sees; None for all."""
    if not isinstance(mask, Tensor):
        return None if mask is None else mask.padding
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return seen.flatten(1, -2).any(dim=1)


def _newest(structure: StructuredMask | None, tokens: int) -> Tensor | None:
    """Which of the newest keys are real, where the mask tells."""
    if structure is None or structure.padding is None or structure.keys[1] != structure.shape[3]:
        return None
    return structure.padding[:, -tokens:] if structure.padding.shape[1] >= tokens else None


def _window(structure: StructuredMask | None, tokens: int, past: int, kept: int) -> int | None:
    """Keys that a query sees before itself, ``EVERY`` for all; None where this alone does not describe the mask, which
    is about the new tokens and the ``kept`` last ones of the ``past``.
    """
    begin, end, left = 0, kept + tokens, None
    if structure is None:
        if tokens > 1:
            return None
    else:
        if structure.shape[3] != end or structure.keys[1] != end:
            return None
        if structure.images is not None or structure.cu_seqlens is not None:
            return None
        if tokens > 1 and (not structure.causal or structure.chunk is not None or structure.keys[0]):
            return None
        begin = structure.keys[0]
        left = None if structure.window is None else structure.window[0]
    if left is None and kept - begin == past:
        return EVERY
    if tokens > 1:
        return left
    return kept - begin if left is None else min(left, kept - begin)


@functools.lru_cache(maxsize=4096)
def _causal_spec(left: int, scale: float | None, softcap: float | None) -> AttentionSpec:
    window = None if left == EVERY else (left, None)
    return AttentionSpec(causal=True, window=window, scale=scale, softcap=softcap)


def packed(states: Tensor, real: Tensor | None) -> Tensor:
    """(batch, heads, tokens, head_dim) as (all tokens, heads, head_dim), row after row; only the ``real`` ones."""
    if real is not None:
        return states.transpose(1, 2)[real]
    return states[:, :, 0] if states.shape[2] == 1 else states.transpose(1, 2).flatten(0, 1)


class CachedStates:
    """The keys (``part`` 0) or values (1) of one layer, in the pages of a cache; elsewhere than in our attention it
    behaves as the dense tensor (batch, kv_heads, n, head_dim).
    """

    def __init__(self, update: LayerUpdate, part: int, shape: tuple[int, ...]) -> None:
        self.update, self.part = update, part
        self.shape = torch.Size(shape)

    def dense(self) -> Tensor:
        return self.update.dense[self.part]

    def size(self, axis: int | None = None) -> torch.Size | int:
        return self.shape if axis is None else self.shape[axis]

    def __getitem__(self, index: Any) -> Tensor:
        return self._for_model("slices cached keys or values")[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._for_model(f"uses {name!r} of cached keys or values"), name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None) -> Any:
        why = f"gives cached keys or values to torch's {function.__name__}"
        dense = functools.partial(_densified, why=why)
        return function(*map(dense, args), **{name: dense(value) for name, value in (kwargs or {}).items()})

    def _for_model(self, why: str) -> Tensor:
        log_once(f"keys and values are gathered from their pages at each step: the model {why}")
        return self.dense()


def _densified(value: Any, why: str) -> Any:
    if isinstance(value, CachedStates):
        return value._for_model(why)
    if isinstance(value, (list, tuple)):
        return type(value)(_densified(item, why) for item in value)
    return value
