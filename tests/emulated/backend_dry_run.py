"""Run by ``test_backend_dry_run.py``, a process a SoC: what strategy ASCEND launches for each kind of call, as JSON."""

from __future__ import annotations

import json
import sys

import torch

from atb_modules.attention.functional import attention, cache_append, paged_attention, rotary_append
from atb_modules.attention.rope import rotary
from atb_modules.kernels.ascend.prefetch import prefetch
from atb_modules.kernels.host_values import remember
from atb_modules.kernels.pages import QuantizedPages
from atb_modules.mlp.experts import moe
from atb_modules.mlp.functional import gated_activation
from atb_modules.norm.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from atb_modules.ops import fused_mlp_residual_norm
from atb_modules.quantized_linear import quantize_weight, quantized_linear, weight_only_linear
from atb_modules.spec import AttentionSpec
from atb_modules.testing.npu import boot, dry_run

CAUSAL, WINDOW = AttentionSpec(causal=True), AttentionSpec(causal=True, window=(10, None))


def made(*shape, dtype=torch.float16, grad=False):
    return torch.ones(shape, dtype=dtype).to("npu:0").requires_grad_(grad)


def dense(call, spec, grad=False, dtype=torch.float16, rows=40, **more):
    tensors = [made(2, heads, n, 64, dtype=dtype, grad=grad) for heads, n in ((6, rows), (3, 57), (3, 57))]
    return call(*tensors, spec, strategy="ascend", **more)[0]


def train(spec, **more):
    dense(attention, spec, grad=True, **more).sum().backward()


def packed(grad=False):
    starts = torch.tensor([0, 13, 33, 40], dtype=torch.int32).to("npu:0")
    tensors = [made(1, heads, 40, 64, grad=grad) for heads in (6, 3, 3)]
    out, _ = attention(*tensors, CAUSAL, cu_seqlens_q=starts, cu_seqlens_k=starts, strategy="ascend")
    return out.sum().backward() if grad else None


def coded(*shape):
    return QuantizedPages(made(*shape, dtype=torch.int8), made(*shape[:2], dtype=torch.float32))


def paged(new, spec=CAUSAL, codes=False, size=128):
    pages = (coded if codes else made)(9, 3, size, 64)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32).to("npu:0")
    lengths, starts = torch.tensor([140, 9]).int().to("npu:0"), torch.tensor([0, new[0], sum(new)]).int().to("npu:0")
    paged_attention(made(sum(new), 6, 64), pages, pages, table, lengths, starts, spec, strategy="ascend")


def experts(biased):
    biases = {"up_bias": made(4, 64), "down_bias": made(4, 32)} if biased else {}
    chosen = torch.tensor([[0, 1], [2, 3], [1, 3]]).to("npu:0")
    return moe(made(3, 32), chosen, made(3, 2), made(4, 64, 32), made(4, 32, 32), **biases, strategy="ascend")


def chain():
    x, up, down = made(3, 32), made(32, 64), made(64, 32)
    return fused_mlp_residual_norm(x, x, up, up, down, norm_weight=made(32), norm_type="rmsnorm", strategy="ascend")


def append(turned, codes=False):
    pages, token, slots = made(3, 2, 16, 64), made(4, 2, 64), torch.tensor([3, 17, 40, 5]).to("npu:0")
    others = pages.clone()
    if codes:
        pages, others = coded(3, 2, 16, 64), coded(3, 2, 16, 64)
    if turned:
        angles = made(4, 32, dtype=torch.float32)
        rotary_append(
            made(4, 6, 64),
            token,
            token,
            angles,
            angles,
            pages,
            others,
            slots,
            interleaved=False,
            strategy="ascend",
        )
    else:
        cache_append(token, token, pages, others, slots, strategy="ascend")


def int8_step():
    """Two writes and a read of a decode step, once its tensors are there; the host knows the slots of the second."""
    pages, token, q = [coded(9, 3, 128, 64) for _ in range(2)], made(2, 3, 64), made(2, 6, 64)
    slots = [torch.tensor([139, 9]).to("npu:0") for _ in range(2)]
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32).to("npu:0")
    lengths, starts = torch.tensor([140, 9]).int().to("npu:0"), torch.tensor([0, 1, 2]).int().to("npu:0")
    for tensor, values in ((slots[1], [139, 9]), (lengths, [140, 9]), (starts, [0, 1, 2])):
        remember(tensor, values)

    def step():
        for where in slots:
            cache_append(token, token, *pages, where, strategy="ascend", trusted=True)
        for spec in (CAUSAL, WINDOW):
            paged_attention(q, *pages, table, lengths, starts, spec, strategy="ascend", trusted=True)

    return step


def normed(call, weights, grad=False):
    inputs = [made(9, 48, grad=grad) for _ in range(2 if call.__name__.startswith("add") else 1)]
    result = call(*inputs, *(made(48, grad=grad) for _ in range(weights)), strategy="ascend")
    if grad:
        (result[0] if isinstance(result, tuple) else result).sum().backward()


def gated(kind, grad=False):
    result = gated_activation(made(9, 32, grad=grad), made(9, 32, grad=grad), kind, strategy="ascend")
    return result.sum().backward() if grad else None


def turned(layout):
    angles = made(5, 64, dtype=torch.float32)
    rotary(made(5, 3, 128), angles, angles, layout=layout, strategy="ascend")


def int8_product(op, group=None, grad=False, bias=False):
    codes, scales = quantize_weight(torch.randn(24, 128), group)
    x, shift = made(3, 128, grad=grad), made(24) if bias else None
    out = op(x, codes.to("npu:0"), scales.to("npu:0"), shift, strategy="ascend")
    return out.sum().backward() if grad else None


def latent():
    pages, table = made(4, 1, 128, 576), torch.tensor([[3, 1], [0, -1]], dtype=torch.int32).to("npu:0")
    lengths, starts = torch.tensor([140, 9]).int().to("npu:0"), torch.tensor([0, 1, 2]).int().to("npu:0")
    tables = (table, lengths, starts, CAUSAL)
    paged_attention(made(2, 16, 576), pages, pages, *tables, value_dim=512, strategy="ascend")


CASES = {
    "attention": lambda: dense(attention, CAUSAL),
    "attention of one query": lambda: dense(attention, CAUSAL, rows=1),
    "attention in a window": lambda: dense(attention, WINDOW),
    "attention with a mask": lambda: dense(attention, AttentionSpec(), mask=made(40, 57) > 0),
    "attention in bfloat16": lambda: dense(attention, CAUSAL, dtype=torch.bfloat16),
    "attention in float32": lambda: dense(attention, CAUSAL, dtype=torch.float32),
    "attention, differentiated": lambda: train(CAUSAL),
    "attention in a window, differentiated": lambda: train(WINDOW),
    "attention with dropout, differentiated": lambda: train(CAUSAL, dropout_p=0.2),
    "attention with dropout and sinks": lambda: dense(
        attention, CAUSAL, sinks=made(6, dtype=torch.float32), dropout_p=0.2
    ),
    "attention, packed": packed,
    "attention, packed, differentiated": lambda: packed(True),
    "decode over pages": lambda: paged((1, 1)),
    "decode in a window": lambda: paged((1, 1), WINDOW),
    "prefill over pages": lambda: paged((3, 5)),
    "decode over int8 pages": lambda: paged((1, 1), codes=True),
    "decode over int8 pages in a window": lambda: paged((1, 1), WINDOW, codes=True),
    "decode over small int8 pages": lambda: paged((1, 1), codes=True, size=80),
    "prefill over int8 pages": lambda: paged((3, 5), codes=True),
    "append to int8 pages": lambda: append(False, codes=True),
    "rotary append to int8 pages": lambda: append(True, codes=True),
    "a step over int8 pages": int8_step,
    "cache append": lambda: append(False),
    "rotary append": lambda: append(True),
    "rotary half": lambda: turned("half"),
    "rotary interleaved": lambda: turned("interleaved"),
    "RMSNorm": lambda: normed(rms_norm, 1),
    "RMSNorm, differentiated": lambda: normed(rms_norm, 1, True),
    "add and RMSNorm": lambda: normed(add_rms_norm, 1),
    "LayerNorm": lambda: normed(layer_norm, 2),
    "add and LayerNorm": lambda: normed(add_layer_norm, 2),
    "SwiGLU": lambda: gated("silu"),
    "SwiGLU, differentiated": lambda: gated("silu", True),
    "GeGLU": lambda: gated("gelu"),
    "weight-only product": lambda: int8_product(weight_only_linear, bias=True),
    "weight-only product in groups": lambda: int8_product(weight_only_linear, 64),
    "weight-only product, differentiated": lambda: int8_product(weight_only_linear, grad=True),
    "quantised product": lambda: int8_product(quantized_linear, bias=True),
    "decode of latent attention": latent,
    "prefetch": lambda: prefetch(made(64, 64), made(4)),
    "attention with sinks": lambda: dense(attention, CAUSAL, sinks=made(6, dtype=torch.float32)),
    "Gemma's norm": lambda: rms_norm(made(4, 64), made(64), weight_offset=1.0, strategy="ascend"),
    "experts": lambda: experts(False),
    "experts with biases": lambda: experts(True),
    "feed-forward with its norm": lambda: chain(),
}


def outcome(case):
    """Names of what is launched, the refusal, or the error."""
    try:
        with dry_run() as launches:
            prepared = case()
        if callable(prepared):  # what came before it does not count
            with dry_run() as launches:
                prepared()
    except ValueError as refusal:
        return {"refused": str(refusal)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"launches": [launch.name for launch in launches]}


if __name__ == "__main__":
    boot(sys.argv[1])
    print(json.dumps({name: outcome(case) for name, case in CASES.items()}))
