"""VisionConfig: what a vision encoder computes, for every family; sizes and structure, no tensor."""

from __future__ import annotations

from dataclasses import dataclass

from atb_modules.checks import check_bool, check_int, check_number, check_positive, check_type
from atb_modules.mlp import MLPType
from atb_modules.norm import NormType
from atb_modules.strategies import parse_enum

from .image_size import HEIGHT_WIDTH, check_size
from .positions import PositionConfig


@dataclass(frozen=True)
class VisionConfig:
    """One vision encoder.

    Args:
        family: the family's name, for messages.
        hidden_size, num_layers, num_heads, intermediate_size: of the layers.
        patch_size: side of a patch in pixels.
        in_channels: of the pixels.
        temporal_patch_size: frames in a patch.
        merge_size: side of the blocks of patches that a projector merges later; patches come block by block.
        image_size: (height, width) of the images of a fixed-size tower; None for a packed tower, which takes patches
            of images of any size.
        patch_bias, qkv_bias, mlp_bias: which projections have biases; the output projection always has one.
        mlp_type, norm_type, norm_eps: of the layers.
        layer_scale: whether each branch has a trained factor a channel (DINOv2).
        class_token: whether a class token stands before the patches, with a learned position of its own.
        num_registers: register tokens between the class token and the patches; they have no position.
        pre_norm: whether the embeddings are normed before the first layer (CLIP).
        post_norm: whether there is a norm behind the last layer.
        last_is_normed: whether the tower's own output, with no layer selected, has passed that norm.
        positions: learned positions and how they are resampled, None for none.
        rotary_base: base of the 2-D rotary positions, None for none.
        window: side in pixels of the windows that attention stays in, None for whole images (Qwen2.5-VL).
        full_attention_layers: the layers, from 0, that see whole images in spite of ``window``.

    Raises:
        ValueError, TypeError: sizes that are none or do not go together, naming the argument.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    in_channels: int = 3
    temporal_patch_size: int = 1
    merge_size: int = 1
    image_size: tuple[int, int] | None = None
    patch_bias: bool = True
    qkv_bias: bool = True
    mlp_bias: bool = True
    mlp_type: str = MLPType.GELU
    norm_type: str = NormType.LAYERNORM
    norm_eps: float = 1e-6
    layer_scale: bool = False
    class_token: bool = False
    num_registers: int = 0
    pre_norm: bool = False
    post_norm: bool = False
    last_is_normed: bool = False
    positions: PositionConfig | None = None
    rotary_base: float | None = None
    window: int | None = None
    full_attention_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_layers",
            "num_heads",
            "intermediate_size",
            "patch_size",
            "in_channels",
            "temporal_patch_size",
            "merge_size",
        ):
            check_int(name, getattr(self, name))
        check_type("family", self.family, str)
        check_int("num_registers", self.num_registers, least=0)
        check_int("window", self.window, optional=True)
        for name in ("patch_bias", "qkv_bias", "mlp_bias", "layer_scale", "class_token", "pre_norm"):
            check_bool(name, getattr(self, name))
        for name in ("post_norm", "last_is_normed"):
            check_bool(name, getattr(self, name))
        check_positive("norm_eps", self.norm_eps)
        check_type("positions", self.positions, PositionConfig, optional=True)
        object.__setattr__(self, "mlp_type", parse_enum(MLPType, self.mlp_type, "mlp_type"))
        object.__setattr__(self, "norm_type", parse_enum(NormType, self.norm_type, "norm_type"))
        check_number("rotary_base", self.rotary_base, "a number greater than 1", lambda base: base > 1, optional=True)
        if self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads is {self.num_heads}; it must divide hidden_size {self.hidden_size}")
        head_dim = self.hidden_size // self.num_heads
        if self.rotary_base is not None and head_dim % 4:
            raise ValueError(
                f"head_dim is {head_dim}; 2-D rotary positions need a multiple of 4, half of it for each axis"
            )
        if self.window is not None and self.window < self.patch_size * self.merge_size:
            raise ValueError(
                f"window is {self.window} pixels; allowed: at least patch_size x merge_size, "
                f"{self.patch_size * self.merge_size}"
            )
        object.__setattr__(self, "full_attention_layers", self._checked_layers())
        outside = [layer for layer in self.full_attention_layers if not 0 <= layer < self.num_layers]
        if outside:
            raise ValueError(f"full_attention_layers has {outside}; allowed: 0 to {self.num_layers - 1}")
        if self.last_is_normed and not self.post_norm:
            raise ValueError("last_is_normed is True and post_norm False; allowed: both True, or False")
        if self.image_size is not None:
            check_size("image_size", self.image_size, HEIGHT_WIDTH)
            object.__setattr__(self, "image_size", tuple(self.image_size))
            self._check_fixed(self.image_size)
        elif self.class_token or self.num_registers:
            raise ValueError("image_size is None, a packed tower, which has neither class token nor registers")

    def _checked_layers(self) -> tuple[int, ...]:
        layers = self.full_attention_layers
        if not isinstance(layers, (tuple, list)):
            raise TypeError(
                f"full_attention_layers is {layers!r:.80} ({type(layers).__name__}); allowed: a tuple of ints"
            )
        for index, layer in enumerate(layers):
            check_int(f"full_attention_layers[{index}]", layer, least=0)
        return tuple(layers)

    def _check_fixed(self, image_size: tuple[int, int]) -> None:
        for side, name in zip(image_size, HEIGHT_WIDTH, strict=True):
            if side < self.patch_size:
                raise ValueError(f"image_size is {image_size}; its {name} is less than patch_size {self.patch_size}")
        if self.temporal_patch_size != 1 or self.window is not None or self.rotary_base is not None:
            raise ValueError("image_size is given; temporal patches, windows and rotary positions need a packed tower")
        grid = (image_size[0] // self.patch_size, image_size[1] // self.patch_size)
        if self.positions is not None and self.positions.grid != grid:
            raise ValueError(f"positions.grid is {self.positions.grid}; image_size {image_size} makes it {grid}")

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: class token and registers."""
        return int(self.class_token) + self.num_registers

    @property
    def patch_values(self) -> int:
        """Numbers in a flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2
