"""Our paged cache as a transformers ``Cache``: ``model.generate(..., cache=PagedCache(model.config, 4096))``.

Keys and values lie in the pages of a ``KVCacheManager``: a step writes its own tokens and moves nothing, beams share
pages, left padding takes none, and pages behind a sliding window go back to the pool. With
``attn_implementation="atb"`` attention reads the pages where they lie; with any other it gets dense tensors, gathered
at each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from atb_modules.attention.cache import CacheStep, KVCacheManager
from atb_modules.checks import check_int, check_parameter_dtype, check_tensor
from atb_modules.integrations.transformers import NAME
from atb_modules.integrations.transformers_cache_layers import PagedLayer, layer_windows
from atb_modules.integrations.transformers_pages import CachedStates, ForwardPass, LayerUpdate
from atb_modules.kernels.pages import KVQuantization
from atb_modules.strategies import parse_enum


class PagedCache(Cache):
    """A paged cache for the decoder of a transformers model.

    Sequences of a batch are its rows. Room is reserved when the first keys come, for ``max_batch_size`` rows of
    ``max_seq_len`` tokens; it grows for a larger batch while the cache is empty. ``reset()`` releases all pages, so
    that the same cache serves the next prompt; without it the next call continues the sequences, as with any cache.
    Calls with it are not differentiable.

    Args:
        config: the config of the model, itself and no copy: its attention implementation is looked up in it.
        max_seq_len: most tokens of a row, padding not counted.
        page_size: tokens a page.
        max_batch_size: rows to reserve room for; a beam is a row.
        num_pages: pages a layer in place of ``max_batch_size`` times what ``max_seq_len`` needs, for rows that share.
        dtype: of the pages; default the dtype of the keys.
        quantization: "int8" keeps codes with a scale for each page and head, a quarter of float32's memory.

    Raises:
        ValueError: a layer that is not served (encoder-decoder models, recurrent layers, keys shared between layers),
            by name; a positive count in ``crop``; another number of rows than are open.
        OutOfPagesError: more tokens than there are pages for; nothing is changed.
    """

    def __init__(
        self,
        config: Any,
        max_seq_len: int,
        *,
        page_size: int = 64,
        max_batch_size: int = 1,
        num_pages: int | None = None,
        dtype: torch.dtype | None = None,
        quantization: KVQuantization | str = KVQuantization.NONE,
    ) -> None:
        for name, value in (("max_seq_len", max_seq_len), ("page_size", page_size), ("max_batch_size", max_batch_size)):
            check_int(name, value)
        check_int("num_pages", num_pages, optional=True)
        check_parameter_dtype(dtype)
        self.max_seq_len, self.page_size, self.max_batch_size = max_seq_len, page_size, max_batch_size
        self.num_pages, self.dtype = num_pages, dtype
        self.quantization = parse_enum(KVQuantization, quantization, "quantization")
        windows = layer_windows(config)
        super().__init__(layers=[PagedLayer(self, index, window) for index, window in enumerate(windows)])
        self.windows = windows
        self._config = config.get_text_config(decoder=True)
        self.manager: KVCacheManager | None = None
        #: tokens of left padding of each row, which are not kept
        self.padding: list[int] = []
        self._length = 0
        self._pass: ForwardPass | None = None
        self._newest: LayerUpdate | None = None
        self._recording = False

    def __repr__(self) -> str:
        return f"PagedCache(max_seq_len={self.max_seq_len}, {self.manager if self.manager else 'nothing reserved yet'})"

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        for layer in self.layers:
            window = None if layer.sliding_window is None else torch.tensor(layer.sliding_window)
            yield layer.keys, layer.values, window

    # Sizes

    @property
    def batch_size(self) -> int:
        """Open rows; -1 where none are."""
        return len(self.padding) or -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of a row that this layer holds, left padding counted."""
        current = self._pass
        return self._length if current is None or layer_idx in current.served else current.past

    def first_key(self, layer_idx: int, past: int) -> int:
        """The first token that a query after ``past`` tokens can see in this layer."""
        window = self.windows[layer_idx]
        return 0 if window is None else max(past - window + 1, 0)

    # Steps

    def reserve(self, key_states: Tensor, value_states: Tensor) -> KVCacheManager:
        """The pages, made for keys of this shape (batch, kv_heads, any, head_dim) where there are none yet."""
        if self.manager is None:
            heads, head_dim = key_states.shape[1], key_states.shape[3]
            self.manager = KVCacheManager(
                self.max_seq_len,
                self.page_size,
                len(self.layers),
                heads,
                head_dim,
                key_states.dtype if self.dtype is None else self.dtype,
                num_pages=self._pages_for(max(self.max_batch_size, key_states.shape[0])),
                quantization=self.quantization,
                window=[None if window is None else window - 1 for window in self.windows],
                device=key_states.device,
            )
            self.manager.hold_windows(self._recording)
        return self.manager

    def _pages_for(self, rows: int) -> int:
        return rows * -(-self.max_seq_len // self.page_size) if self.num_pages is None else self.num_pages

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Takes the new keys and values (batch, kv_heads, tokens, head_dim) of a layer.

        Returns:
            All of them, as attention needs them: handles of pages for ``attn_implementation="atb"``, else dense.
        """
        self._write_newest()
        self._check_new(key_states, value_states, layer_idx)
        current = self._joined_pass(layer_idx, key_states)
        update = self._newest = LayerUpdate(self, layer_idx, current, key_states, value_states)
        if self._config._attn_implementation != NAME:
            return update.dense
        batch, heads, tokens, head_dim = key_states.shape
        shape = (batch, heads, current.past + tokens - self.first_key(layer_idx, current.past), head_dim)
        return CachedStates(update, 0, shape), CachedStates(update, 1, shape)

    def _check_new(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise ValueError("keys require gradients, and PagedCache keeps none; allowed: calls under torch.no_grad()")
        if values.shape != keys.shape:
            raise ValueError(
                f"layer {layer_idx} has keys {tuple(keys.shape)} and values {tuple(values.shape)}; allowed: equal"
            )
        manager = self.reserve(keys, values)
        if (keys.shape[1], keys.shape[3]) != (manager.num_kv_heads, manager.head_dim):
            raise ValueError(
                f"layer {layer_idx} has {keys.shape[1]} kv heads of {keys.shape[3]} channels, earlier ones "
                f"{manager.num_kv_heads} of {manager.head_dim}; allowed: the same in all layers"
            )
        if keys.device != manager.device:
            raise ValueError(
                f"layer {layer_idx} is on {keys.device}, the cache on {manager.device}; allowed: one device"
            )

    def _joined_pass(self, layer_idx: int, keys: Tensor) -> ForwardPass:
        """The forward pass that these keys belong to: a new one where all layers have taken part in the last."""
        batch, tokens = keys.shape[0], keys.shape[2]
        current = self._pass
        if current is None or len(current.served) == len(self.layers):
            if self._length and batch != len(self.padding):
                raise ValueError(
                    f"keys have batch {batch}, the cache holds {len(self.padding)} rows; allowed: as many, or reset() "
                    "first"
                )
            current = self._pass = ForwardPass(self._length, tokens, batch)
            self._length += tokens
        elif layer_idx in current.served:
            missing = sorted(set(range(len(self.layers))) - current.served)
            raise ValueError(
                f"layer {layer_idx} comes again, but the layers {missing} did not take part in the last forward pass; "
                f"crop(-{current.tokens}) takes it back"
            )
        elif (batch, tokens) != (current.batch, current.tokens):
            raise ValueError(
                f"layer {layer_idx} brings {tokens} tokens of {batch} rows, "
                f"earlier ones {current.tokens} of {current.batch}"
            )
        current.served.add(layer_idx)
        return current

    def open_step(self, current: ForwardPass, real: Tensor | None) -> CacheStep:
        """The step of ``current`` in the pages; ``real``, bool (batch, tokens), says which of its tokens are."""
        manager = self.manager
        assert manager is not None
        if not current.past and manager.lengths != (0,) * current.batch:
            manager.begin(0)
            manager.grow(self._pages_for(current.batch))
            manager.begin(current.batch)
            self.padding = [0] * current.batch
        lengths: int | Sequence[int] = current.tokens
        left_out = self._left_padding(current, real)
        if any(left_out):
            lengths = [current.tokens - count for count in left_out]
            first = torch.tensor(left_out, device=manager.device)[:, None]
            current.real = torch.arange(current.tokens, device=manager.device) >= first
        try:
            current.step = manager.step(lengths)
        except BaseException:
            self._length, self._pass, self._newest = current.past, None, None
            raise
        self.padding = [held + count for held, count in zip(self.padding, left_out, strict=True)]
        return current.step

    def _left_padding(self, current: ForwardPass, real: Tensor | None) -> list[int]:
        """How many of a row's new tokens are padding before its first real one."""
        if real is None or all(held < current.past for held in self.padding):
            return [0] * current.batch
        counts = (real.long().cumsum(dim=1) == 0).sum(dim=1).tolist()
        return [count if held == current.past else 0 for held, count in zip(self.padding, counts, strict=True)]

    def note_written(self, update: LayerUpdate) -> None:
        """The cache holds on to what is not written yet, and no longer."""
        if self._newest is update:
            self._newest = None

    def _write_newest(self) -> None:
        """What nobody has attended to is written now."""
        update, self._newest = self._newest, None
        if update is not None:
            update.write()

    # Pages

    def pages(self, layer_idx: int) -> tuple[Any, Any]:
        """Pages of keys and of values of a layer, see ``KVCacheManager.pages``."""
        assert self.manager is not None
        return self.manager.pages(layer_idx)

    def layer_group(self, layer_idx: int) -> int:
        assert self.manager is not None
        return self.manager.layer_groups[layer_idx]

    def places(self, table: Tensor, first: int, end: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Page and offset (batch, n) of the tokens [first, end) of each row, and which are not kept, if any: bool
        (batch, n, 1, 1).
        """
        padding = torch.tensor(self.padding, device=table.device)[:, None]
        at = torch.arange(first, end, device=table.device) - padding
        page = table.gather(1, at.clamp(min=0) // self.page_size)
        lacking = (at < 0) | (page < 0)
        hidden = lacking[:, :, None, None] if bool(lacking.any()) else None
        return page.clamp(min=0), at.clamp(min=0) % self.page_size, hidden

    def gather(self, layer_idx: int, part: int) -> Tensor | None:
        """A dense copy of the keys (``part`` 0) or values (1) that a layer keeps; None while it is empty."""
        self._write_newest()
        manager = self.manager
        if manager is None or not self.get_seq_length(layer_idx):
            return None
        rows = [manager.gather(layer_idx, row)[part] for row in range(manager.batch_size)]
        longest = max(row.shape[1] for row in rows)
        return torch.stack([torch.nn.functional.pad(row, (0, 0, longest - row.shape[1], 0)) for row in rows])

    # Prefixes

    def register_prefix(self, input_ids: Tensor, *, salt: str | None = None, adapter: str | None = None) -> int:
        """Makes the full pages of every row findable by its tokens, for later prompts that begin with them.

        Args:
            input_ids: integers (batch, tokens) that were computed into the rows, left padding included; more tokens
                than the rows hold are left out, so that what ``generate`` returned can be given as it is.
            salt, adapter: what else must be equal for a prompt to match.

        Returns:
            Tokens of the first row that can be found: a multiple of the page size.
        """
        check_tensor("input_ids", input_ids)
        manager = self._settled()
        if manager is None or input_ids.dim() != 2 or input_ids.shape[0] != len(self.padding):
            raise ValueError(f"input_ids is {tuple(input_ids.shape)}; the cache holds {len(self.padding)} rows")
        registered = [
            manager.register_prefix(row, input_ids[row, held : self._length], salt=salt, adapter=adapter)
            for row, held in enumerate(self.padding)
        ]
        return registered[0]

    def join_prefix(self, input_ids: Tensor, *, salt: str | None = None, adapter: str | None = None) -> int:
        """Opens a row for every prompt, on the registered pages that all of them begin with; the cache must be empty.

        ``model.generate(input_ids, cache=cache)`` then computes only the tokens after these. The last token of a
        prompt is never taken from a page, because its logits are wanted.

        Args:
            input_ids: integers (batch, tokens), without padding.

        Returns:
            Tokens of each prompt that the cache holds now, 0 where nothing matches.
        """
        if self._length:
            raise ValueError(f"the cache holds {self._length} tokens; allowed: an empty one, after reset()")
        check_tensor("input_ids", input_ids)
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids is {tuple(input_ids.shape)}; allowed: (batch, tokens)")
        manager, count = self.manager, input_ids.shape[1] - 1
        keys: dict[str, Any] = {"salt": salt, "adapter": adapter}
        while manager is not None and count > 0:
            # What matches in one row only may be too long for another, and behind a window too short to join on.
            matched = min(manager.match_prefix(row[:count], **keys) for row in input_ids)
            if matched == count:
                manager.begin(0)
                for row in input_ids:
                    manager.join_prefix(row[:count], **keys)
                self._length, self.padding = count, [0] * input_ids.shape[0]
                return count
            count = matched
        return 0

    # Changes of the rows

    def reset(self) -> None:
        """Closes all rows and releases their pages. Registered prefixes stay findable until their pages are needed."""
        self._pass = self._newest = None
        self._length, self.padding = 0, []
        self._recording = False
        if self.manager is not None:
            self.manager.begin(0)
            self.manager.hold_windows(False)

    def _settled(self) -> KVCacheManager | None:
        """The manager, once everything is written; None where nothing is held."""
        self._write_newest()
        if self._pass is not None and len(self._pass.served) < len(self.layers):
            raise ValueError(
                f"{len(self._pass.served)} of {len(self.layers)} layers took part in the last forward pass; "
                f"crop(-{self._pass.tokens}) takes it back"
            )
        self._pass = None
        return self.manager if self._length else None

    def _arrange(self, rows: list[int]) -> None:
        manager = self._settled()
        if manager is not None:
            manager.reorder(rows)
            self.padding = [self.padding[row] for row in rows]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was; rows that come twice share their pages until they differ."""
        self._arrange(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, one after the other, sharing its pages."""
        check_int("repeats", repeats)
        self._arrange([row for row in range(len(self.padding)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows of these indices, or those where a bool ``indices`` is True."""
        self._arrange((indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices).tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens of every row, as transformers counts them: 0 or negative.

        Raises:
            ValueError: a positive number; or pages behind a sliding window were let go of that the shorter rows need,
                see ``activate_past_recording``.
        """
        check_int("-tokens_to_remove", -tokens_to_remove, least=0)
        keep = max(self._length + tokens_to_remove, 0)
        if self._pass is not None and keep <= self._pass.past:
            self._write_newest()
            self._pass = None
        manager = self._settled()
        if manager is None:
            return
        if tokens_to_remove:
            manager.crop([max(keep - held, 0) for held in self.padding])
            self._length, self.padding = keep, [min(held, keep) for held in self.padding]
        if self._recording:
            manager.let_go()

    def activate_past_recording(self) -> None:
        """From now on the pages behind a window are let go of by ``crop`` alone, so that it can go back that far."""
        self._recording = True
        if self.manager is not None:
            self.manager.hold_windows(True)
