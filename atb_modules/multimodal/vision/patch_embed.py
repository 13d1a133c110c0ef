"""PatchEmbed: patches of pixels become tokens, by one matrix product.

A convolution whose stride is its kernel is a product of flattened patches with the flattened kernel, so images
(B, C, H, W), video clips and patches that a processor has already cut all meet in the same weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atb_modules.checks import check_floating, check_int, check_tensor
from atb_modules.linear import Linear


def cut_patches(images: Tensor, patch_size: int) -> Tensor:
    """Images (B, C, H, W) as flattened patches (B, H // p * W // p, C * p * p), row by row.

    Channels come first inside a patch, as in a convolution's kernel. Pixels past the last whole patch are left out.
    """
    check_tensor("images", images, "a tensor (B, C, H, W)")
    check_int("patch_size", patch_size)
    if images.dim() != 4:
        raise ValueError(f"images has shape {tuple(images.shape)}; allowed: (B, C, H, W)")
    rows, columns = images.shape[-2] // patch_size, images.shape[-1] // patch_size
    images = images[..., : rows * patch_size, : columns * patch_size]
    cut = images.unflatten(3, (columns, patch_size)).unflatten(2, (rows, patch_size))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class PatchEmbed(nn.Module):
    """``proj`` of flattened patches.

    Args:
        patch_size: side of a patch in pixels.
        hidden_size: channels of a token.
        in_channels: channels of the pixels.
        temporal_patch_size: frames in a patch.
        bias: whether the product has a bias.

    The weight is (hidden_size, in_channels * temporal_patch_size * patch_size ** 2), a convolution's kernel flattened.
    """

    def __init__(
        self,
        patch_size: int,
        hidden_size: int,
        *,
        in_channels: int = 3,
        temporal_patch_size: int = 1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("patch_size", patch_size),
            ("in_channels", in_channels),
            ("temporal_patch_size", temporal_patch_size),
        ):
            check_int(name, value)
        self.patch_size, self.in_channels, self.temporal_patch_size = patch_size, in_channels, temporal_patch_size
        self.patch_values = in_channels * temporal_patch_size * patch_size**2
        self.proj = Linear(self.patch_values, hidden_size, bias, device=device, dtype=dtype)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Tokens of images or patches, in the weight's dtype.

        Args:
            pixel_values: images (B, C, H, W) where patches are one frame deep, or flattened patches
                (patches, C * T * P * P) in a kernel's order: channel, frame, row, column.

        Returns:
            (B, patches, hidden_size), or (patches, hidden_size).

        Raises:
            ValueError, TypeError: another shape or dtype, naming both numbers.
        """
        check_floating("pixel_values", pixel_values, "a tensor (images, channels, height, width) or of patches")
        if pixel_values.dim() == 4 and self.temporal_patch_size == 1:
            if pixel_values.shape[1] != self.in_channels:
                raise ValueError(f"pixel_values has {pixel_values.shape[1]} channels; the tower has {self.in_channels}")
            for side, name in zip(pixel_values.shape[2:], ("high", "wide"), strict=True):
                if side < self.patch_size:
                    raise ValueError(
                        f"pixel_values is {side} pixels {name}; allowed: at least patch_size {self.patch_size}"
                    )
            pixel_values = cut_patches(pixel_values.to(self.proj.weight.dtype), self.patch_size)
        elif pixel_values.dim() != 2 or pixel_values.shape[1] != self.patch_values:
            raise ValueError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; allowed: (patches, {self.patch_values}), "
                f"{self.in_channels} channels x {self.temporal_patch_size} frames x {self.patch_size} x "
                f"{self.patch_size} pixels"
            )
        return self.proj(pixel_values.to(self.proj.weight.dtype))

    def extra_repr(self) -> str:
        return f"patch_size={self.patch_size}, in_channels={self.in_channels}, frames={self.temporal_patch_size}"
