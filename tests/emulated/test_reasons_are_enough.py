"""Whatever the records of strategy ASCEND accept, the documented rules of the operators accept: random calls.

A call is refused before its launch with a reason, or it runs; an ``OperatorError`` in between is a rule that
``reasons()`` does not know.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atb_modules.attention.functional import attention, cache_append, paged_attention
from atb_modules.attention.rope import rotary
from atb_modules.kernels.ascend.availability import assume_soc
from atb_modules.kernels.pages import QuantizedPages
from atb_modules.mlp.functional import gated_activation
from atb_modules.norm.functional import add_layer_norm, add_rms_norm, rms_norm
from atb_modules.spec import AttentionSpec
from atb_modules.testing.npu import EmulatedNPU

from .helpers import DEVICE

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SOCS = st.sampled_from(["ascend910b1", "ascend910_93", "ascend310p", "ascend950"])
EVERY = settings(max_examples=60, deadline=None)


@contextlib.contextmanager
def machine(soc):
    """The records reckon with ``soc``, and the operators hold to its rules."""
    with assume_soc(soc), EmulatedNPU(soc=soc):
        yield


def runs_or_is_refused(call, *args, **kwargs):
    """Whether it ran; a refusal names the strategy and its reasons."""
    try:
        call(*args, strategy="ascend", **kwargs)
    except ValueError as refusal:
        assert "cannot serve this" in str(refusal), refusal
        return False
    return True


def made(shape, dtype, grad=False):
    return torch.ones(shape, dtype=dtype).to(DEVICE).requires_grad_(grad)


SPECS = st.sampled_from(
    [
        AttentionSpec(),
        AttentionSpec(causal=True),
        AttentionSpec(causal="top_left"),
        AttentionSpec(causal=True, window=(2, None)),
        AttentionSpec(window=(1, 3)),
        AttentionSpec(causal=True, prefix=2),
        AttentionSpec(causal=True, window=(3, None), global_tokens=1),
        AttentionSpec(softcap=5.0),
        AttentionSpec(scale=0.5),
    ]
)


@given(
    soc=SOCS,
    dtype=DTYPES,
    spec=SPECS,
    kv_heads=st.sampled_from([1, 2, 3, 256, 257]),
    group=st.sampled_from([1, 2, 65]),
    rows=st.sampled_from([1, 2, 9]),
    columns=st.sampled_from([1, 3, 12]),
    head_dim=st.sampled_from([1, 8, 16, 40, 80, 128, 192, 256, 512, 520, 576, 768, 776]),
    narrow=st.booleans(),
    grad=st.booleans(),
    return_lse=st.booleans(),
    bias=st.sampled_from(["", "bool", "float", "alibi", "sinks"]),
)
@example(
    soc="ascend910b1", dtype=torch.float16, spec=AttentionSpec(), kv_heads=1, group=65, rows=1, columns=3,
    head_dim=16, narrow=False, grad=False, return_lse=False, bias="",
)  # fmt: skip
@EVERY
def test_attention(soc, dtype, spec, kv_heads, group, rows, columns, head_dim, narrow, grad, return_lse, bias):
    heads = kv_heads * group
    with machine(soc):
        q = made((2, heads, rows, head_dim), dtype, grad)
        k = made((2, kv_heads, columns, head_dim), dtype, grad)
        v = made((2, kv_heads, columns, max(1, head_dim // 2) if narrow else head_dim), dtype, grad)
        more = {}
        if bias in ("bool", "float"):
            mask = torch.ones(rows, columns).to(DEVICE)
            more["mask"] = mask > 0 if bias == "bool" else mask.to(dtype)
        elif bias:
            more["alibi_slopes" if bias == "alibi" else "sinks"] = torch.ones(heads).to(DEVICE)
        runs_or_is_refused(attention, q, k, v, spec, return_lse=return_lse, **more)


@given(
    soc=SOCS,
    dtype=DTYPES,
    window=st.sampled_from([None, (4, None)]),
    kv_heads=st.sampled_from([1, 2, 256, 300]),
    group=st.sampled_from([1, 2, 65]),
    page_size=st.sampled_from([8, 16, 48, 64, 128, 256, 384, 512, 528, 640]),
    head_dim=st.sampled_from([8, 16, 80, 128, 512, 528]),
    new=st.sampled_from([(1, 1), (3, 1), (1, 0), (2, 5)]),
    return_lse=st.booleans(),
    codes=st.booleans(),
)
@EVERY
def test_paged_attention(soc, dtype, window, kv_heads, group, page_size, head_dim, new, return_lse, codes):
    with machine(soc):
        pages = made((5, kv_heads, page_size, head_dim), torch.int8 if codes else dtype)
        if codes:
            pages = QuantizedPages(pages, made((5, kv_heads), torch.float32))
        q = made((sum(new), kv_heads * group, head_dim), dtype)
        table = torch.tensor([[3, 1], [0, -1]], dtype=torch.int32).to(DEVICE)
        lengths = torch.tensor([page_size + 3, 5], dtype=torch.int32).to(DEVICE)
        starts = torch.tensor([0, new[0], sum(new)], dtype=torch.int32).to(DEVICE)
        spec = AttentionSpec(causal=True, window=window)
        runs_or_is_refused(paged_attention, q, pages, pages, table, lengths, starts, spec, return_lse=return_lse)


@given(
    soc=SOCS,
    dtype=DTYPES,
    kv_heads=st.sampled_from([1, 3]),
    page_size=st.sampled_from([1, 16, 100, 512]),
    head_dim=st.sampled_from([1, 64, 80, 512]),
    codes=st.booleans(),
)
@EVERY
def test_cache_append(soc, dtype, kv_heads, page_size, head_dim, codes):
    with machine(soc):
        pages = [made((3, kv_heads, page_size, head_dim), torch.int8 if codes else dtype) for _ in range(2)]
        if codes:
            pages = [QuantizedPages(memory, made((3, kv_heads), torch.float32)) for memory in pages]
        tokens = made((2, kv_heads, head_dim), dtype)
        runs_or_is_refused(cache_append, tokens, tokens, *pages, torch.tensor([0, 2]).to(DEVICE))


@given(
    soc=SOCS,
    dtype=DTYPES,
    layout=st.sampled_from(["half", "interleaved"]),
    tokens=st.sampled_from([1, 7, 1100]),
    heads=st.sampled_from([1, 3, 999, 1001]),
    planes=st.sampled_from([1, 3, 16, 447, 448]),
    rest=st.sampled_from([0, 2]),
    grad=st.booleans(),
)
@EVERY
def test_rotary(soc, dtype, layout, tokens, heads, planes, rest, grad):
    if tokens * heads * planes > 2**21:
        tokens = 1
    with machine(soc):
        x, angles = made((tokens, heads, 2 * planes + rest), dtype, grad), made((tokens, planes), torch.float32)
        runs_or_is_refused(rotary, x, angles, angles, layout=layout)


@given(
    soc=SOCS,
    dtype=DTYPES,
    weight=st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
    shape=st.sampled_from([(1, 1), (3, 7), (2, 5, 64), (2, 2, 2, 2, 2, 2, 2, 2, 3), (0, 8), (6,)]),
    offset=st.sampled_from([0.0, 1.0]),
    grad=st.booleans(),
)
@example(soc="ascend310p", dtype=torch.float16, weight=torch.float16, shape=(3, 7), offset=1.0, grad=False)
@EVERY
def test_norms(soc, dtype, weight, shape, offset, grad):
    with machine(soc):
        x, residual = made(shape, dtype, grad), made(shape, dtype, grad)
        w = None if weight is None else made(shape[-1:], weight, grad)
        runs_or_is_refused(rms_norm, x, w, weight_offset=offset)
        runs_or_is_refused(add_rms_norm, x, residual, w, weight_offset=offset)
        runs_or_is_refused(add_layer_norm, x, residual, w, w)


@given(
    soc=SOCS,
    dtype=DTYPES,
    kind=st.sampled_from(["silu", "gelu", "gelu_tanh", "relu2"]),
    shape=st.sampled_from([(1, 1), (3, 7), (2, 5, 64), (0, 8), (6,)]),
    grad=st.booleans(),
)
@EVERY
def test_gated_activations(soc, dtype, kind, shape, grad):
    with machine(soc):
        runs_or_is_refused(gated_activation, made(shape, dtype, grad), made(shape, dtype, grad), kind)


@pytest.mark.parametrize("soc", ["ascend910b1", "ascend310p"])
def test_something_runs_and_something_is_refused(soc):
    """The property above would hold of records that refuse everything."""
    with machine(soc):
        x = made((2, 16), torch.float16)
        assert runs_or_is_refused(rms_norm, x)
        assert runs_or_is_refused(rms_norm, made((2, 8), torch.float16)) == (soc == "ascend910b1")  # 16 bytes
        q = made((1, 2, 4, 16), torch.float16)
        assert runs_or_is_refused(attention, q, q, q)
        assert runs_or_is_refused(attention, q, q, q, return_lse=True) == (soc == "ascend910b1")
        assert runs_or_is_refused(rms_norm, x.bfloat16()) == (soc == "ascend910b1")
