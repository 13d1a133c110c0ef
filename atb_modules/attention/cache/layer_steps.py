"""LayerSteps: who has taken part in a cache's open step, where layers are called by themselves, without a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .step import CacheStep
from .validation import as_lengths


class LayerSteps:
    """The step that layers share until one asks a second time, which begins the next one."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.close()

    def close(self) -> None:
        """No step is shared any more: the cache was changed, or a step was opened for all layers at once."""
        self.step: CacheStep | None = None
        self.served: list[int] = []
        self.opened_rows = False
        self.begin_again_with: int | None = None

    def open(self, step: CacheStep, layer_idx: int, opened_rows: bool) -> None:
        """`layer_idx` began `step`, for which the sequences were opened too where `opened_rows`."""
        self.close()
        self.step, self.served, self.opened_rows = step, [layer_idx], opened_rows

    def joinable(self, layer_idx: int) -> CacheStep | None:
        """The step that earlier layers opened and that `layer_idx` has not been served in, if there is one."""
        complete = len(self.served) == self.num_layers
        return None if complete or layer_idx in self.served else self.step

    def check_begins(self, layer_idx: int) -> None:
        """Raises a ValueError where a step was taken back and not the layer that had begun it begins again."""
        first = self.begin_again_with
        if first is not None and first != layer_idx:
            raise ValueError(
                f"layer {layer_idx} begins a step, but layer {first} began the last one, which was taken back when a "
                f"layer failed: call the layers again from layer {first} on"
            )


class LayerCalls(ABC):
    """The part of a KVCacheManager that serves layers which are called by themselves, without a model."""

    num_layers: int
    layer_steps: LayerSteps
    _newest: CacheStep | None
    _registered_layers: int

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Open sequences."""

    @abstractmethod
    def begin(self, batch_size: int) -> None:
        """Opens sequences."""

    @abstractmethod
    def step(self, query_lengths: int | Sequence[int]) -> CacheStep:
        """Opens a step."""

    @abstractmethod
    def rollback(self, step: CacheStep) -> None:
        """Undoes a step."""

    @abstractmethod
    def _check_layer(self, layer_idx: int) -> None:
        """Raises unless there is such a layer."""

    def undo_newest(self) -> None:
        """Undoes the newest step, if the cache was not changed after it, with the sequences that it opened.

        Where layers that call by themselves shared it, the first of them begins the next step.
        """
        if self._newest is None:
            return
        first = self.layer_steps.served[:1]
        opened_rows = self.layer_steps.opened_rows
        self.rollback(self._newest)
        if opened_rows:
            self.begin(0)
        self.layer_steps.begin_again_with = first[0] if first else None

    def register_layer(self) -> int:
        """The next free layer index, for layers that are not given one."""
        if self._registered_layers >= self.num_layers:
            raise ValueError(f"num_layers={self.num_layers} layers have already been registered with this cache")
        self._registered_layers += 1
        return self._registered_layers - 1

    def layer_step(self, layer_idx: int, query_lengths: int | Sequence[int]) -> CacheStep:
        """The step of a layer that is called by itself, without a model that opens one.

        The first layer to ask opens the step (and sequences, one a row, when none are open); the others
        share it until one asks a second time, which begins the next step.

        Raises:
            ValueError: other lengths than the earlier layers brought; a step was taken back because a layer
                failed in it, and another layer than the one that had opened it begins again.
        """
        self._check_layer(layer_idx)
        shared = self.layer_steps
        step = shared.joinable(layer_idx)
        if step is not None:
            if as_lengths("query_lengths", query_lengths, self.batch_size) != step.query_lengths:
                raise ValueError(
                    f"layer {layer_idx} brings {query_lengths} tokens, earlier layers {step.query_lengths}"
                )
            shared.served.append(layer_idx)
            return step
        shared.check_begins(layer_idx)
        opened_rows = False
        if not self.batch_size and not isinstance(query_lengths, int):
            self.begin(len(query_lengths))
            opened_rows = True
        step = self.step(query_lengths)
        shared.open(step, layer_idx, opened_rows)
        return step
