"""One small call for every op of the registry, through the public functions: the same numbers for every kernel.

Sizes are such that the fused operators of an NPU take them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atb_modules import ops
from atb_modules.kernels.registry import Explanation, explain_call, explain_choice
from atb_modules.norm_linear import norm_linear
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import use_strategy

if TYPE_CHECKING:
    from atb_modules.models.decoder import DecoderModel

_SEED = 20_26
_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE_SIZE, _WIDTH = 4, 2, 64, 128, 64
_CAUSAL = AttentionSpec(causal=True)
#: queries and keys that are long enough for kernels which compile for blocks of 128
_LONG = 160


class Inputs:
    """Random tensors of one dtype on one device, the same ones each time that it is made.

    ``wide``: the same numbers, rounded to ``dtype``, in float64: what a reference computes with.
    """

    def __init__(self, dtype: torch.dtype, device: str = "cpu", wide: bool = False) -> None:
        self.dtype, self.device, self.wide = dtype, device, wide
        self.generator = torch.Generator("cpu").manual_seed(_SEED)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers times ``scale``."""
        drawn = (scale * self._draw(shape)).to(self.dtype)
        return (drawn.double() if self.wide else drawn).to(self.device)

    def table(self, *shape: int) -> tuple[Tensor, Tensor]:
        """cos and sin of random angles, float32."""
        angles = 3.0 * self._draw(shape)
        return angles.cos().to(self.device), angles.sin().to(self.device)

    def pages(self, number: int) -> Tensor:
        """Empty pages of zeros."""
        return torch.zeros_like(self.normal(number, _KV_HEADS, _PAGE_SIZE, _HEAD_DIM))

    def numbers(self, values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu").to(self.device)

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        """On the host and in float32, whatever the defaults of the process are."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")


_ALL_REFERENCE = dict.fromkeys(("attention", "norm", "mlp", "linear", "rotary", "cache"), "reference")
Run = Callable[[Inputs, str], tuple[Tensor, ...]]


@dataclass(frozen=True)
class SmallCall:
    """A call: ``run(inputs, strategy)`` returns all that the kernel computed, ``explain(inputs)`` who could."""

    op: str
    run: Run
    reference: str = "reference"
    explain_with: Callable[[Inputs], Explanation] | None = None

    def golden(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What is right: the reference in float64 on the host, whatever it is made of a reference, too."""
        with use_strategy(**_ALL_REFERENCE):
            return self.run(Inputs(dtype, wide=True), self.reference)

    def explain(self, inputs: Inputs) -> Explanation:
        if self.explain_with is not None:
            return self.explain_with(inputs)
        return explain_call(self.run, inputs, "auto")


def _attention(inputs: Inputs, strategy: str, length: int = 24) -> tuple[Tensor, ...]:
    q = inputs.normal(2, _HEADS, length - 3, _HEAD_DIM)
    k, v = (inputs.normal(2, _KV_HEADS, length, _HEAD_DIM) for _ in range(2))
    return (ops.attention(q, k, v, _CAUSAL, strategy=strategy)[0],)


def _long_attention(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    return _attention(inputs, strategy, _LONG)


def _paged_attention(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    q = inputs.normal(2, _HEADS, _HEAD_DIM)
    k_pages, v_pages = (inputs.normal(4, _KV_HEADS, _PAGE_SIZE, _HEAD_DIM) for _ in range(2))
    table, lengths = inputs.numbers([[2, 0], [3, -1]]), inputs.numbers([_PAGE_SIZE + 5, 9])
    starts = inputs.numbers([0, 1, 2])
    return (ops.paged_attention(q, k_pages, v_pages, table, lengths, starts, _CAUSAL, strategy=strategy)[0],)


def _multimodal_attention(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    sides = [
        tuple(inputs.normal(2, heads, length, _HEAD_DIM) for heads in (_HEADS, _KV_HEADS, _KV_HEADS))
        for length in (9, 14)
    ]
    vision, text = sides
    return ops.multimodal_attention(vision, text, strategy=strategy)  # type: ignore[arg-type]


def _rms_norm(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    return (ops.rms_norm(inputs.normal(5, _WIDTH), inputs.normal(_WIDTH), 1e-6, strategy=strategy),)


def _add_rms_norm(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    x, residual, weight = inputs.normal(5, _WIDTH), inputs.normal(5, _WIDTH), inputs.normal(_WIDTH)
    return ops.add_rms_norm(x, residual, weight, 1e-6, strategy=strategy)


def _layer_norm(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    x, weight, bias = inputs.normal(5, _WIDTH), inputs.normal(_WIDTH), inputs.normal(_WIDTH)
    return (ops.layer_norm(x, weight, bias, 1e-5, strategy=strategy),)


def _add_layer_norm(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    x, residual = inputs.normal(5, _WIDTH), inputs.normal(5, _WIDTH)
    weight, bias = inputs.normal(_WIDTH), inputs.normal(_WIDTH)
    return ops.add_layer_norm(x, residual, weight, bias, 1e-5, strategy=strategy)


def _modulated_norm(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    x, scale, shift = inputs.normal(2, 5, _WIDTH), inputs.normal(2, _WIDTH), inputs.normal(2, _WIDTH)
    return (ops.modulated_norm(x, scale, shift, strategy=strategy),)


def _gated_activation(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    gate, up = inputs.normal(5, 2 * _WIDTH).chunk(2, dim=-1)
    return (ops.gated_activation(gate, up, "silu", strategy=strategy),)


def _moe(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    tokens, experts, hidden, width = 5, 3, 32, 48
    routed = inputs.numbers([[0, 2], [2, 1], [2, 0], [0, 1], [2, 1]], torch.int64)
    x, weights = inputs.normal(tokens, hidden), inputs.normal(tokens, 2).abs()
    up_proj = inputs.normal(experts, 2 * width, hidden, scale=hidden**-0.5)
    down_proj = inputs.normal(experts, hidden, width, scale=width**-0.5)
    return (ops.moe(x, routed, weights, up_proj, down_proj, strategy=strategy),)


def _fused_mlp_residual_norm(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    x, residual = inputs.normal(5, 32), inputs.normal(5, 32)
    gate_w, up_w = inputs.normal(32, 48, scale=32**-0.5), inputs.normal(32, 48, scale=32**-0.5)
    down_w = inputs.normal(48, 32, scale=48**-0.5)
    weight = inputs.normal(32)
    return ops.fused_mlp_residual_norm(x, residual, gate_w, up_w, down_w, norm_weight=weight, strategy=strategy)


def _linear(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    x, weight, bias = inputs.normal(5, 32), inputs.normal(48, 32, scale=32**-0.5), inputs.normal(48)
    return (ops.linear(x, weight, bias, strategy=strategy),)


def _norm_linear(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    x, norm_weight = inputs.normal(5, 64), inputs.normal(64)
    weight, bias = inputs.normal(48, 64, scale=1 / 8), inputs.normal(48)
    return (norm_linear(x, norm_weight, weight, bias, strategy=strategy),)


def _weight_only_linear(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    x, weight, bias = inputs.normal(5, 128), inputs.normal(48, 128, scale=128**-0.5), inputs.normal(48)
    return (ops.weight_only_linear(x, *ops.quantize_weight(weight), bias, strategy=strategy),)


def _quantized_linear(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    x, weight, bias = inputs.normal(5, 128), inputs.normal(48, 128, scale=128**-0.5), inputs.normal(48)
    return (ops.quantized_linear(x, *ops.quantize_weight(weight), bias, strategy=strategy),)


def _rotary(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    x = inputs.normal(5, _HEADS, _HEAD_DIM)
    return (ops.rotary(x, *inputs.table(5, _HEAD_DIM // 2), strategy=strategy),)


def _cache_append(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    k, v = (inputs.normal(3, _KV_HEADS, _HEAD_DIM) for _ in range(2))
    k_pages, v_pages = inputs.pages(2), inputs.pages(2)
    slots = inputs.numbers([130, 7, 8], torch.int64)
    ops.cache_append(k, v, k_pages, v_pages, slots, strategy=strategy)
    return k_pages, v_pages


def _rotary_append(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    q = inputs.normal(3, _HEADS, _HEAD_DIM)
    k, v = (inputs.normal(3, _KV_HEADS, _HEAD_DIM) for _ in range(2))
    k_pages, v_pages = inputs.pages(2), inputs.pages(2)
    cos, sin = inputs.table(3, _HEAD_DIM // 2)
    slots = inputs.numbers([130, 7, 8], torch.int64)
    ops.rotary_append(q, k, v, cos, sin, k_pages, v_pages, slots, interleaved=False, strategy=strategy)
    return q, k_pages, v_pages


def _small_model(inputs: Inputs) -> DecoderModel:
    from atb_modules.attention.rope import RotaryConfig
    from atb_modules.models.config import ModelConfig
    from atb_modules.models.decoder import DecoderModel

    config = ModelConfig(
        family="llama",
        vocab_size=40,
        hidden_size=32,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=48,
        windows=(None,),
        rotary=(RotaryConfig(),),
        max_positions=64,
    )
    with torch.random.fork_rng(devices=[]):
        model = DecoderModel(config, mode="inference", device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights near 1, matrices that keep the size of what they multiply.
            drawn = inputs.normal(*parameter.shape).float().cpu()
            parameter.copy_(1.0 + 0.1 * drawn if parameter.dim() == 1 else drawn * parameter.shape[-1] ** -0.5)
    model = model.to(inputs.dtype)
    return (model.double() if inputs.wide else model).to(inputs.device)


def _decode_layer(inputs: Inputs, strategy: str) -> tuple[Tensor, ...]:
    from atb_modules.inference.plan import DecodeStep

    model = _small_model(inputs)
    cache = model.new_cache(64, page_size=16, num_pages=8)
    cache.begin(1)
    prompt = inputs.numbers([3, 1, 4, 15, 9], torch.int64)
    with use_strategy(**_ALL_REFERENCE):
        model.run_packed(model.embed_tokens(prompt), cache.step([5]), cache)
    with use_strategy(decode=strategy):
        return (DecodeStep(model, cache)([7]),)


def _explain_decode_layer(inputs: Inputs) -> Explanation:
    from atb_modules.inference.layer_plan import layer_traits

    model = _small_model(inputs)
    return explain_choice("decode_layer", None, layer_traits(model.layers[0], inputs.dtype, 1))


SMALL_CALLS: dict[str, SmallCall] = {
    call.op: call
    for call in (
        SmallCall("attention", _attention),
        SmallCall("paged_attention", _paged_attention),
        SmallCall("multimodal_attention", _multimodal_attention),
        SmallCall("rms_norm", _rms_norm),
        SmallCall("add_rms_norm", _add_rms_norm),
        SmallCall("layer_norm", _layer_norm),
        SmallCall("add_layer_norm", _add_layer_norm),
        SmallCall("modulated_norm", _modulated_norm),
        SmallCall("gated_activation", _gated_activation),
        SmallCall("moe", _moe),
        SmallCall("fused_mlp_residual_norm", _fused_mlp_residual_norm),
        SmallCall("linear", _linear),
        SmallCall("norm_linear", _norm_linear),
        SmallCall("weight_only_linear", _weight_only_linear),
        SmallCall("quantized_linear", _quantized_linear),
        SmallCall("rotary", _rotary),
        SmallCall("cache_append", _cache_append),
        SmallCall("rotary_append", _rotary_append),
        SmallCall("decode_layer", _decode_layer, "modules", _explain_decode_layer),
    )
}
#: kernels that compile for each call, with a call that is long enough for them
SLOW_CALLS: dict[tuple[str, str], SmallCall] = {("attention", "flex"): SmallCall("attention", _long_attention)}
