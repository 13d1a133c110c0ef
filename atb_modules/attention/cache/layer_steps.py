"""LayerSteps: who has taken part in a cache's open step, where layers are called by themselves, without a model."""

from __future__ import annotations

from .step import CacheStep


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
