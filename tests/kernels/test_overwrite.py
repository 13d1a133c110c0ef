"""overwrite=True: the values of a fresh result whatever the arguments share, and their memory where they share none."""

from __future__ import annotations

import pytest
import torch

from atb_modules.kernels.memory import apart, elements_apart, may_take, row_layout
from atb_modules.ops import add_rms_norm, gated_activation, rotary


def base(size=4096):
    torch.manual_seed(0)
    return torch.randn(size)


def halves():
    return base().view(16, 256).split(128, dim=-1)


def shared(kind):
    data = base()
    return {
        "halves": halves,
        "the same": lambda: (data.view(16, 256), data.view(16, 256)),
        "apart": lambda: (data[:2048].view(16, 128), data[2048:].view(16, 128)),
        "shifted": lambda: (data[:2048].view(16, 128), data[1:2049].view(16, 128)),
        "shifted back": lambda: (data[1:2049].view(16, 128), data[:2048].view(16, 128)),
        "shifted rows": lambda: (data[:2048].view(16, 128), data[128:2176].view(16, 128)),
        "overlapping halves": lambda: (data.view(16, 256)[:, :160], data.view(16, 256)[:, 96:]),
        "transposed": lambda: (data.view(64, 64), data.view(64, 64).t()),
        "transposed gate": lambda: (data.view(64, 64).t(), torch.ones(64, 64)),
        "every second": lambda: (data.view(16, 256)[..., ::2], torch.ones(16, 128)),
        "unfolded": lambda: (data.unfold(0, 64, 1)[:32], torch.ones(32, 64)),
        "expanded": lambda: (data[:64].expand(4, 64), torch.ones(4, 64)),
        "odd axes": lambda: (data.view(16, 16, 16).transpose(0, 1), torch.ones(16, 16, 16)),
        "no rows": lambda: (data.view(16, 256)[:0], torch.ones(0, 256)),
    }[kind]()  # fmt: skip


KINDS = [
    "halves", "the same", "apart", "shifted", "shifted back", "shifted rows", "overlapping halves", "transposed",
    "transposed gate", "every second", "unfolded", "expanded", "odd axes", "no rows",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_gated_activation(kind):
    gate, up = shared(kind)
    expected = gated_activation(gate.clone(), up.clone(), strategy="cpu")
    torch.testing.assert_close(gated_activation(gate, up, strategy="cpu", overwrite=True), expected, atol=0, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_add_rms_norm(kind):
    x, residual = shared(kind)
    expected = add_rms_norm(x.clone(), residual.clone(), strategy="cpu")
    got = add_rms_norm(x, residual, strategy="cpu", overwrite=True)
    torch.testing.assert_close(got, expected, atol=0, rtol=0)


def test_add_rms_norm_whose_weight_is_a_row_of_x():
    x, residual = base().view(16, 256), torch.ones(16, 256)
    expected = add_rms_norm(x.clone(), residual, x[3].clone(), strategy="cpu")
    torch.testing.assert_close(add_rms_norm(x, residual, x[3], strategy="cpu", overwrite=True), expected)


def test_rotary_of_shared_memory():
    for x in (base().view(16, 4, 64), base().unfold(0, 64, 1)[:64].view(16, 4, 64), base().view(4, 16, 64)[:, :, :32]):
        tables = x[:, 0, :8], x[:, -1, 8:16]
        expected = rotary(x.clone(), *(table.clone() for table in tables), strategy="cpu")
        torch.testing.assert_close(rotary(x, *tables, strategy="cpu", overwrite=True), expected, atol=0, rtol=0)


def test_memory_is_taken_where_it_can_be():
    gate, up = halves()
    assert gated_activation(gate, up, strategy="cpu", overwrite=True).data_ptr() == gate.data_ptr()
    x = base().view(16, 256)
    assert add_rms_norm(x, base().view(16, 256), strategy="cpu", overwrite=True)[1].data_ptr() == x.data_ptr()
    q, k = base().view(16, 4, 64).split([3, 1], dim=1)
    for part in (q, k):
        table = torch.ones(16, 32)
        assert rotary(part, table, table, strategy="cpu", overwrite=True).data_ptr() == part.data_ptr()


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4), (5,), (3, 1)])
def test_memory_questions_against_the_elements_themselves(shape):
    generator = torch.Generator().manual_seed(1)
    data = torch.zeros(400)
    taken = 0
    for _ in range(400):
        views = []
        for _ in range(2):
            strides = [int(torch.randint(0, 20, (), generator=generator)) for _ in shape]
            if torch.rand((), generator=generator) < 0.7:
                strides[-1] = 1
            if views and torch.rand((), generator=generator) < 0.7:
                strides = list(views[0].stride())
            views.append(data.as_strided(shape, strides, int(torch.randint(0, 90, (), generator=generator))))
        places = [
            torch.arange(400).as_strided(v.shape, v.stride(), v.storage_offset()).flatten().tolist() for v in views
        ]
        x, other = views
        if elements_apart(x):
            assert len(set(places[0])) == len(places[0])
        if apart(x, other):
            assert not set(places[0]) & set(places[1])
        if may_take(x, other):
            taken += 1
            assert places[0] == places[1] or not set(places[0]) & set(places[1])
        if row_layout(x) is not None:
            width, stride = row_layout(x)
            assert places[0] == [places[0][0] + r * stride + c for r in range(x.numel() // width) for c in range(width)]
    assert taken
