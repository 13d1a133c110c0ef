"""TransformerLayer: norms, attention, feed-forward and residuals, in the order that was asked for. Read this first.

pre         x = x + attn(norm(x));              x = x + mlp(norm(x))
post        x = norm(a x + attn(x));            x = norm(a x + mlp(x))    (a is 1, or DeepNorm's alpha)
sandwich    x = x + norm(attn(norm(x)));        x = x + norm(mlp(norm(x)))
parallel    x = x + attn(norm(x)) + mlp(norm(x))      (one norm)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from atb_modules.attention import Attention, AttentionConfig, CacheStep, KVCacheManager, RotaryConfig, SparseConfig
from atb_modules.attention.cache.own import fit_own_cache, make_own_cache, undone_in_own
from atb_modules.attention.cache.refusal import undone_if_refused
from atb_modules.checks import check_bool, check_int, check_parameter_dtype, check_tensor, check_type
from atb_modules.fused_layer import FusedLayer
from atb_modules.layer_options import attention_options, check_across, stream_scale
from atb_modules.linear import may_overwrite
from atb_modules.mlp import FeedForward, MLPConfig, MLPType, build_mlp
from atb_modules.norm import NormConfig, build_norm
from atb_modules.overlays import Overlays
from atb_modules.residual import ResidualBranch, ResidualConfig
from atb_modules.strategies import parse_enum


class NormPlacement(StrEnum):
    """Where the norms stand; drawn at the top of this file."""

    PRE = "pre"
    POST = "post"
    SANDWICH = "sandwich"
    PARALLEL = "parallel"


class LayerType(StrEnum):
    """ENCODER sees both ways, DECODER is causal, CROSS_DECODER also attends to another sequence in between."""

    ENCODER = "encoder"
    DECODER = "decoder"
    CROSS_DECODER = "cross_decoder"


class LayerMode(StrEnum):
    """TRAIN records gradients; INFERENCE never does, and fuses what the backend can."""

    TRAIN = "train"
    INFERENCE = "inference"


class TransformerLayer(FusedLayer):
    """One Transformer layer of any common kind.

    Args:
        hidden_size: channels of the input and the output.
        num_heads: query heads.
        head_dim: channels a head; default hidden_size / num_heads.
        intermediate_size: channels inside the feed-forward; default 4 * hidden_size.
        num_kv_heads: key and value heads; default num_heads.
        layernorm_type: "rmsnorm" or "layernorm".
        attention_type: "flash" or "flash_sparse" (the registry picks the fastest), "sdpa", "eager" or "reference".
        mlp_type: "swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2", or
            "moe" for SwiGLU experts; ``MLPConfig(moe=...)`` makes experts of the others but "quick_gelu" and "relu".
        norm_placement: "pre", "post", "sandwich" or "parallel".
        layer_type: "decoder" (causal), "encoder" or "cross_decoder".
        mode: "train" or "inference" (no gradients; ``use_cache`` allowed).
        kv_cache_manager: the cache of all layers of a model; None lets a layer in inference mode make its own, for
            4,096 tokens a sequence. That one is sized by its first batch and grows for a larger one while it is empty.
        layer_idx: this layer's number in that cache; taken in order where not given.
        rotary: a ``RotaryConfig``, None for no rotary positions.
        qk_norm: None, "before_rotary" or "after_rotary": a norm of each head's queries and keys.
        sparse_config: a ``SparseConfig`` or a dict of its options, for the self attention.
        bias: whether all projections have biases.
        attention, norm, mlp, residual: ``AttentionConfig``, ``NormConfig``, ``MLPConfig``, ``ResidualConfig`` with
            everything else.
        device, dtype: of the parameters.

    Any norm may be replaced by a module that takes one tensor.

    Raises:
        ValueError: for sizes, words or combinations that are not allowed, naming the argument.
        TypeError: for an argument of another kind.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        *,
        num_kv_heads: int | None = None,
        layernorm_type: str = "rmsnorm",
        attention_type: str = "flash",
        mlp_type: str = MLPType.SWIGLU,
        norm_placement: str = NormPlacement.PRE,
        layer_type: str = LayerType.DECODER,
        mode: str = LayerMode.TRAIN,
        kv_cache_manager: KVCacheManager | None = None,
        layer_idx: int | None = None,
        rotary: RotaryConfig | None = None,
        qk_norm: str | None = None,
        sparse_config: SparseConfig | Mapping[str, Any] | None = None,
        bias: bool = False,
        attention: AttentionConfig | None = None,
        norm: NormConfig | None = None,
        mlp: MLPConfig | None = None,
        residual: ResidualConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.placement = parse_enum(NormPlacement, norm_placement, "norm_placement")
        self.layer_type = parse_enum(LayerType, layer_type, "layer_type")
        self.mode = parse_enum(LayerMode, mode, "mode")
        for name, value, kind in (
            ("attention", attention, AttentionConfig),
            ("norm", norm, NormConfig),
            ("mlp", mlp, MLPConfig),
            ("residual", residual, ResidualConfig),
            ("rotary", rotary, RotaryConfig),
            ("kv_cache_manager", kv_cache_manager, KVCacheManager),
        ):
            check_type(name, value, kind, optional=True)
        check_int("layer_idx", layer_idx, 0, optional=True)
        check_bool("bias", bias)
        check_parameter_dtype(dtype)
        norm, residual = norm or NormConfig(), residual or ResidualConfig()
        decoder = self.layer_type is not LayerType.ENCODER
        attention = attention_options(attention, decoder, qk_norm, bias, norm, sparse_config)
        mlp = mlp if mlp is not None else MLPConfig(bias=bias)
        if self.placement is NormPlacement.PARALLEL and self.layer_type is LayerType.CROSS_DECODER:
            raise ValueError("norm_placement is 'parallel'; layer_type 'cross_decoder' allows pre, post and sandwich")
        self.residual_scale = stream_scale(residual, self.placement)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        heads: dict[str, Any] = {"num_kv_heads": num_kv_heads, "attention_type": attention_type, "config": attention}
        heads |= where
        self.hidden_size = hidden_size
        self.attention = Attention(hidden_size, num_heads, head_dim, rotary=rotary, **heads)
        width = 4 * hidden_size if intermediate_size is None else intermediate_size
        self.mlp = build_mlp(hidden_size, width, mlp_type, mlp, **where)
        self.attention_norm = build_norm(layernorm_type, hidden_size, norm, **where)
        self.attention_branch = ResidualBranch(hidden_size, residual, **where)
        self.mlp_branch = ResidualBranch(hidden_size, residual, **where)
        if self.placement is not NormPlacement.PARALLEL:
            self.mlp_norm = build_norm(layernorm_type, hidden_size, norm, **where)
        if self.placement is NormPlacement.SANDWICH:
            self.attention_post_norm = build_norm(layernorm_type, hidden_size, norm, **where)
            self.mlp_post_norm = build_norm(layernorm_type, hidden_size, norm, **where)
        if self.layer_type is LayerType.CROSS_DECODER:
            # The other sequence has no order against this one: what hides keys by position stays behind.
            heads["config"] = dataclasses.replace(attention, causal=False, window=None, sparse=None, alibi=False)
            self.cross_attention = Attention(hidden_size, num_heads, head_dim, cross=True, **heads)
            self.cross_norm = build_norm(layernorm_type, hidden_size, norm, **where)
            self.cross_branch = ResidualBranch(hidden_size, residual, **where)
            if self.placement is NormPlacement.SANDWICH:
                self.cross_post_norm = build_norm(layernorm_type, hidden_size, norm, **where)
        self.kv_cache_manager = kv_cache_manager
        self._own_cache: KVCacheManager | None = None
        if layer_idx is None and kv_cache_manager is not None:
            layer_idx = kv_cache_manager.register_layer()
        self.attention.layer_idx = layer_idx
        if self.mode is LayerMode.INFERENCE:
            self.eval()

    @property
    def layer_idx(self) -> int | None:
        """This layer's number in its cache."""
        return self.attention.layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        encoder_hidden_states: Tensor | tuple[Tensor, Tensor] | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool = False,
        cache: KVCacheManager | None = None,
        cache_step: CacheStep | None = None,
        rotary_tables: tuple[Tensor, Tensor] | None = None,
        overlays: Overlays | None = None,
    ) -> Tensor | tuple[Tensor, KVCacheManager]:
        """Run the layer.

        Args:
            hidden_states: (batch, seq, hidden_size), or packed (tokens, hidden_size) with ``cache_step``.
            attention_mask, position_ids: see ``Attention.forward``.
            encoder_hidden_states: the other sequence of a cross decoder, (batch, seq, hidden_size), or what
                ``cross_attention.project_keys_values`` returned for it.
            encoder_attention_mask: its padding mask.
            use_cache: append to the layer's cache, attend to all of it, and return it too (inference mode).
            cache: another cache than the layer's own; such a call is not differentiable.
            cache_step: the step shared by all layers, with ``cache``.
            rotary_tables: cos and sin computed once for all layers.
            overlays: packed segments and images of the self attention; see ``Overlays``.

        Returns:
            hidden_states of the same shape; with ``use_cache``, ``(hidden_states, cache)``.
        """
        check_tensor("hidden_states", hidden_states, "a tensor (batch, seq, hidden_size)")
        check_bool("use_cache", use_cache)
        check_type("cache", cache, KVCacheManager, optional=True)
        if use_cache and cache is None:
            cache = self._cache(hidden_states)
        no_grad = self.mode is LayerMode.INFERENCE or cache is not None
        with torch.no_grad() if no_grad else contextlib.nullcontext(), self._undone(cache, cache_step):
            self._check_inputs(hidden_states, encoder_hidden_states, encoder_attention_mask)
            options: dict[str, Any] = {
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "kv_cache": cache,
                "cache_step": cache_step,
                "rotary_tables": rotary_tables,
            }
            if overlays is not None:
                options["overlays"] = overlays
            if cache is not None and cache is self._own_cache:
                options["cache_layer"] = 0
                if cache_step is None and hidden_states.dim() == 3:
                    fit_own_cache(cache, hidden_states.shape[0])
            across = {"key_value_states": encoder_hidden_states, "attention_mask": encoder_attention_mask}
            out = self._run(hidden_states, options, across)
        return (out, cache) if use_cache and cache is not None else out

    def _run(self, x: Tensor, options: dict, across: dict) -> Tensor:
        if self.placement is NormPlacement.PARALLEL:
            normed = self.attention_norm(x)
            attended = self.attention_branch(self.attention(normed, **options))
            return x + attended + self.mlp_branch(self.mlp(normed))
        if self.placement is NormPlacement.POST:
            branch = self.attention_branch(self.attention(x, **options))
            x, _ = self._add_norm(self.attention_norm, branch, self._scaled(x))
            if self.layer_type is LayerType.CROSS_DECODER:
                branch = self.cross_branch(self.cross_attention(x, **across))
                x, _ = self._add_norm(self.cross_norm, branch, self._scaled(x))
            return self._add_norm(self.mlp_norm, self.mlp_branch(self.mlp(x)), self._scaled(x))[0]
        sandwich = self.placement is NormPlacement.SANDWICH
        attended = self.attention(self._normed(self.attention_norm, self.attention, x), **options)
        attended = self.attention_branch(self.attention_post_norm(attended) if sandwich else attended)
        if self.layer_type is LayerType.CROSS_DECODER:
            normed, x = self._add_norm(self.cross_norm, attended, x)
            attended = self.cross_attention(normed, **across)
            attended = self.cross_branch(self.cross_post_norm(attended) if sandwich else attended)
        source = self.cross_attention if self.layer_type is LayerType.CROSS_DECODER else self.attention
        overwrite = type(source) is Attention and may_overwrite(self, source.o_proj)
        normed, x = self._add_norm(self.mlp_norm, attended, x, self.mlp, overwrite)
        mixed = self.mlp(normed)
        mixed = self.mlp_branch(self.mlp_post_norm(mixed) if sandwich else mixed)
        if overwrite and mixed.dtype == x.dtype and type(self.mlp) is FeedForward:
            return mixed.add_(x) if may_overwrite(self, self.mlp.down_proj) else x + mixed
        return x + mixed

    def _scaled(self, x: Tensor) -> Tensor:
        """The stream as it joins a branch."""
        return x if self.residual_scale == 1.0 else x * self.residual_scale

    def _check_inputs(
        self, x: Tensor, states: Tensor | tuple[Tensor, Tensor] | None, encoder_mask: Tensor | None
    ) -> None:
        if x.dim() not in (2, 3):
            raise ValueError(f"hidden_states has shape {tuple(x.shape)}; allowed: (batch, seq, {self.hidden_size})")
        if x.shape[-1] != self.hidden_size:
            raise ValueError(f"hidden_states has {x.shape[-1]} channels; this layer takes {self.hidden_size}")
        if self.layer_type is LayerType.CROSS_DECODER:
            check_across(self.cross_attention, x, states, encoder_mask)
        elif states is not None or encoder_mask is not None:
            name = "encoder_hidden_states" if states is not None else "encoder_attention_mask"
            raise ValueError(f"layer_type is {self.layer_type.value!r}, which takes no {name}")

    def _cache(self, x: Tensor) -> KVCacheManager:
        """The layer's cache, which it makes where it has none."""
        if self.mode is not LayerMode.INFERENCE:
            raise ValueError("use_cache is True; allowed with mode='inference', or with cache= given")
        if self.kv_cache_manager is None:
            heads = self.attention.num_heads, self.attention.num_kv_heads, self.attention.head_dim
            rows = x.shape[0] if x.dim() == 3 else 1
            self.kv_cache_manager = self._own_cache = make_own_cache(rows, *heads, x.dtype, x.device)
        return self.kv_cache_manager

    def _undone(self, cache: KVCacheManager | None, step: CacheStep | None) -> contextlib.AbstractContextManager[None]:
        """A call that raises leaves the cache without the step that it was part of, unless a model opened that."""
        if cache is None or step is not None:
            return contextlib.nullcontext()
        number = getattr(self.attention, "layer_idx", None)
        if number is None and isinstance(self.attention, Attention):
            number = -1  # it takes one in this call, so no step has served it
        return undone_in_own(cache) if cache is self._own_cache else undone_if_refused(cache, number)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, type={self.layer_type.value}, norm={self.placement.value}, mode={self.mode.value}"
