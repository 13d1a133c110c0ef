"""transformers' attention masks as structure: causality, windows, chunks, segments and images instead of n by n bits.

``structured_mask`` is the mask function that transformers calls once a forward pass (``AttentionMaskInterface``); the
``StructuredMask`` that it returns travels through the model to our attention function. Nothing in it is larger than
(batch, tokens). While torch.compile or torch.export traces, the values of masks cannot be looked at: transformers' own
``sdpa_mask`` then makes the mask.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atb_modules.integrations.transformers_patterns import Pattern, Unread, read

logger = logging.getLogger("atb_modules.integrations")
_LOGGED: set[str] = set()


def log_once(message: str) -> None:
    """A warning on ``atb_modules.integrations``, the first time that this message comes; never while tracing."""
    if torch.compiler.is_compiling() or message in _LOGGED:
        return
    _LOGGED.add(message)
    logger.warning("%s", message)


@dataclass(frozen=True, eq=False)
class StructuredMask:
    """What a (batch, 1, q_len, kv_len) mask says, without the mask.

    Queries and the keys ``keys[0]:keys[1]`` are aligned bottom-right: the last query stands at the last of them, and
    keys outside are seen by no query. A model that treats it as a tensor gets the dense bool mask (True = may attend),
    and that is logged once.

    Args:
        shape: (batch, 1, q_len, kv_len) of the mask that it stands for.
        causal: whether a query sees no later key.
        keys: begin and end of the keys that it is about.
        window: keys seen before and after the query at most, itself not counted; None is unbounded.
        chunk: runs of so many keys see only themselves, counted from the first of ``keys``.
        padding: bool (batch, end - begin), True where the key is real.
        cu_seqlens: int32 (segments + 1,), the packed sequences in all rows, one row after the other.
        images: int (batch, end - begin), equal numbers >= 0 side by side see each other.
        make_dense: builds the dense mask.
    """

    shape: tuple[int, int, int, int]
    causal: bool
    keys: tuple[int, int]
    window: tuple[int | None, int | None] | None = None
    chunk: int | None = None
    padding: Tensor | None = None
    cu_seqlens: Tensor | None = None
    images: Tensor | None = None
    make_dense: Callable[[], Tensor] | None = field(default=None, repr=False)

    #: transformers asks whether a mask is a padding mask of two axes
    ndim = 4

    def dense(self) -> Tensor:
        """bool (batch, 1, q_len, kv_len), True = may attend; built anew at each call."""
        assert self.make_dense is not None
        return self.make_dense()

    def size(self, axis: int | None = None) -> tuple[int, ...] | int:
        return self.shape if axis is None else self.shape[axis]

    def dim(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Tensor:
        return self._for_model("slices the mask")[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._for_model(f"uses the mask's {name!r}"), name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None) -> Any:
        dense = functools.partial(_densified, why=f"gives the mask to torch's {function.__name__}")
        return function(*map(dense, args), **{name: dense(value) for name, value in (kwargs or {}).items()})

    def _for_model(self, why: str) -> Tensor:
        log_once(f"dense attention mask of query length times key length: the model {why}")
        return self.dense()


def _densified(value: Any, why: str) -> Any:
    if isinstance(value, StructuredMask):
        return value._for_model(why)
    if isinstance(value, (list, tuple)):
        return type(value)(_densified(item, why) for item in value)
    return value


def structured_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | StructuredMask | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> StructuredMask | Tensor | None:
    """The mask of one forward pass, as transformers' ``AttentionMaskInterface`` asks for it.

    Args:
        batch_size, q_length, kv_length: sizes of the mask.
        q_offset, kv_offset: where the first query and the first key stand in the sequence.
        mask_function: a function of (batch, head, query, key) indices; None is causal.
        attention_mask: bool (batch, tokens), True = real; or what an earlier call returned.
        allow_is_causal_skip: whether None may be returned.

    Returns:
        None where causality alone hides keys and the family's modules know that they are causal; a
        ``StructuredMask``; or a dense bool (batch, 1, q_length, kv_length), which is logged once, for a mask that has
        no compact form.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if isinstance(attention_mask, StructuredMask):
        return attention_mask
    mask_function = causal_mask_function if mask_function is None else mask_function
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    call = {
        **kwargs,
        **sizes,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "allow_is_bidirectional_skip": False,
    }
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return sdpa_mask(**call, allow_is_causal_skip=allow_is_causal_skip)
    dense = functools.partial(sdpa_mask, **call, allow_is_causal_skip=False)
    try:
        pattern = read(mask_function)
        if attention_mask is not None:
            pattern = dataclasses.replace(pattern, real=(*pattern.real, attention_mask))
        mask = fit(pattern, (batch_size, q_length, kv_length), int(q_offset), kv_offset)
    except Unread as unread:
        if q_length > 1:
            log_once(f"dense attention mask of query length times key length: {unread}")
        return dense()
    if allow_is_causal_skip and _is_plain_causal(mask) and _modules_know(kwargs.get("config")):
        return None
    return dataclasses.replace(mask, make_dense=dense)


def fit(pattern: Pattern, sizes: tuple[int, int, int], q_offset: int, kv_offset: int) -> StructuredMask:
    """The pattern over the queries and keys of one call of (batch, q_len, kv_len); raises ``Unread`` if it cannot be.

    Parts that hide nothing here are left out.
    """
    batch, q_len, kv_len = sizes
    shape = (batch, 1, q_len, kv_len)
    begin, end = 0, q_offset + q_len - kv_offset
    if pattern.chunk is not None and not pattern.causal:
        raise Unread("chunks without causality")
    if not pattern.causal:
        if (pattern.left is not None or pattern.right is not None) and end != kv_len:
            raise Unread(f"a window around queries that end at key {end} of {kv_len}")
        end = kv_len
    if not 0 < end <= kv_len:
        raise Unread(f"queries that end at key {end} of {kv_len}")
    segments = _segments(pattern, sizes, q_offset, kv_offset)
    chunk = pattern.chunk
    if chunk is not None:
        begin, chunk = _place_chunks(pattern, chunk, q_offset, kv_offset, end, segments is not None)
        if begin and pattern.images is not None:
            raise Unread("images that may lie before the first chunk")
    images = _images(pattern, batch, kv_offset, begin, end, kv_len)
    left = None if pattern.left is None or pattern.left >= end - begin - 1 else pattern.left
    right = None if pattern.causal or pattern.right is None or pattern.right >= end - begin - 1 else pattern.right
    return StructuredMask(
        shape,
        pattern.causal,
        (begin, end),
        window=None if left is None and right is None else (left, right),
        chunk=chunk,
        padding=_padding(pattern, batch, kv_offset + begin, kv_offset + end),
        cu_seqlens=segments,
        images=images,
    )


def _is_plain_causal(mask: StructuredMask) -> bool:
    _, _, q_len, kv_len = mask.shape
    extras = (mask.window, mask.chunk, mask.padding, mask.cu_seqlens, mask.images)
    bare = mask.causal and mask.keys == (0, kv_len) and all(extra is None for extra in extras)
    return bare and q_len in (1, kv_len)


def _modules_know(config: Any) -> bool:
    """Whether the ``is_causal`` of a family's attention modules can be relied on, as transformers' sdpa must."""
    config_class: Any = type(config)
    return config is None or _serves_sdpa(config_class)


@functools.cache
def _serves_sdpa(config_class: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    model_class = MODEL_MAPPING.get(config_class, None)
    classes = model_class if isinstance(model_class, (list, tuple)) else (model_class,)
    return all(getattr(one, "_supports_sdpa", False) for one in classes)


def _segments(pattern: Pattern, sizes: tuple[int, int, int], q_offset: int, kv_offset: int) -> Tensor | None:
    """cu_seqlens over all rows, None where each row is one sequence."""
    ids, places = pattern.segments, pattern.places
    if ids is None:
        if places is not None:
            raise Unread("positions of packed sequences without their numbers")
        return None
    batch, q_len, kv_len = sizes
    if q_len != kv_len or q_offset or kv_offset or tuple(ids.shape) != (batch, q_len):
        raise Unread("packed sequences beside a cache")
    steps = ids.diff(dim=-1)
    if bool((steps < 0).any()):
        raise Unread("packed sequences that are not one after the other")
    if places is not None and bool(((places.diff(dim=-1) != 1) & (steps == 0)).any()):
        raise Unread("positions that jump within a packed sequence")
    if not bool(steps.any()):
        if places is not None and pattern.chunk is not None and bool((places[:, 0] % pattern.chunk).any()):
            raise Unread("packed sequences that begin within a chunk")
        return None
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = steps != 0
    if pattern.chunk is not None and (places is None or bool((places[first] % pattern.chunk).any())):
        raise Unread("packed sequences that begin within a chunk")
    starts = first.flatten().nonzero().squeeze(-1)
    return torch.cat([starts, starts.new_tensor([batch * q_len])]).int()


def _place_chunks(
    pattern: Pattern, chunk: int, q_offset: int, kv_offset: int, end: int, packed: bool
) -> tuple[int, int | None]:
    """The first key that a query needs, from which chunks are counted, and their size or None for a single chunk."""
    starts = [0] if pattern.chunk_starts is None else pattern.chunk_starts.flatten().tolist()
    if packed and any(starts):
        raise Unread("packed sequences beside chunks that begin after padding")
    if packed:
        return 0, chunk
    last = kv_offset + end - 1
    begins = [start + (q_offset - start) // chunk * chunk for start in starts]
    if len({start % chunk for start in starts}) == 1 and begins[0] >= kv_offset:
        return begins[0] - kv_offset, None if last < begins[0] + chunk else chunk
    if all(last < begin + chunk for begin in begins) and all(begin <= kv_offset for begin in begins):
        return 0, None
    if all(last - start < chunk and _hidden_before(pattern, row, start) for row, start in enumerate(starts)):
        return 0, None
    raise Unread(f"chunks of {chunk} that begin at {min(starts)} to {max(starts)}, over keys from {kv_offset}")


def _hidden_before(pattern: Pattern, row: int, start: int) -> bool:
    """Whether the row's keys before ``start`` are padding."""
    return start == 0 or any(not bool(real[row, :start].any()) for real in pattern.real)


def _images(pattern: Pattern, batch: int, kv_offset: int, begin: int, end: int, kv_len: int) -> Tensor | None:
    ids = pattern.images
    if ids is None:
        return None
    if not pattern.causal or ids.shape[-1] < kv_offset + kv_len or ids.shape[0] != batch:
        raise Unread(f"images {tuple(ids.shape)} that do not fit {kv_offset + kv_len} keys")
    if bool((ids[:, kv_offset + end : kv_offset + kv_len] >= 0).any()):
        raise Unread("images among keys that are not there yet")
    ids = ids[:, kv_offset + begin : kv_offset + end]
    if not bool((ids >= 0).any()):
        return None
    changed = torch.ones_like(ids, dtype=torch.bool)
    changed[:, 1:] = ids[:, 1:] != ids[:, :-1]
    before = torch.full_like(ids, -1)
    before[:, 1:] = ids[:, :-1].cummax(dim=-1).values
    if bool((changed & (ids >= 0) & (ids <= before)).any()):
        raise Unread("images that come in several pieces")
    if pattern.image_left is not None:
        inside = ids[:, pattern.image_left + 1 :] == ids[:, : max(ids.shape[-1] - pattern.image_left - 1, 0)]
        if bool((inside & (ids[:, pattern.image_left + 1 :] >= 0)).any()):
            raise Unread("images that are longer than the window")
    return ids


def _padding(pattern: Pattern, batch: int, first: int, last: int) -> Tensor | None:
    """bool (batch, last - first), None where every key is real. Keys beyond a padding mask are not real."""
    joined: Tensor | None = None
    for real in pattern.real:
        part = real.bool()[:, first:last]
        if part.shape[-1] < last - first:
            part = torch.nn.functional.pad(part, (0, last - first - part.shape[-1]))
        joined = part if joined is None else joined & part
    if joined is None or bool(joined.all()):
        return None
    if joined.shape[0] not in (1, batch):
        raise Unread(f"a padding mask of {joined.shape[0]} rows for a batch of {batch}")
    return joined.expand(batch, -1)
