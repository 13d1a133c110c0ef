"""Calls of the fused attention of training that the documentation forbids, each with its rule."""

from __future__ import annotations

import pytest
import torch

from atb_modules.testing.npu import EmulatedNPU, OperatorError

from .helpers import DEVICE

ops = torch.ops.npu


def make(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=DEVICE)


def call(q=None, k=None, v=None, heads=4, layout="BNSD", **more):
    q = make(2, 4, 5, 8) if q is None else q
    k = make(2, 2, 6, 8) if k is None else k
    return ops.npu_fusion_attention(q, k, k if v is None else v, heads, layout, **more)


def triangle_on_device():
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(DEVICE)


FORBIDDEN = {
    "float64": (lambda: call(make(2, 4, 5, 8, dtype=torch.float64)), "float16, bfloat16, float32"),
    "mixed dtypes": (lambda: call(make(2, 4, 5, 8, dtype=torch.half)), "dtypes must be the same"),
    "dims of the layout": (lambda: call(layout="BSH"), "takes 3 dims"),
    "heads of the layout": (lambda: call(make(2, 5, 4, 8)), "head_num is 4, query in BNSD has 5 heads"),
    "ratio of heads": (lambda: call(k=make(2, 3, 6, 8)), "whole number"),
    "batch": (lambda: call(k=make(1, 2, 6, 8)), "batch sizes"),
    "key and value": (lambda: call(v=make(2, 2, 7, 8)), "same shape"),
    "wide values": (lambda: call(v=make(2, 2, 6, 16)), "must not exceed"),
    "wide heads": (lambda: call(make(1, 1, 1, 776), make(1, 1, 1, 776), heads=1), "1 to 768"),
    "many heads": (lambda: call(make(1, 257, 1, 8), make(1, 257, 1, 8), heads=257), "1 to 256"),
    "empty keys": (lambda: call(k=make(2, 2, 0, 8)), "at least 1"),
    "padding mask": (lambda: call(padding_mask=make(2, 6)), "padding_mask is not supported"),
    "float mask": (lambda: call(atten_mask=make(5, 6)), "bool or uint8"),
    "mask of another shape": (lambda: call(atten_mask=make(6, 5).bool()), "atten_mask has shape"),
    "compressed mask of another size": (
        lambda: call(sparse_mode=3, atten_mask=make(5, 6).bool()),
        r"takes atten_mask \(2048, 2048\)",
    ),
    "compressed mask the other way round": (
        lambda: call(sparse_mode=3, atten_mask=~triangle_on_device()),
        "masked. above the diagonal",
    ),
    "mode 9": (lambda: call(sparse_mode=9), "0 to 8"),
    "mode 7 outside TND": (lambda: call(sparse_mode=7, atten_mask=triangle_on_device()), "is for TND"),
    "prefix without prefixes": (
        lambda: call(sparse_mode=5, atten_mask=make(2, 1, 5, 6).bool()),
        "needs prefix",
    ),
    "prefix out of range": (
        lambda: call(sparse_mode=5, atten_mask=make(2, 1, 5, 6).bool(), prefix=[0, 3]),
        "must lie in",
    ),
    "empty band": (
        lambda: call(sparse_mode=4, atten_mask=triangle_on_device(), pre_tockens=-3, next_tockens=1),
        "must overlap",
    ),
    "mask beyond the tokens": (
        lambda: call(atten_mask=(make(5, 6) * 0).bool(), pre_tockens=1, next_tockens=0),
        "the two must agree",
    ),
    "packed without lengths": (lambda: call(make(5, 4, 8), make(6, 2, 8), layout="TND"), "needs actual_seq_qlen"),
    "lengths that are not cumulative": (
        lambda: call(
            make(9, 4, 8), make(9, 2, 8), layout="TND", actual_seq_qlen=[5, 4], actual_seq_kvlen=[5, 4]
        ),
        "must be cumulative",
    ),
    "lengths beyond the rows": (
        lambda: call(make(5, 4, 8), make(6, 2, 8), layout="TND", actual_seq_qlen=[9], actual_seq_kvlen=[6]),
        "the tensor has 5 rows",
    ),
    "lengths outside TND": (lambda: call(actual_seq_qlen=[5], actual_seq_kvlen=[6]), "belong to TND"),
    "a packed row masked all over": (
        lambda: call(
            make(5, 4, 8), make(6, 2, 8), layout="TND", actual_seq_qlen=[5], actual_seq_kvlen=[6], sparse_mode=1,
            atten_mask=make(5, 6).bool(),
        ),
        "must not mask a whole row",
    ),
    "sink of another dtype": (lambda: call(sink=make(4, dtype=torch.half)), "float32 is supported"),
    "softmax layout": (lambda: call(softmax_layout="TND"), "belongs to TND"),
    "pse of another shape": (lambda: call(pse=make(1, 1, 5, 6)), "BNSS, BN1S and 1NSS"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_calls(name):
    invoke, rule = FORBIDDEN[name]
    with EmulatedNPU(check_meta=False), pytest.raises(OperatorError, match=rule):
        invoke()


def test_310p_has_no_fused_training_attention():
    with EmulatedNPU(soc="ascend310p"), pytest.raises(OperatorError, match="not among the products"):
        call(make(2, 4, 5, 8, dtype=torch.half), make(2, 2, 6, 8, dtype=torch.half))


def test_a_derivative_of_the_derivative_is_refused(npu):
    q = torch.randn(1, 2, 5, 16).to(DEVICE).requires_grad_()
    out = torch.ops.npu.npu_fusion_attention(q, q, q, 2, "BNSD")[0]
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(OperatorError, match="dy is undefined"):
        first.sum().backward()
