"""DecodeStep: logits of the next token of every open row, by the shortest road that the model and machine
allow.

The short road is one native call for all layers (`DecodeStackPlan`) between the embedding and the head, over
pointers and a workspace that are made once. The long road runs the modules; it is the reference and the
fallback, and the registry logs why (logger `atb_modules.kernels`, op `decode_layer`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atb_modules.attention import CacheStep, KVCacheManager, RotaryEmbedding
from atb_modules.kernels.cpu import DecodeLayerPlan, DecodeStackPlan
from atb_modules.kernels.cpu.decode_layer import MAX_BATCH
from atb_modules.kernels.registry import resolve
from atb_modules.strategies import DecodeStrategy

from .layer_plan import layer_traits, norm_weight
from .slots import model_changes

if TYPE_CHECKING:
    from atb_modules.models.decoder import DecoderModel

native = torch.ops.atb_modules

_TABLE_STEP = 1024


class RotaryTable:
    """cos and sin of positions 0 to n - 1, made once; rows are looked up."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        self.rotary = rotary
        self.cos = self.sin = torch.empty(0, 0)

    def __call__(self, step: CacheStep) -> tuple[Tensor, Tensor]:
        """cos and sin (rows, rotary_dim / 2) of a step of one token a row."""
        longest = step.max_kv_length
        if self.rotary.depends_on_length:
            return self.rotary(step.positions, longest)
        if step.shifted:
            longest = int(step.positions.max()) + 1
        if longest > self.cos.shape[0]:
            size = -(-longest // _TABLE_STEP) * _TABLE_STEP
            self.cos, self.sin = self.rotary(torch.arange(size))
        if len(step.past_lengths) == 1 and not step.shifted:
            position = step.past_lengths[0]
            return self.cos.narrow(0, position, 1), self.sin.narrow(0, position, 1)
        return self.cos.index_select(0, step.positions), self.sin.index_select(0, step.positions)


class NativeRoad:
    """The plans of all layers over one cache, with the final norm and the head."""

    def __init__(self, model: DecoderModel, cache: KVCacheManager, plans: list[DecodeLayerPlan]) -> None:
        self.model = model
        configs = list(model.rotary)
        self.tables = [RotaryTable(rotary) for rotary in model.rotary.values()]
        places = [configs.index(config) for config in model.config.rotary]
        self.stack = DecodeStackPlan(plans, places, cache.layer_groups)
        self.norm_weight = norm_weight(model.norm)

    def __call__(self, tokens: Tensor, step: CacheStep) -> Tensor:
        model = self.model
        hidden = model.embed_tokens(tokens).float()
        tables = [table(step) for table in self.tables]
        self.stack.run(hidden, tables, step.group_slots, step.group_tables, step.kv_lengths)
        norm = model.norm.config
        # The native ops by name: the layers' plan has settled that they can run, and asking again for every token
        # would take as long as they do.
        normed = native.rms_norm(hidden, self.norm_weight, norm.eps, norm.weight_offset, False)
        return model.cap_logits(native.linear(normed, model.lm_head.weight, None))


class DecodeStep:
    """Runs one token a row through the model.

    Args:
        model: the model.
        cache: whose open sequences are the rows, in order.
    """

    def __init__(self, model: DecoderModel, cache: KVCacheManager) -> None:
        self.model = model
        self.cache = cache
        self._native: NativeRoad | None = None
        self._chosen_for = 0

    def _choose(self, batch: int) -> None:
        """The road for this many rows or fewer; every layer must be able to take the native one."""
        fused = self.model.inference_config.enable_inference_fusion
        asked = DecodeStrategy.AUTO if fused else DecodeStrategy.MODULES
        around = model_changes(self.model)
        kernels = {
            traits: resolve("decode_layer", None, traits, asked)
            for traits in {layer_traits(layer, self.cache.page_dtype, batch, around) for layer in self.model.layers}
        }
        self._native = None
        if all(kernel.strategy is DecodeStrategy.CPU for kernel in kernels.values()):
            build = next(iter(kernels.values())).function
            plans = [build(layer, self.cache, batch) for layer in self.model.layers]
            self._native = NativeRoad(self.model, self.cache, plans)
        self._chosen_for = batch

    def __call__(self, tokens: list[int]) -> Tensor:
        """Appends one token to every row; logits (rows, vocab_size) of what follows."""
        batch = len(tokens)
        # Rows only ever leave: once there are few enough for the native road, it is looked at again.
        if not self._chosen_for or batch <= MAX_BATCH < self._chosen_for:
            self._choose(batch)
        ids = torch.tensor(tokens, device=self.model.device)
        step = self.cache.step(1)
        if self._native is not None:
            return self._native(ids, step)
        return self.model.head(self.model.run_packed(self.model.embed_tokens(ids), step, self.cache))
