"""What transformers asks of each layer of a ``PagedCache``, and which layers of a model there can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs

from atb_modules.checks import check_type

if TYPE_CHECKING:
    from atb_modules.integrations.transformers_cache import PagedCache

_SERVED = ("full_attention", "sliding_attention", "chunked_attention")


class PagedLayer(CacheLayerMixin):
    """What transformers asks of one layer of a ``PagedCache``; everything is kept in the cache itself."""

    is_croppable = True

    def __init__(self, cache: PagedCache, layer_idx: int, sliding_window: int | None) -> None:
        self._cache, self.layer_idx = cache, layer_idx
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None

    @property
    def is_initialized(self) -> bool:
        return self._cache.manager is not None

    @property
    def keys(self) -> Tensor | None:
        """A dense copy of what is kept, (batch, kv_heads, tokens, head_dim), padding as zeros; None while empty."""
        return self._cache.gather(self.layer_idx, 0)

    @property
    def values(self) -> Tensor | None:
        """As ``keys``."""
        return self._cache.gather(self.layer_idx, 1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._cache.reserve(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._cache.update(key_states, value_states, self.layer_idx)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length(self.layer_idx)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        past = self.get_seq_length()
        first = self._cache.first_key(self.layer_idx, past)
        return past + query_length - first, first

    def get_max_length(self) -> int:
        return self._cache.max_seq_len if self.sliding_window is None else self.sliding_window


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """How many keys a query sees, itself counted, in each layer; None for all. Raises for layers of another kind."""
    check_type("config", config, PreTrainedConfig)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(config).__name__} is of an encoder-decoder model; PagedCache serves decoders alone")
    types, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    for index, word in enumerate(types):
        if word not in _SERVED:
            raise ValueError(
                f"layer {index} of {type(config).__name__} is {word!r}; PagedCache serves {', '.join(_SERVED)}"
            )
    return tuple(layer.get("sliding_window") for layer in options)
