"""Where a foreign tensor of a vision checkpoint lives in our tower: views of our parameters under foreign names.

Canonical parts of a tower and of a layer::

    patch_embed  class_token  registers  positions  pre_norm  post_norm
    attention_norm  qkv (or q, k, v)  o  mlp_norm  gate_up (or gate, up)  up  down  attention_scale  mlp_scale
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from atb_modules.attention.qkv import FusedQKV
from atb_modules.layer import TransformerLayer
from atb_modules.mlp import FeedForward
from atb_modules.multimodal.vision import VisionTower


@dataclass(frozen=True)
class VisionNames:
    """Foreign names of a family's tensors, as its files have them, relative to the vision model's root.

    Args:
        layers: what stands before a layer's parts, with ``{}`` for its number.
        tower, layer: foreign name of each canonical part, without ``.weight`` or ``.bias``.
        bare: parts whose parameter has no such ending.
        patch_axes: axes of a patch in the foreign kernel: 4 a Conv2d's, 5 a Conv3d's, 2 a Linear's.
        leading: foreign axes of length 1 before ours, by part.
    """

    layers: str
    tower: Mapping[str, str]
    layer: Mapping[str, str]
    bare: frozenset[str] = frozenset()
    patch_axes: int = 4
    leading: Mapping[str, int] = field(default_factory=dict)

    @property
    def marker(self) -> str:
        """The tensor by which a file's root is found."""
        return f"{self.tower['patch_embed']}.weight"


def tower_slots(tower: VisionTower, names: VisionNames) -> dict[str, Tensor]:
    """Every parameter of the tower by its foreign name: its memory in the foreign shape, to read from or copy into."""
    slots: dict[str, Tensor] = {}
    for part, kind, tensor in _tower_parts(tower):
        if part == "patch_embed" and kind == "weight":
            tensor = tensor.view(_kernel_shape(tower, names.patch_axes))
        tensor = tensor.view(*(1,) * names.leading.get(part, 0), *tensor.shape)
        slots[_ended(names, part, names.tower[part], kind)] = tensor
    for index, layer in enumerate(tower.layers):
        assert isinstance(layer, TransformerLayer)
        for part, kind, tensor in _layer_parts(layer, names.layer):
            name = names.layers.format(index) + names.layer[part]
            slots[_ended(names, part, name, kind)] = tensor
    return slots


def _ended(names: VisionNames, part: str, name: str, kind: str) -> str:
    return name if part in names.bare else f"{name}.{kind}"


def _kernel_shape(tower: VisionTower, axes: int) -> tuple[int, ...]:
    config = tower.config
    pixels = (config.patch_size, config.patch_size)
    return {
        2: (config.hidden_size, config.patch_values),
        4: (config.hidden_size, config.in_channels, *pixels),
        5: (config.hidden_size, config.in_channels, config.temporal_patch_size, *pixels),
    }[axes]


def _tower_parts(tower: VisionTower) -> Iterator[tuple[str, str, Tensor]]:
    yield from _of("patch_embed", tower.patch_embed.proj)
    for part, tensor in (("class_token", tower.class_token), ("registers", tower.registers)):
        if tensor is not None:
            yield part, "weight", tensor.detach()
    if tower.positions is not None:
        yield "positions", "weight", tower.positions.weight.detach()
    for part, norm in (("pre_norm", tower.pre_norm), ("post_norm", tower.post_norm)):
        if norm is not None:
            yield from _of(part, norm)


def _of(part: str, module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for kind, parameter in module.named_parameters(recurse=False):
        yield part, kind, parameter.detach()


def _layer_parts(layer: TransformerLayer, names: Mapping[str, str]) -> Iterator[tuple[str, str, Tensor]]:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention.qkv, FusedQKV) and isinstance(mlp, FeedForward)
    yield from _of("attention_norm", layer.attention_norm)
    yield from _of("mlp_norm", layer.mlp_norm)
    width = attention.num_heads * attention.head_dim
    yield from _fused("qkv", ("q", "k", "v"), width, attention.qkv.qkv_proj, names)
    yield from _of("o", attention.o_proj)
    if mlp.mlp_type.is_gated:
        yield from _fused("gate_up", ("gate", "up"), mlp.intermediate_size, mlp.gate_up_proj, names)
    else:
        yield from _of("up", mlp.up_proj)
    yield from _of("down", mlp.down_proj)
    for part, branch in (("attention_scale", layer.attention_branch), ("mlp_scale", layer.mlp_branch)):
        if branch.layer_scale is not None:
            yield part, "weight", branch.layer_scale.detach()


def _fused(
    whole: str, parts: tuple[str, ...], rows: int, module: nn.Module, names: Mapping[str, str]
) -> Iterator[tuple[str, str, Tensor]]:
    """The fused parameter itself where the file has it fused too, else its parts, ``rows`` output channels each."""
    for _, kind, tensor in _of(whole, module):
        if whole in names:
            yield whole, kind, tensor
        else:
            for number, part in enumerate(parts):
                yield part, kind, tensor[number * rows : (number + 1) * rows]
