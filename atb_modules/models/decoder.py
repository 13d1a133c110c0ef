"""DecoderModel: embedding, our TransformerLayers, a norm and a head. The whole language model, top to bottom.

Letters in shapes: B rows of the batch, L tokens a row, T packed tokens of all rows.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atb_modules.attention import AttentionConfig, CacheStep, KVCacheManager, RotaryConfig, RotaryEmbedding
from atb_modules.attention.cache.refusal import undone_if_refused
from atb_modules.attention.masking import pack_padded, unpack_padded
from atb_modules.checks import check_bool, check_device, check_parameter_dtype, check_type
from atb_modules.inference.fitting import check_cache
from atb_modules.inference.generation import generate
from atb_modules.kernels.host_values import freeze
from atb_modules.layer import LayerMode, TransformerLayer
from atb_modules.linear import Linear
from atb_modules.mlp import MLPConfig
from atb_modules.norm import NormConfig, RMSNorm
from atb_modules.overlays import Overlays
from atb_modules.strategies import parse_enum

from .config import InferenceConfig, ModelConfig
from .inputs import (
    IGNORED,
    Deepstack,
    check_beside_ids,
    check_cached_overlays,
    check_ids,
    check_position_ids,
    check_stream,
    longest_row,
    segment_positions,
    shifted_labels,
)
from .output import ModelOutput

RotaryTables = dict[RotaryConfig, tuple[Tensor, Tensor]]


class DecoderModel(nn.Module):
    """A decoder-only language model made of `TransformerLayer`s.

    Args:
        config: what it computes.
        mode: "train" (gradients flow) or "inference" (they never do).
        attention_type: of every layer; see `TransformerLayer`.
        device, dtype: of the parameters.

    Dynamic NTK and LongRoPE choose their frequencies by the longest row of a pass, for all of its rows.
    Weights start as transformers starts them: normal with standard deviation 0.02, norms at 1.

    Raises:
        TypeError, ValueError: an argument of another kind, or a word that is not allowed, naming the argument.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        mode: str = LayerMode.TRAIN,
        attention_type: str = "flash",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_type("config", config, ModelConfig)
        check_device(device)
        check_parameter_dtype(dtype)
        self.config = config
        self.mode = parse_enum(LayerMode, mode, "mode")
        norm = NormConfig(eps=config.norm_eps, weight_offset=config.norm_offset, cast_order=config.norm_cast_order)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            TransformerLayer(
                config.hidden_size,
                config.num_heads,
                config.head_dim,
                config.intermediate_size if config.moe_of(index) is None else config.expert_size,
                num_kv_heads=config.num_kv_heads,
                attention_type=attention_type,
                mlp_type=config.mlp_type,
                norm_placement=config.norm_placement,
                mode=mode,
                layer_idx=index,
                rotary=rotary,
                attention=AttentionConfig(
                    window=None if window is None else (window, 0),
                    scale=config.attention_scale,
                    softcap=config.attention_softcap,
                    qkv_bias=config.qkv_bias,
                    out_bias=config.output_bias,
                    qk_norm="before_rotary" if config.qk_norm else None,
                    qk_norm_config=norm,
                ),
                norm=norm,
                mlp=MLPConfig(bias=config.mlp_bias, moe=config.moe_of(index)),
                device=device,
                dtype=dtype,
            )
            for index, (window, rotary) in enumerate(zip(config.windows, config.rotary, strict=True))
        )
        self.norm = RMSNorm(
            config.hidden_size,
            config.norm_eps,
            weight_offset=config.norm_offset,
            cast_order=config.norm_cast_order,
            device=device,
            dtype=dtype,
        )
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, device=device, dtype=dtype)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.inference_config = InferenceConfig()
        self.unused_tensors: tuple[str, ...] = ()
        self.rotary = {rotary: RotaryEmbedding(config.head_dim, rotary) for rotary in set(config.rotary)}
        self.tie_weights()
        self.register_load_state_dict_pre_hook(_fill_tied_head)
        if self.mode is LayerMode.INFERENCE:
            self.requires_grad_(False)
            self.eval()

    def tie_weights(self) -> None:
        """Makes the head the embedding again, where the configuration says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed.weight

    @property
    def device(self) -> torch.device:
        return next(self.embed.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.embed.parameters()).dtype

    def new_cache(
        self,
        max_seq_len: int | None = None,
        *,
        page_size: int = 64,
        num_pages: int | None = None,
        dtype: torch.dtype | None = None,
        evict: bool = True,
        quantization: str = "none",
    ) -> KVCacheManager:
        """A paged cache for this model's layers; `max_seq_len` defaults to the positions it was made for.

        With `evict`, windowed layers give back the pages that no later token can see. `quantization="int8"` keeps codes
        with a scale for each page and head.
        """
        check_bool("evict", evict)
        config = self.config
        return KVCacheManager(
            config.max_positions if max_seq_len is None else max_seq_len,
            page_size,
            config.num_layers,
            config.num_heads,
            config.head_dim,
            self.dtype if dtype is None else dtype,
            num_kv_heads=config.num_kv_heads,
            num_pages=num_pages,
            window=config.windows if evict else None,
            quantization=quantization,
            device=self.device,
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        deepstack: Deepstack | None = None,
        overlays: Overlays | None = None,
        past_key_values: KVCacheManager | None = None,
        labels: Tensor | None = None,
    ) -> ModelOutput:
        """Logits of every token.

        Args:
            input_ids: integers (B, L).
            attention_mask: (B, L) of bool or 0/1, 1 = real; padding may stand on either side. With a cache
                it says which of the new tokens are real.
            position_ids: integers (B, L), or (3, B, L) for rotary positions of several axes; default counts the real
                tokens of a row, from the cache's length on.
            inputs_embeds: (B, L, hidden_size) in the place of input_ids: what `embed_tokens` gives, images merged in.
            deepstack: features that join the stream behind the first layers.
            overlays: packed sequences (B is 1) and images that see both ways; with a cache image_ids alone, (B, L)
                of the new tokens, whole images.
            past_key_values: append to this cache and attend to all of it; its open sequences are the rows.
                Opened with B empty sequences when none are open. Such a call is not differentiable.
            labels: int64 or int32 (B, L), ids or -100 = ignored; token i is predicted from those before it, and the
                first of a packed sequence from none.

        Raises:
            ValueError, TypeError: wrong shape or dtype, ids past the vocabulary, more tokens or positions than
                `max_positions`, a batch that is not the cache's, a cache that does not fit the model. A call
                that raises leaves the cache as it was.
        """
        if (input_ids is None) == (inputs_embeds is None):
            both = "both are" if input_ids is not None else "neither is"
            raise ValueError(f"input_ids and inputs_embeds: {both} given; allowed: one of them")
        if inputs_embeds is None:
            assert input_ids is not None
            check_ids("input_ids", input_ids, self.config.vocab_size)
            if deepstack is not None:
                raise ValueError("deepstack is given with input_ids; allowed: with inputs_embeds")
            tokens = input_ids
        else:
            check_stream(inputs_embeds, deepstack, self.config.hidden_size, self.config.num_layers)
            tokens = inputs_embeds[..., 0]
        self.check_call(tokens, attention_mask, position_ids, overlays, past_key_values, labels)
        stream = self.embed_tokens(input_ids) if input_ids is not None else inputs_embeds
        assert stream is not None
        if past_key_values is not None:
            logits = self._forward_cached(stream, attention_mask, position_ids, deepstack, overlays, past_key_values)
        else:
            logits = self._forward_dense(stream, attention_mask, position_ids, deepstack, overlays)
        loss = None
        if labels is not None:
            targets = shifted_labels(labels, overlays)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
        return ModelOutput(logits, loss, past_key_values)

    def check_call(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        overlays: Overlays | None,
        cache: KVCacheManager | None,
        labels: Tensor | None,
    ) -> None:
        """Raises where what `forward` is given beside its tokens (B, L) does not go with them or with the model."""
        check_type("overlays", overlays, Overlays, optional=True)
        check_beside_ids(tokens, attention_mask, labels, self.config.vocab_size)
        limit = self.config.max_positions
        if cache is not None:
            check_cache("past_key_values", cache, self.config, self.device)
            check_cached_overlays(overlays, tokens.shape)
            if cache.batch_size not in (0, tokens.shape[0]):
                raise ValueError(
                    f"input_ids has {tokens.shape[0]} rows; past_key_values has {cache.batch_size} open sequences, "
                    "allowed: as many, or none"
                )
            limit = max(limit, cache.max_seq_len)
        # An exported program is promised any length; everything else learns where the trained positions end.
        elif not torch.compiler.is_exporting():
            longest = longest_row(tokens.shape[1], None if overlays is None else overlays.cu_seqlens_q)
            if longest > limit:
                raise ValueError(f"input_ids has {longest} tokens a row; max_positions is {limit}")
        if position_ids is not None:
            check_position_ids(position_ids, tokens.shape, attention_mask, limit, self.config.position_axes)

    def _forward_dense(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        deepstack: Deepstack | None,
        overlays: Overlays | None,
    ) -> Tensor:
        batch, length = x.shape[:2]
        packed = None if overlays is None else overlays.cu_seqlens_q
        longest = longest_row(length, packed)
        if position_ids is None:
            position_ids = torch.arange(length, device=x.device).expand(batch, length)
            if packed is not None:
                position_ids = segment_positions(packed, length)
            elif attention_mask is not None:
                position_ids = ((attention_mask != 0).long().cumsum(-1) - 1).clamp(min=0)
        axes = position_ids.dim() == 3
        tables = self.rotary_tables(position_ids, longest, axes)
        options = {} if overlays is None else {"overlays": overlays}
        for index, (layer, rotary) in enumerate(zip(self.layers, self.config.rotary, strict=True)):
            x = layer(x, attention_mask, None if axes else position_ids, rotary_tables=tables[rotary], **options)
            if deepstack is not None:
                x = deepstack.joined(x, index)
        return self.head(self.norm(x))

    def _forward_cached(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        deepstack: Deepstack | None,
        overlays: Overlays | None,
        cache: KVCacheManager,
    ) -> Tensor:
        with torch.no_grad():
            x, lengths, real = pack_padded(x, attention_mask)
            if position_ids is not None:
                axes = position_ids.shape[:-2] if position_ids.dim() == 3 else ()
                position_ids = position_ids.expand(*axes, *real.shape)[..., real]
            if deepstack is not None:
                deepstack = deepstack.packed(real)
            image_ids = None if overlays is None or overlays.image_ids is None else overlays.image_ids[real]
            with undone_if_refused(cache):
                if not cache.batch_size:
                    cache.begin(len(lengths))
                step = cache.step(lengths, image_ids=image_ids)
                x = self.run_packed(x, step, cache, position_ids, deepstack)
                return unpack_padded(self.head(x), real)

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """Embeddings of ids of any shape, scaled where the configuration says so."""
        x = self.embed(input_ids)
        scale = self.config.embedding_scale
        if scale is None:
            return x
        # Rounded to the embeddings' dtype before it multiplies, as Gemma was trained.
        return x * torch.tensor(scale, dtype=x.dtype, device=x.device)

    def rotary_tables(self, position_ids: Tensor, length: int, axes: bool = False) -> RotaryTables:
        """cos and sin of the positions, once for all layers that share a setting; `axes` as in `RotaryEmbedding`."""
        return {config: rotary(position_ids, length, axes=axes) for config, rotary in self.rotary.items()}

    def run_packed(
        self,
        x: Tensor,
        step: CacheStep,
        cache: KVCacheManager,
        position_ids: Tensor | None = None,
        deepstack: Deepstack | None = None,
    ) -> Tensor:
        """Normed hidden states (T, hidden) of packed embeddings x (T, hidden), whose keys and values go into the cache.

        position_ids: (T,), or (3, T) for rotary positions of several axes; default those of the step.
        """
        positions = step.positions if position_ids is None else position_ids
        axes = positions.dim() == 2
        tables = self.rotary_tables(positions, step.max_kv_length, axes)
        if positions.device.type != "cpu":
            freeze(*itertools.chain.from_iterable(tables.values()))
        options = {"position_ids": None if axes else positions, "cache": cache, "cache_step": step}
        for index, (layer, rotary) in enumerate(zip(self.layers, self.config.rotary, strict=True)):
            x = layer(x, rotary_tables=tables[rotary], **options)
            if deepstack is not None:
                x = deepstack.joined(x, index)
        return self.norm(x)

    def head(self, x: Tensor) -> Tensor:
        """Logits (..., vocab_size) of normed hidden states."""
        return self.cap_logits(self.lm_head(x))

    def cap_logits(self, logits: Tensor) -> Tensor:
        """`cap * tanh(logits / cap)` where the configuration has a cap."""
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    # The documented function itself, as a method.
    generate = generate

    def extra_repr(self) -> str:
        config = self.config
        return f"family={config.family}, tied={config.tie_word_embeddings}, mode={self.mode.value}"


def _fill_tied_head(model: DecoderModel, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """A tied head may be left out of a state dict."""
    embed = prefix + "embed.weight"
    if model.config.tie_word_embeddings and embed in state_dict:
        state_dict.setdefault(prefix + "lm_head.weight", state_dict[embed])
