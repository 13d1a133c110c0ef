"""MultiModalTransformerLayer: norms, multimodal attention, feed-forwards and residuals of two streams side by side.

For both streams, vision and text, in the order that was asked for:

pre         x = x + attn(norm(x));              x = x + mlp(norm(x))
post        x = norm(a x + attn(x));            x = norm(a x + mlp(x))    (a is 1, or DeepNorm's alpha)
sandwich    x = x + norm(attn(norm(x)));        x = x + norm(mlp(norm(x)))
parallel    x = x + attn(norm(x)) + mlp(norm(x))      (one norm)

The streams meet in the attention alone. Norms and feed-forwards are shared or each stream's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.attention import AttentionConfig, CacheStep, KVCacheManager
from atb_modules.checks import check_bool, check_int, check_parameter_dtype, check_type
from atb_modules.layer import NormPlacement
from atb_modules.layer_options import attention_options, stream_scale
from atb_modules.mlp import MLPConfig, MLPType, build_mlp
from atb_modules.multimodal.attention.config import MultiModalConfig, parts_of
from atb_modules.multimodal.attention.module import MultiModalAttention
from atb_modules.multimodal.attention.spec import CrossAttentionMode, MultiModalLayout
from atb_modules.multimodal.attention.tokens import Lengths, RotaryTables, both_streams
from atb_modules.norm import NormConfig, build_norm
from atb_modules.norm.add import add_norm
from atb_modules.residual import ResidualBranch, ResidualConfig
from atb_modules.strategies import MultiModalStrategy, parse_enum

MODALITIES = ("vision", "text")


class MultiModalTransformerLayer(nn.Module):
    """One Transformer layer over vision and text tokens that stay apart.

    Args:
        vision_seq_len, text_seq_len: the most tokens of each that a row brings in one call.
        hidden_size: channels of both streams.
        num_heads: query heads.
        head_dim: channels a head; default hidden_size / num_heads.
        intermediate_size: channels inside the feed-forwards; default 4 * hidden_size.
        num_kv_heads: key and value heads; default num_heads.
        cross_attention_mode, strategy, attention_type: see ``MultiModalAttention``.
        layernorm_type, mlp_type, norm_placement, qk_norm, bias: see ``TransformerLayer``.
        multimodal: a ``MultiModalConfig``: which projections, norms and feed-forwards are shared, and the positions.
        attention, norm, mlp, residual: ``AttentionConfig``, ``NormConfig``, ``MLPConfig``, ``ResidualConfig`` with
            everything else.
        layer_idx: this layer's number in a cache; taken in order where not given.
        device, dtype: of the parameters.

    Parameters of a part that is shared stand under ``shared``, others under ``vision`` and ``text``.

    Raises:
        ValueError, TypeError: for sizes, words or combinations that are not allowed, naming the argument.
    """

    def __init__(
        self,
        vision_seq_len: int,
        text_seq_len: int,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        *,
        num_kv_heads: int | None = None,
        cross_attention_mode: CrossAttentionMode | str = CrossAttentionMode.TEXT_SEE_VISION,
        strategy: MultiModalStrategy | str = MultiModalStrategy.AUTO,
        attention_type: str = "flash",
        layernorm_type: str = "rmsnorm",
        mlp_type: str = MLPType.SWIGLU,
        norm_placement: str = NormPlacement.PRE,
        qk_norm: str | None = None,
        bias: bool = False,
        multimodal: MultiModalConfig | None = None,
        attention: AttentionConfig | None = None,
        norm: NormConfig | None = None,
        mlp: MLPConfig | None = None,
        residual: ResidualConfig | None = None,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.placement = parse_enum(NormPlacement, norm_placement, "norm_placement")
        for name, value, kind in (
            ("multimodal", multimodal, MultiModalConfig),
            ("attention", attention, AttentionConfig),
            ("norm", norm, NormConfig),
            ("mlp", mlp, MLPConfig),
            ("residual", residual, ResidualConfig),
        ):
            check_type(name, value, kind, optional=True)
        check_bool("bias", bias)
        check_parameter_dtype(dtype)
        check_int("hidden_size", hidden_size)
        check_int("num_heads", num_heads)
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(
                    f"num_heads is {num_heads}; it must divide hidden_size {hidden_size}, or give head_dim"
                )
            head_dim = hidden_size // num_heads
        multimodal = multimodal if multimodal is not None else MultiModalConfig()
        norm = norm if norm is not None else NormConfig()
        residual = residual if residual is not None else ResidualConfig()
        mlp = mlp if mlp is not None else MLPConfig(bias=bias)
        self.residual_scale = stream_scale(residual, self.placement)
        self.hidden_size, self.multimodal = hidden_size, multimodal
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention = MultiModalAttention(
            vision_seq_len,
            text_seq_len,
            num_heads,
            head_dim,
            hidden_size,
            num_kv_heads=num_kv_heads,
            cross_attention_mode=cross_attention_mode,
            strategy=strategy,
            attention_type=attention_type,
            multimodal=multimodal,
            config=attention_options(attention, True, qk_norm, bias, norm),
            layer_idx=layer_idx,
            **where,
        )
        width = 4 * hidden_size if intermediate_size is None else intermediate_size
        norms, mlps = parts_of(multimodal.norms), parts_of(multimodal.mlps)

        def make_norms() -> nn.ModuleDict:
            return nn.ModuleDict({name: build_norm(layernorm_type, hidden_size, norm, **where) for name in norms})

        def make_branches() -> nn.ModuleDict:
            return nn.ModuleDict({name: ResidualBranch(hidden_size, residual, **where) for name in mlps})

        self.mlp = nn.ModuleDict({name: build_mlp(hidden_size, width, mlp_type, mlp, **where) for name in mlps})
        self.attention_norm = make_norms()
        self.attention_branch, self.mlp_branch = make_branches(), make_branches()
        if self.placement is not NormPlacement.PARALLEL:
            self.mlp_norm = make_norms()
        if self.placement is NormPlacement.SANDWICH:
            self.attention_post_norm, self.mlp_post_norm = make_norms(), make_norms()

    @property
    def layer_idx(self) -> int | None:
        """This layer's number in its cache."""
        return self.attention.layer_idx

    def forward(
        self,
        vision: Tensor | None,
        text: Tensor | None,
        *,
        vision_lengths: Lengths | None = None,
        text_lengths: Lengths | None = None,
        image_lengths: Sequence[Sequence[int]] | None = None,
        vision_mask: Tensor | None = None,
        text_mask: Tensor | None = None,
        layout: MultiModalLayout | None = None,
        vision_positions: Tensor | None = None,
        text_positions: Tensor | None = None,
        vision_tables: RotaryTables | None = None,
        text_tables: RotaryTables | None = None,
        kv_cache: KVCacheManager | None = None,
        cache_step: CacheStep | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer; all arguments as in ``MultiModalAttention.forward``.

        Returns:
            vision and text, updated, in the shapes they came in. Padded positions get no attention; what stands there
            is to be left unread.
        """
        options: dict[str, Any] = {
            "vision_lengths": vision_lengths,
            "text_lengths": text_lengths,
            "image_lengths": image_lengths,
            "vision_mask": vision_mask,
            "text_mask": text_mask,
            "layout": layout,
            "vision_positions": vision_positions,
            "text_positions": text_positions,
            "vision_tables": vision_tables,
            "text_tables": text_tables,
            "kv_cache": kv_cache,
            "cache_step": cache_step,
        }
        vision, text = both_streams(vision, text, self.hidden_size, packed=layout is not None)
        with torch.set_grad_enabled(torch.is_grad_enabled() and kv_cache is None):
            return self._run((vision, text), options)

    def _run(self, streams: tuple[Tensor, Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        normed = streams
        if self.placement is not NormPlacement.POST:
            normed = self._each(self.attention_norm, streams)
        attended = self.attention(*normed, **options)
        if self.placement is NormPlacement.SANDWICH:
            attended = self._each(self.attention_post_norm, attended)
        attended = self._each(self.attention_branch, attended)
        results = []
        for name, x, before, branch in zip(MODALITIES, streams, normed, attended, strict=True):
            results.append(self._rest(name, x, before, branch))
        return results[0], results[1]

    def _rest(self, name: str, x: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        """One stream from its attention on."""
        mlp, branch = part_of(self.mlp, name), part_of(self.mlp_branch, name)
        if self.placement is NormPlacement.PARALLEL:
            return x + attended + branch(mlp(normed))
        if self.placement is NormPlacement.POST:
            x, _ = add_norm(part_of(self.attention_norm, name), attended, self._scaled(x))
            x, _ = add_norm(part_of(self.mlp_norm, name), branch(mlp(x)), self._scaled(x))
            return x
        normed, x = add_norm(part_of(self.mlp_norm, name), attended, x)
        mixed = mlp(normed)
        if self.placement is NormPlacement.SANDWICH:
            mixed = part_of(self.mlp_post_norm, name)(mixed)
        return x + branch(mixed)

    def _each(self, parts: nn.ModuleDict, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        vision, text = (part_of(parts, name)(x) for name, x in zip(MODALITIES, streams, strict=True))
        return vision, text

    def _scaled(self, x: Tensor) -> Tensor:
        """The stream as it joins a branch."""
        return x if self.residual_scale == 1.0 else x * self.residual_scale

    def extra_repr(self) -> str:
        sharing = f"norms={self.multimodal.norms}, mlps={self.multimodal.mlps}"
        return f"{self.hidden_size}, norm={self.placement.value}, {sharing}"


def part_of(parts: nn.ModuleDict, name: str) -> nn.Module:
    """The modality's own module, or the shared one."""
    return parts[name if name in parts else "shared"]
