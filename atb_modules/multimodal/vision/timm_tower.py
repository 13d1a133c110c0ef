"""TimmTower: any model of timm that gives a grid of features, as a tower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.checks import check_device, check_floating, check_parameter_dtype

from .recording import recording
from .selection import SelectLayer, checked_layers, resolve_selection


class TimmTower(nn.Module):
    """A tower around a timm model, whose modules and parameters are taken as they are.

    Args:
        model: a timm model, or the name of one, which is built with fresh weights and without a classifier.
        select_layer: which hidden state is returned, or several, joined along the channels; as for ``VisionTower``,
            but without state 0, which timm does not give. None is what ``forward_features`` returns.
        final_norm: whether returned states pass the model's last norm; None: with no layer selected as
            ``forward_features`` does, else not.

    Attributes: as for ``VisionTower``; ``num_prefix_tokens`` is the model's own (class token, registers).
    """

    def __init__(
        self,
        model: nn.Module | str,
        *,
        select_layer: SelectLayer = None,
        final_norm: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_device(device)
        check_parameter_dtype(dtype)
        if isinstance(model, str):
            model = _created(model)
        if not isinstance(model, nn.Module) or not hasattr(model, "forward_features"):
            raise TypeError(
                f"model is {type(model).__name__}; allowed: a timm model with forward_features, or its name"
            )
        self.model: Any = model.to(device=device, dtype=dtype)
        self.plain = select_layer is None and final_norm is None
        self.num_layers = _depth(self.model)
        if not self.plain and not self.num_layers:
            raise ValueError(
                f"select_layer is {select_layer!r} and final_norm {final_norm}; {type(model).__name__} has no layers "
                "of one grid to select from, allowed: None for both"
            )
        self.selection = resolve_selection(select_layer, final_norm, max(self.num_layers, 1), True, True)
        if 0 in self.selection.states:
            raise ValueError(f"select_layer is {select_layer!r}, the embeddings; timm gives layers' outputs alone")
        self.hidden_size = _channels(self.model)
        self.out_channels = self.hidden_size * len(self.selection.states)
        self.num_prefix_tokens = int(getattr(model, "num_prefix_tokens", 0))
        self.patch_size = _patch_size(self.model)
        stem = next((part for part in self.model.modules() if isinstance(part, nn.Conv2d)), None)
        self.in_channels = None if stem is None else stem.in_channels
        self.unused_tensors: tuple[str, ...] = ()

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(images, channels, height, width) -> (images, patches, out_channels), row by row, without prefix tokens."""
        pixel_values = self._checked(pixel_values)
        if not pixel_values.shape[0]:
            return self._nothing(pixel_values, self.out_channels)
        with recording(self, pixel_values), refusals_named(pixel_values):
            if self.plain:
                return self._tokens(self.model.forward_features(pixel_values))
            chosen = self._intermediates(pixel_values, self.selection.states, self.selection.norm)
            return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)

    def forward_intermediates(self, pixel_values: Tensor, layers: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``forward``'s tokens, and the tokens behind each of ``layers``, from 0."""
        states = checked_layers(layers, self.num_layers)
        pixel_values = self._checked(pixel_values)
        if not pixel_values.shape[0]:
            return self(pixel_values), tuple(self._nothing(pixel_values, self.hidden_size) for _ in states)
        with recording(self, pixel_values), refusals_named(pixel_values):
            if not (self.plain and states):
                return self(pixel_values), self._intermediates(pixel_values, states, False)
            features, maps = self.model.forward_intermediates(pixel_values, **_asked(states))
            return self._tokens(features), _in_order(states, maps)

    def grid_of(self, pixel_values: Tensor) -> tuple[int, int]:
        """(rows, columns) of the patches of images (images, channels, height, width)."""
        pixel_values = self._checked(pixel_values)
        for side, name in zip(pixel_values.shape[-2:], ("high", "wide"), strict=True):
            if side < self.patch_size or side % self.patch_size:
                raise ValueError(
                    f"pixel_values is {side} pixels {name}; a grid is known for multiples of {self.patch_size} alone"
                )
        return pixel_values.shape[-2] // self.patch_size, pixel_values.shape[-1] // self.patch_size

    def _checked(self, pixel_values: Tensor) -> Tensor:
        """The images in the parameters' dtype."""
        check_floating("pixel_values", pixel_values, "a tensor (images, channels, height, width)")
        if pixel_values.dim() != 4:
            raise ValueError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; allowed: (images, channels, height, width)"
            )
        if self.in_channels not in (None, pixel_values.shape[1]):
            raise ValueError(f"pixel_values has {pixel_values.shape[1]} channels; the tower has {self.in_channels}")
        parameter = next(self.model.parameters(), pixel_values)
        if parameter.device.type != "meta" and pixel_values.device != parameter.device:
            raise ValueError(f"pixel_values is on {pixel_values.device}; the tower is on {parameter.device}")
        return pixel_values.to(parameter.dtype)

    def _nothing(self, pixel_values: Tensor, channels: int) -> Tensor:
        """The tokens of no image, which not every model of timm can compute."""
        rows, columns = self.grid_of(pixel_values)
        return pixel_values.new_zeros(0, rows * columns, channels)

    def _intermediates(self, pixel_values: Tensor, states: Sequence[int], norm: bool) -> tuple[Tensor, ...]:
        if not states:
            return ()
        options = {"norm": norm, "intermediates_only": True, "stop_early": True}
        return _in_order(states, self.model.forward_intermediates(pixel_values, **_asked(states), **options))

    def _tokens(self, features: Tensor) -> Tensor:
        if features.dim() == 3:
            return features[:, self.num_prefix_tokens :]
        if features.dim() != 4:
            raise ValueError(
                f"{type(self.model).__name__} gives features {tuple(features.shape)}; a tower needs a grid"
            )
        if getattr(self.model, "output_fmt", "NCHW") == "NHWC":
            return features.flatten(1, 2)
        return features.flatten(2).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"{type(self.model).__name__}, states={self.selection.states}, prefix={self.num_prefix_tokens}"


def _created(name: str) -> nn.Module:
    """A fresh timm model without a classifier."""
    import timm

    # "hf-hub:..." and "local-dir:..." are found out by loading alone
    if ":" not in name and not timm.is_model(name):
        raise ValueError(f"model is {name!r}; allowed: a timm model, or a name that timm knows")
    return timm.create_model(name, num_classes=0)


@contextlib.contextmanager
def refusals_named(pixel_values: Tensor) -> Iterator[None]:
    """timm asserts the sizes that a model takes; those become errors that name the argument."""
    try:
        yield
    except AssertionError as error:
        height, width = pixel_values.shape[-2:]
        raise ValueError(f"pixel_values is {height} x {width} pixels; the model refuses them: {error}") from None


def _asked(states: Sequence[int]) -> dict[str, Any]:
    """timm's arguments for these hidden states; it counts blocks from 0 and gives them in rising order."""
    return {"indices": [state - 1 for state in sorted(set(states))], "output_fmt": "NCHW"}


def _in_order(states: Sequence[int], maps: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """timm's maps (images, channels, rows, columns) as tokens, one for each of ``states``."""
    by_state = dict(zip(sorted(set(states)), maps, strict=True))
    return tuple(by_state[state].flatten(2).transpose(1, 2) for state in states)


def _depth(model: Any) -> int:
    """Layers that hidden states can be taken from: those of a model that keeps one grid from the first to the last."""
    stages = getattr(model, "feature_info", None) or ()
    plain = len({str(stage["reduction"]) for stage in stages}) == 1 and hasattr(model, "forward_intermediates")
    return len(stages) if plain else 0


def _channels(model: Any) -> int:
    return model.num_features


def _patch_size(model: Any) -> int:
    stages = getattr(model, "feature_info", None)
    size = stages[-1]["reduction"] if stages else getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if size is None:
        raise ValueError(f"{type(model).__name__} has neither feature_info nor patch_embed.patch_size")
    sides = size if isinstance(size, (tuple, list)) else (size, size)
    if sides[0] != sides[1]:
        raise ValueError(f"{type(model).__name__} has patches of {tuple(sides)} pixels; allowed: square ones")
    return int(sides[0])
