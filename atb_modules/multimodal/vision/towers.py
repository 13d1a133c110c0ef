"""Vision towers: patches to tokens through TransformerLayers. One encoder for all families; a config says the rest.

``ImageTower`` takes images of one size (CLIP, SigLIP, DINOv2), ``PackedTower`` patches of images of any size in one
sequence (Qwen-VL, SigLIP2 NaFlex). Neither holds a projector, a pooling head or a merger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.attention import AttentionConfig, RotaryConfig
from atb_modules.checks import check_device, check_floating, check_parameter_dtype, check_tensor, check_type
from atb_modules.layer import LayerType, TransformerLayer
from atb_modules.mlp import MLPConfig
from atb_modules.norm import NormCastOrder, NormConfig, build_norm
from atb_modules.overlays import Overlays
from atb_modules.residual import ResidualConfig

from .config import VisionConfig
from .packing import GridTHW, Windows, frame_starts, merge_order, patch_positions, read_grids, window_partition
from .patch_embed import PatchEmbed
from .positions import LearnedPositions, rotary_tables_2d
from .recording import recording
from .selection import SelectLayer, checked_layers, resolve_selection

RunLayer = Callable[[int, Tensor], Tensor]


class VisionTower(nn.Module):
    """What the two kinds of tower share: the layers, and which of their outputs are returned.

    Args:
        config: what the encoder computes.
        select_layer: which hidden state is returned, or several, joined along the channels; see
            ``atb_modules.multimodal.vision.selection``. None is the last one.
        final_norm: whether the returned states pass the norm behind the last layer; None as transformers does.
        attention_type: of every layer; see ``TransformerLayer``.
        device, dtype: of the parameters.

    Layers past the last one selected never run; they are built all the same, so that what was loaded can be saved.
    Where neither parameters nor pixels require a gradient, none is recorded and nothing is kept for a backward.

    Attributes:
        hidden_size: channels of a layer.
        out_channels: channels of what ``forward`` returns, hidden_size times the number of selected states.
        num_prefix_tokens: tokens before the patches inside the tower; they are not returned.
        patch_size: side of a patch in pixels.
        unused_tensors: names of the checkpoint's tensors that the tower has no place for.
        fixed_size: whether this kind of tower takes images of a config with an image_size.
    """

    fixed_size = False

    def __init__(
        self,
        config: VisionConfig,
        *,
        select_layer: SelectLayer = None,
        final_norm: bool | None = None,
        attention_type: str = "flash",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_type("config", config, VisionConfig)
        check_device(device)
        check_parameter_dtype(dtype)
        if (config.image_size is not None) is not self.fixed_size:
            takes = "an image_size" if self.fixed_size else "None, a packed tower's"
            raise ValueError(f"config.image_size is {config.image_size}; {type(self).__name__} allows {takes}")
        self.config = config
        self.selection = resolve_selection(
            select_layer, final_norm, config.num_layers, config.post_norm, config.last_is_normed
        )
        self.hidden_size = config.hidden_size
        self.out_channels = config.hidden_size * len(self.selection.states)
        self.num_prefix_tokens = config.num_prefix_tokens
        self.patch_size = config.patch_size
        self.unused_tensors: tuple[str, ...] = ()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self._build_embeddings(**where)
        norm = NormConfig(eps=config.norm_eps, cast_order=NormCastOrder.WEIGHT_LAST)
        self.pre_norm = self.post_norm = None
        if config.pre_norm:
            self.pre_norm = build_norm(config.norm_type, config.hidden_size, norm, **where)
        self.layers = nn.ModuleList(_layer(config, norm, attention_type, **where) for _ in range(config.num_layers))
        if config.post_norm:
            self.post_norm = build_norm(config.norm_type, config.hidden_size, norm, **where)

    def _build_embeddings(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        config = self.config
        self.patch_embed = PatchEmbed(
            config.patch_size,
            config.hidden_size,
            in_channels=config.in_channels,
            temporal_patch_size=config.temporal_patch_size,
            bias=config.patch_bias,
            device=device,
            dtype=dtype,
        )
        self.positions: LearnedPositions | None = None
        if config.positions is not None:
            self.positions = LearnedPositions(
                config.hidden_size, config.positions, num_prefix=int(config.class_token), device=device, dtype=dtype
            )
        self.class_token = self.registers = None
        if config.class_token:
            self.class_token = nn.Parameter(torch.zeros(config.hidden_size, device=device, dtype=dtype))
        if config.num_registers:
            shape = config.num_registers, config.hidden_size
            self.registers = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

    @property
    def device(self) -> torch.device:
        return self.patch_embed.proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embed.proj.weight.dtype

    def _states(self, x: Tensor, run: RunLayer, extra: Sequence[int]) -> dict[int, Tensor]:
        """Hidden states by number: those selected and ``extra``; layers behind the last of them do not run."""
        wanted = {*self.selection.states, *extra}
        kept = {0: x} if 0 in wanted else {}
        for number in range(1, max(wanted) + 1):
            x = run(number - 1, x)
            if number in wanted:
                kept[number] = x
        return kept

    def _join(self, states: dict[int, Tensor]) -> Tensor:
        chosen = [states[number] for number in self.selection.states]
        if self.selection.norm:
            assert self.post_norm is not None
            chosen = [self.post_norm(state) for state in chosen]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)

    def extra_repr(self) -> str:
        selection = self.selection
        return f"{self.config.family}, states={selection.states} of {len(self.layers)}, normed={selection.norm}"


class ImageTower(VisionTower):
    """A tower for images of one size, or of any size that its positions are resampled to."""

    fixed_size = True

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Tokens of the patches.

        Args:
            pixel_values: (images, channels, height, width).

        Returns:
            (images, patches, out_channels), row by row, without prefix tokens.

        Raises:
            ValueError, TypeError: another number of channels, or a size that the tower does not take.
        """
        return self._forward(pixel_values, ())[0]

    def forward_intermediates(self, pixel_values: Tensor, layers: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``forward``'s tokens, and the tokens (images, patches, hidden_size) behind each of ``layers``, from 0."""
        return self._forward(pixel_values, checked_layers(layers, len(self.layers)))

    def _forward(self, pixel_values: Tensor, extra: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        grid = self.grid_of(pixel_values)
        prefix = self.num_prefix_tokens
        with recording(self, pixel_values):
            x = self._embed(pixel_values, grid)
            states = self._states(x, lambda index, hidden: self.layers[index](hidden), extra)
            if prefix:
                states = {number: state[:, prefix:] for number, state in states.items()}
            return self._join(states), tuple(states[number] for number in extra)

    def grid_of(self, pixel_values: Tensor) -> tuple[int, int]:
        """(rows, columns) of the patches of images (images, channels, height, width); raises where there is none."""
        config = self.config
        check_floating("pixel_values", pixel_values, "a tensor (images, channels, height, width)")
        # weights on meta may be ones that hooks bring in layer by layer
        if self.device.type != "meta" and pixel_values.device != self.device:
            raise ValueError(f"pixel_values is on {pixel_values.device}; the tower is on {self.device}")
        if pixel_values.dim() != 4:
            raise ValueError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; allowed: (images, {config.in_channels}, height, "
                "width)"
            )
        if pixel_values.shape[1] != config.in_channels:
            raise ValueError(f"pixel_values has {pixel_values.shape[1]} channels; the tower has {config.in_channels}")
        size = (pixel_values.shape[2], pixel_values.shape[3])
        if size != config.image_size:
            if config.positions is not None and config.positions.interpolation is None:
                raise ValueError(f"pixel_values is {size[0]} x {size[1]} pixels; the tower takes {config.image_size}")
            for side, name in zip(size, ("high", "wide"), strict=True):
                if side < self.patch_size or side % self.patch_size:
                    raise ValueError(
                        f"pixel_values is {side} pixels {name}; allowed: multiples of patch_size {self.patch_size}"
                    )
        return size[0] // self.patch_size, size[1] // self.patch_size

    def _embed(self, pixel_values: Tensor, grid: tuple[int, int]) -> Tensor:
        x = self.patch_embed(pixel_values)
        if self.positions is not None:
            x = x + self.positions(grid)
        before = []
        if self.class_token is not None:
            token = self.class_token.unsqueeze(0)
            before.append(token if self.positions is None else token + self.positions.prefix())
        if self.registers is not None:
            before.append(self.registers)
        if before:
            x = torch.cat([*(tokens.expand(x.shape[0], -1, -1) for tokens in before), x], dim=1)
        return x if self.pre_norm is None else self.pre_norm(x)


class PackedTower(VisionTower):
    """A tower for patches of images and videos of any size, packed in one sequence; each frame attends to itself."""

    def forward(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        """Tokens of the patches.

        Args:
            pixel_values: flattened patches (patches, C * T * P * P), as the family's processor makes them; see
                ``pack_images``.
            grid_thw: int64 (images, 3), frames, rows and columns in patches.

        Returns:
            (patches, out_channels), in the order in which the patches were fed.

        Raises:
            ValueError, TypeError: grids that are not those of the patches, or that merge_size does not divide.
        """
        return self._forward(pixel_values, grid_thw, ())[0]

    def forward_intermediates(
        self, pixel_values: Tensor, grid_thw: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``forward``'s tokens, and the tokens (patches, hidden_size) behind each of ``layers``.

        ``layers`` count from 0, as Qwen3-VL's ``deepstack_visual_indexes`` do.
        """
        return self._forward(pixel_values, grid_thw, checked_layers(layers, len(self.layers)))

    def _forward(
        self, pixel_values: Tensor, grid_thw: Tensor, extra: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        check_tensor("pixel_values", pixel_values, "a tensor (patches, values)")
        patches = pixel_values.shape[0] if pixel_values.dim() else None
        grids = read_grids(grid_thw, patches, self.config.merge_size)
        with recording(self, pixel_values):
            x = self.patch_embed(pixel_values)
            if not x.shape[0]:
                # of x, so that a batch without images still has a gradient to give
                return x.repeat(1, len(self.selection.states)), tuple(x for _ in extra)
            x = x if self.positions is None else x + self._positions(grids, self.positions)
            x = x if self.pre_norm is None else self.pre_norm(x)
            run, windows = self._layer_runner(grids, x.device)
            x = x if windows is None else windows.gather(x)
            states = self._states(x.unsqueeze(0), run, extra)
            states = {number: state.squeeze(0) for number, state in states.items()}
            if windows is not None:
                states = {number: windows.scatter(state) for number, state in states.items()}
            return self._join(states), tuple(states[number] for number in extra)

    def _positions(self, grids: tuple[GridTHW, ...], positions: LearnedPositions) -> Tensor:
        """(patches, hidden_size); each distinct grid is resampled once."""
        merge = self.config.merge_size
        frames: dict[tuple[int, int], Tensor] = {}
        for _, h, w in grids:
            if (h, w) not in frames:
                table = positions((h, w))
                frames[h, w] = table if merge == 1 else table[merge_order(h, w, merge, table.device)]
        return torch.cat([frames[h, w].repeat(t, 1) if t > 1 else frames[h, w] for t, h, w in grids])

    def _layer_runner(self, grids: tuple[GridTHW, ...], device: torch.device) -> tuple[RunLayer, Windows | None]:
        """What runs a layer, and the order of windows that its tokens must stand in."""
        config = self.config
        frames = frame_starts(grids, device)
        whole = Overlays(frames, frames)
        windows = None
        if config.window is not None:
            side = config.window // config.merge_size // config.patch_size
            windows = window_partition(grids, config.merge_size, side, device)
        within = whole if windows is None else Overlays(windows.cu_seqlens, windows.cu_seqlens)
        full = set(config.full_attention_layers)
        tables = None
        if config.rotary_base is not None:
            places = patch_positions(grids, config.merge_size, device)
            places = places if windows is None else windows.gather(places)
            tables = rotary_tables_2d(places, config.hidden_size // config.num_heads, config.rotary_base)

        def run(index: int, hidden: Tensor) -> Tensor:
            overlays = whole if index in full else within
            return self.layers[index](hidden, overlays=overlays, rotary_tables=tables)

        return run, windows


def build_tower(
    config: VisionConfig,
    *,
    select_layer: SelectLayer = None,
    final_norm: bool | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> ImageTower | PackedTower:
    """The tower of a config: an ``ImageTower`` where it has an image_size, else a ``PackedTower``."""
    check_type("config", config, VisionConfig)
    kind = PackedTower if config.image_size is None else ImageTower
    return kind(config, select_layer=select_layer, final_norm=final_norm, device=device, dtype=dtype)


def _layer(
    config: VisionConfig,
    norm: NormConfig,
    attention_type: str,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> TransformerLayer:
    return TransformerLayer(
        config.hidden_size,
        config.num_heads,
        intermediate_size=config.intermediate_size,
        layernorm_type=config.norm_type,
        attention_type=attention_type,
        mlp_type=config.mlp_type,
        layer_type=LayerType.ENCODER,
        rotary=None if config.rotary_base is None else RotaryConfig(base=config.rotary_base),
        attention=AttentionConfig(qkv_bias=config.qkv_bias, out_bias=True),
        norm=norm,
        mlp=MLPConfig(bias=config.mlp_bias),
        residual=ResidualConfig(layer_scale=1.0 if config.layer_scale else None),
        device=device,
        dtype=dtype,
    )
