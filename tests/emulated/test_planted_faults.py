"""Faults planted into the calls that strategy ASCEND makes: each must turn parity red.

The kernels run through their public functions; on the way to the operator one argument is changed, as a slip in our
code would change it. A fault is caught where parity fails or where the call is refused. Without a fault the same
comparison passes, so that nothing is caught by accident.
"""

from __future__ import annotations

import pytest
import torch

from atb_modules.attention.functional import attention, cache_append, paged_attention
from atb_modules.attention.rope import rotary
from atb_modules.kernels.reference.attention import attention_reference, paged_attention_reference
from atb_modules.kernels.reference.norm import add_rms_norm_reference, rms_norm_reference
from atb_modules.kernels.reference.rotary import rotary_reference
from atb_modules.mlp.functional import gated_activation
from atb_modules.norm.functional import add_rms_norm, rms_norm
from atb_modules.spec import AttentionSpec
from atb_modules.testing import assert_parity, fresh_generator
from atb_modules.testing.npu import EmulatedNPU, OperatorError
from atb_modules.testing.npu.binding import bind

from .helpers import DEVICE, draw, in_float64, on_device
from .test_codes import filled as filled_codes
from .test_codes import on_device as codes_on_device
from .test_paged_parity import filled

HALF = torch.float16
CAUSAL = AttentionSpec(causal=True)
WINDOW = AttentionSpec(causal=True, window=(10, None))


class Tampered(EmulatedNPU):
    """The emulated NPU with one operator whose calls are changed on the way to it."""

    def __init__(self, operator, change, soc=None):
        super().__init__(check_meta=False, soc=soc)
        self.operator, self.change, self.hits = operator, change, 0
        self.inside = EmulatedNPU(check_meta=False, soc=soc)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == self.operator:
            self.hits += 1
            said = bind(func._schema, args, kwargs or {})
            with self.inside:
                args, kwargs = (), {**said, **self.change(said)}
        return super().__torch_dispatch__(func, types, args, kwargs)


def qkv(generator, dtype, rows=40, columns=57):
    shapes = (2, 6, rows, 32), (2, 3, columns, 32), (2, 3, columns, 32)
    return [draw(generator, *shape, dtype=dtype) for shape in shapes]


# ---- what is computed: pairs of (ours through ASCEND, truth)


def infer(generator, spec=CAUSAL, rows=40, columns=57, dtype=HALF, **more):
    tensors = qkv(generator, dtype, rows, columns)
    out, lse = attention(
        *(t.to(DEVICE) for t in tensors), spec, return_lse=True, strategy="ascend",
        **{name: value.to(DEVICE) for name, value in more.items()},
    )  # fmt: skip
    want, want_lse = attention_reference(*(t.double() for t in tensors), spec, **more)
    return [(out, want), (lse.to(dtype), want_lse)]


def masked(generator):
    shown = torch.rand(2, 1, 40, 57, generator=generator) < 0.6
    shown[..., 0] = True
    return infer(generator, AttentionSpec(), mask=shown)


def biased(generator):
    slopes = torch.rand(6, generator=generator)
    return infer(generator, AttentionSpec(), dtype=torch.float32, alibi_slopes=slopes)


def train(generator, spec=CAUSAL):
    tensors = qkv(generator, torch.float32)
    leaves, wide = on_device(*tensors), in_float64(*tensors)
    out, _ = attention(*leaves, spec, strategy="ascend")
    want, _ = attention_reference(*wide, spec)
    upstream = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    out.backward(upstream.float().to(DEVICE))
    want.backward(upstream)
    return [(out, want), *((leaf.grad, one.grad) for leaf, one in zip(leaves, wide, strict=True))]


def packed(generator):
    lengths = [13, 20, 7]
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    tensors = [draw(generator, 1, heads, 40, 32, dtype=HALF) for heads in (6, 3, 3)]
    out, lse = attention(
        *(t.to(DEVICE) for t in tensors), CAUSAL, cu_seqlens_q=starts, cu_seqlens_k=starts, return_lse=True,
        strategy="ascend",
    )  # fmt: skip
    parts = [
        attention_reference(*(piece.double() for piece in pieces), CAUSAL)
        for pieces in zip(*(t.split(lengths, 2) for t in tensors), strict=True)
    ]
    want, want_lse = (torch.cat([part[i] for part in parts], 2) for i in (0, 1))
    return [(out, want), (lse.to(HALF), want_lse)]


def decode(generator):
    where = filled([30, 63, 200], [1, 1, 1], 16, 32, HALF, generator)
    q = draw(generator, 3, 6, 32, dtype=HALF)
    pages = [t.nan_to_num(9.0) for t in where[:2]]  # what a wrong length reads must be a number
    rest = [t.to(DEVICE) for t in (*pages, *where[2:])]
    out, _ = paged_attention(q.to(DEVICE), *rest, CAUSAL, strategy="ascend")
    want, _ = paged_attention_reference(q.double(), *(t.double() for t in pages), *where[2:], CAUSAL)
    return [(out, want)]


def over_codes(generator):
    pages, where = filled_codes([30, 63, 200], [1, 1, 1], 32, 32, generator)
    q = draw(generator, 3, 6, 32, dtype=HALF)
    exact = [p.dequantized(torch.float64) for p in pages]
    rest = [t.to(DEVICE) for t in where]
    out, _ = paged_attention(q.to(DEVICE), *codes_on_device(pages), *rest, CAUSAL, strategy="ascend")
    want, _ = paged_attention_reference(q.double(), *exact, *where, CAUSAL)
    return [(out, want)]


def append(generator):
    k, v = (draw(generator, 4, 2, 32, dtype=HALF) for _ in range(2))
    slots, pages = torch.tensor([3, 17, 40, 5]), [torch.zeros(3, 2, 16, 32, dtype=HALF) for _ in range(2)]
    written = [page.to(DEVICE) for page in pages]
    cache_append(k.to(DEVICE), v.to(DEVICE), *written, slots.to(DEVICE), strategy="ascend")
    for token, slot in enumerate(slots.tolist()):
        for page, source in zip(pages, (k, v), strict=True):
            page[slot // 16, :, slot % 16] = source[token]
    return list(zip(written, (page.double() for page in pages), strict=True))


def norm(generator, offset=0.0):
    x, weight = draw(generator, 9, 48) * 0.01, draw(generator, 48) + 1.0
    leaves, wide = on_device(x, weight), in_float64(x, weight)
    y = rms_norm(*leaves, 1e-6, weight_offset=offset, strategy="ascend")
    want = rms_norm_reference(*wide, 1e-6, offset)
    y.square().sum().backward()
    want.square().sum().backward()
    scale = [float(one.grad.abs().max()) for one in wide]
    return [(y, want), *((a.grad / s, b.grad / s) for a, b, s in zip(leaves, wide, scale, strict=True))]


def gemma(generator):
    x, weight = draw(generator, 9, 48), draw(generator, 48)
    y = rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-6, weight_offset=1.0, strategy="ascend")
    return [(y, rms_norm_reference(x.double(), weight.double(), 1e-6, 1.0))]


def add_norm(generator):
    x, residual, weight = draw(generator, 9, 48), draw(generator, 9, 48), draw(generator, 48)
    got = add_rms_norm(*(t.to(DEVICE) for t in (x, residual, weight)), 1e-6, strategy="ascend")
    want = add_rms_norm_reference(x.double(), residual.double(), weight.double(), 1e-6)
    return list(zip(got, want, strict=True))


def turned(generator):
    x, angles = draw(generator, 2, 9, 3, 32), torch.rand(2, 9, 16, generator=generator) * 6.28
    y = rotary(x.to(DEVICE), angles.cos().to(DEVICE), angles.sin().to(DEVICE), strategy="ascend")
    flat = x.double().flatten(0, 1)
    want = rotary_reference(flat, angles.cos().double().flatten(0, 1), angles.sin().double().flatten(0, 1), False)
    return [(y, want.view(x.shape))]


def gated(generator, kind="silu"):
    gate, up = draw(generator, 9, 32), draw(generator, 9, 32)
    y = gated_activation(gate.to(DEVICE), up.to(DEVICE), kind, strategy="ascend")
    activate = torch.nn.functional.silu if kind == "silu" else torch.nn.functional.gelu
    return [(y, activate(gate.double()) * up.double())]


def windowed(generator):
    return infer(generator, WINDOW)


def one_query_a_head(generator):
    return infer(generator, AttentionSpec(), 6, 57)


def geglu(generator):
    return gated(generator, "gelu")


INFER, FUSION = "npu::npu_fused_infer_attention_score_v2", "npu::npu_fusion_attention"
GRAD, PAGES = f"{FUSION}_grad", "atb::_npu_reshape_and_cache"

#: fault -> what is computed, the operator, the change
FAULTS = {
    "mask polarity": (masked, INFER, lambda c: {"atten_mask": ~c["atten_mask"]}),
    "compressed mask polarity": (infer, INFER, lambda c: {"atten_mask": ~c["atten_mask"]}),
    "missing scale": (infer, INFER, lambda c: {"softmax_scale": 1.0}),
    "missing scale in training": (train, FUSION, lambda c: {"scale": 1.0}),
    "mode without a mask": (train, FUSION, lambda c: {"atten_mask": None}),
    "mode without a mask in inference": (infer, INFER, lambda c: {"atten_mask": None}),
    "mask without its mode": (infer, INFER, lambda c: {"sparse_mode": 0}),
    "causal from the upper left": (infer, INFER, lambda c: {"sparse_mode": 2}),
    "window by mode 3": (windowed, INFER, lambda c: {"sparse_mode": 3}),
    "window one too narrow": (windowed, INFER, lambda c: {"pre_tokens": c["pre_tokens"] - 1}),
    "window that sees the next key": (windowed, INFER, lambda c: {"next_tokens": c["next_tokens"] + 1}),
    "lengths not cumulative": (
        packed,
        FUSION,
        lambda c: {"actual_seq_qlen": [13, 20, 7], "actual_seq_kvlen": [13, 20, 7]},
    ),
    "lengths with a leading zero": (
        packed,
        FUSION,
        lambda c: {"actual_seq_qlen": [0, 13, 33], "actual_seq_kvlen": [0, 13, 33]},
    ),
    "statistics of packed rows by heads": (packed, FUSION, lambda c: {"softmax_layout": ""}),
    "head count": (infer, INFER, lambda c: {"num_query_heads": 3}),
    "key head count": (infer, INFER, lambda c: {"num_key_value_heads": 6}),
    "BSND for BNSD": (one_query_a_head, INFER, lambda c: {"input_layout": "BSND"}),
    "keys and values exchanged": (train, FUSION, lambda c: {"key": c["value"], "value": c["key"]}),
    "heads tiled, not repeated": (
        infer,
        INFER,
        lambda c: {"key": c["key"].flip(1).contiguous(), "value": c["value"].flip(1).contiguous()},
    ),
    "bias outside of the scale": (biased, FUSION, lambda c: {"pse": c["pse"] * c["scale"]}),
    "backward without the scale": (train, GRAD, lambda c: {"scale_value": 1.0}),
    "backward without the mask": (train, GRAD, lambda c: {"atten_mask": None}),
    "max and sum exchanged": (
        train,
        GRAD,
        lambda c: {"softmax_max": c["softmax_sum"], "softmax_sum": c["softmax_max"]},
    ),
    "rows of the block table": (decode, INFER, lambda c: {"block_table": c["block_table"].roll(1, 0).contiguous()}),
    "a key too few": (decode, INFER, lambda c: {"actual_seq_kvlen": [n - 1 for n in c["actual_seq_kvlen"]]}),
    "a key too many": (decode, INFER, lambda c: {"actual_seq_kvlen": [n + 1 for n in c["actual_seq_kvlen"]]}),
    "scales of the values for the keys": (
        over_codes,
        INFER,
        lambda c: {"dequant_scale_key": c["dequant_scale_value"], "dequant_scale_value": c["dequant_scale_key"]},
    ),
    "scales of another row": (over_codes, INFER, lambda c: {"dequant_scale_key": c["dequant_scale_key"].roll(1, 0)}),
    "scales of another head": (over_codes, INFER, lambda c: {"dequant_scale_value": c["dequant_scale_value"].flip(1)}),
    "scales of another page": (
        over_codes,
        INFER,
        lambda c: {"dequant_scale_key": c["dequant_scale_key"].roll(32, -1)},
    ),
    "scales by place of scales by token": (over_codes, INFER, lambda c: {"key_quant_mode": 5, "value_quant_mode": 5}),
    "one mode of two": (over_codes, INFER, lambda c: {"value_quant_mode": 1}),
    "codes without scales": (over_codes, INFER, lambda c: {"dequant_scale_key": None, "dequant_scale_value": None}),
    "a code's key too few": (over_codes, INFER, lambda c: {"actual_seq_kvlen": [n - 1 for n in c["actual_seq_kvlen"]]}),
    "slots shifted": (append, PAGES, lambda c: {"slot_indices": c["slot_indices"] + 1}),
    "pages exchanged": (append, PAGES, lambda c: {"key": c["value"], "value": c["key"]}),
    "cos and sin exchanged": (turned, "npu::npu_rotary_mul", lambda c: {"r1": c["r2"], "r2": c["r1"]}),
    "rotation the other way": (turned, "npu::npu_rotary_mul", lambda c: {"r2": -c["r2"]}),
    "rotation by neighbours": (turned, "npu::npu_rotary_mul", lambda c: {"rotary_mode": "interleave"}),
    "epsilon": (norm, "npu::npu_rms_norm", lambda c: {"epsilon": 1e-5}),
    "statistics of the backward": (norm, "npu::npu_rms_norm_backward", lambda c: {"rstd": c["rstd"] * 1.1}),
    "one plus the weight": (gemma, "npu::npu_gemma_rms_norm", lambda c: {"gamma": c["gamma"] + 1.0}),
    "residual added twice": (add_norm, "npu::npu_add_rms_norm", lambda c: {"x1": c["x1"] + c["x2"]}),
    "gate and up exchanged": (gated, "npu::npu_swiglu", lambda c: {"input": c["input"].roll(32, -1)}),
    "the right half activated": (geglu, "npu::npu_geglu", lambda c: {"activate_left": False}),
    "tanh for erf": (geglu, "npu::npu_geglu", lambda c: {"approximate": 1}),
}


def compare(pairs):
    for place, (mine, truth) in enumerate(pairs):
        assert_parity(mine.detach().cpu(), truth.detach(), what=f"output {place}")


@pytest.mark.parametrize("computed", sorted({case[0] for case in FAULTS.values()}, key=lambda f: f.__name__))
def test_without_a_fault_parity_holds(npu, computed):
    compare(computed(fresh_generator()))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_turns_parity_red(name):
    computed, operator, change = FAULTS[name]
    with Tampered(operator, change) as tampered, pytest.raises((AssertionError, OperatorError)):
        compare(computed(fresh_generator()))
    assert tampered.hits, f"{operator} was not called: nothing was planted"


def test_enough_faults_are_planted():
    assert len(FAULTS) >= 15
