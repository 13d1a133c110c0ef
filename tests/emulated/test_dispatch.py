"""The dispatch mode: everything around the fused operators behaves as on the CPU, and the log says what ran."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from atb_modules.testing import fresh_generator
from atb_modules.testing.npu import EmulatedNPU, HostSyncError, NoReferenceError, OperatorError, dry_run
from atb_modules.testing.npu.aliases import alias
from atb_modules.testing.npu.references import find_reference

from .helpers import DEVICE, draw

ops = torch.ops.npu


def same(function, *tensors):
    """The same result on both sides, whatever is a tensor in it."""
    want, got = function(*tensors), function(*(t.to(DEVICE) for t in tensors))
    for one, truth in zip(as_tuple(got), as_tuple(want), strict=True):
        assert one.device.type == "npu" and one.shape == truth.shape and one.stride() == truth.stride()
        torch.testing.assert_close(one.cpu(), truth)


def as_tuple(value):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


FUNCTIONS = {
    "arithmetic": lambda x: (x + 1) * x / 3 - x.square(),
    "views": lambda x: x.t()[1:, ::2].unsqueeze(0).expand(3, -1, -1) * 2,
    "transposed product": lambda x: x.t() @ x,
    "in place": lambda x: x.clone().add_(2).mul_(x),
    "in place on a view": lambda x: (y := x.clone(), y[:, 1:3].zero_())[0],
    "assignment": lambda x: (y := x.clone(), y.__setitem__((slice(None), 0), 7.0))[0],
    "assignment by mask": lambda x: (y := x.clone(), y.__setitem__(y > 0, -1.0))[0],
    "gather by index": lambda x: x[torch.tensor([2, 0], device=x.device)],
    "gather by mask": lambda x: x[x > 0],
    "reductions": lambda x: (x.sum(), x.mean(0), x.max(1).values, x.argmax(1)),
    "concatenation": lambda x: torch.cat((x, x.flip(0) * 2), 1),
    "split": lambda x: [part * 2 for part in x.split(2)],
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "softmax": lambda x: torch.softmax(x, -1),
    "sort": lambda x: torch.sort(x, -1),
    "contiguous": lambda x: x.t().contiguous(),
    "reshape of a transposed": lambda x: x.t().reshape(-1),
    "dtype": lambda x: (x.half(), x.double(), x > 0, x.long()),
    "new tensors": lambda x: (x.new_zeros(3), torch.ones_like(x), torch.arange(4, device=x.device)),
    "scatter": lambda x: torch.zeros_like(x).scatter_(1, x.argmax(1, keepdim=True), 1.0),
    "empty": lambda x: x[:0] * 2,
    "cumulative": lambda x: x.cumsum(0),
    "triangle": lambda x: torch.triu(x, 1),
    "zero-dimensional": lambda x: x[0, 0] + x.sum() * 2,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "repeat": lambda x: x.repeat_interleave(2, 0),
    "foreach": lambda x: torch._foreach_mul([x, x.t()], 3.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_of_pytorch(npu, name):
    same(FUNCTIONS[name], draw(fresh_generator(), 4, 5))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_of_pytorch_in_inference_mode(npu, name):
    with torch.inference_mode():
        same(FUNCTIONS[name], draw(fresh_generator(), 4, 5))


def test_in_place_results_are_the_callers_own_tensor(npu):
    x = torch.ones(3, device=DEVICE)
    assert x.add_(1) is x
    out = torch.empty(0, device=DEVICE)
    assert torch.mul(x, 3, out=out) is out and out.shape == (3,) and out.cpu().tolist() == [6.0, 6.0, 6.0]
    assert torch.add(x, 1, out=out[:]).data_ptr() == out.data_ptr()


def test_memory_is_shared_with_the_device(npu):
    x = torch.zeros(2, 3, device=DEVICE)
    alias(x[1]).fill_(4)
    assert x.cpu().tolist() == [[0.0] * 3, [4.0] * 3]


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 6), nn.RMSNorm(6))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_training_steps_equal_those_of_the_cpu(npu, optimizer):
    generator = fresh_generator()
    here = network()
    there = copy.deepcopy(here).to(DEVICE)
    optimizers = [optimizer(net.parameters(), lr=0.05) for net in (here, there)]
    for _ in range(3):
        x = draw(generator, 7, 6)
        for net, step, batch in ((here, optimizers[0], x), (there, optimizers[1], x.to(DEVICE))):
            step.zero_grad()
            (net(batch) - batch).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            step.step()
    for one, truth in zip(there.parameters(), here.parameters(), strict=True):
        assert one.device.type == "npu"
        torch.testing.assert_close(one.detach().cpu(), truth.detach(), atol=1e-4, rtol=1e-4)


def test_state_dicts_move_and_are_saved(npu):
    net = network().to(DEVICE)
    saved = io.BytesIO()
    torch.save(net.state_dict(), saved)
    saved.seek(0)
    back = torch.load(saved, map_location="cpu")
    other = network()
    other.load_state_dict(back)
    there = network().to(DEVICE)
    there.load_state_dict(other.state_dict())
    for one, truth in zip(there.state_dict().values(), net.state_dict().values(), strict=True):
        assert torch.equal(one.cpu(), truth.cpu())


@pytest.mark.parametrize(
    "shapes", [((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 1, 3, 4), (5, 4, 6)), ((4,), (4,))]
)
def test_products_are_differentiated_by_torch_npus_formula(npu, shapes):
    generator = fresh_generator()
    here = [draw(generator, *s).requires_grad_() for s in shapes]
    there = [t.detach().to(DEVICE).requires_grad_() for t in here]
    for sides in (here, there):
        (sides[0] @ sides[1]).square().sum().backward()
    assert "aten::matmul_backward" in npu.log.names
    for one, truth in zip(there, here, strict=True):
        torch.testing.assert_close(one.grad.cpu(), truth.grad, atol=1e-4, rtol=1e-4)


def test_no_grad_and_checkpointing(npu):
    net = network().to(DEVICE)
    x = torch.ones(2, 6, device=DEVICE, requires_grad=True)
    with torch.no_grad():
        assert not net(x).requires_grad
    first = torch.autograd.grad(net(x).sum(), x)[0]
    again = torch.autograd.grad(torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).sum(), x)[0]
    assert torch.equal(first.cpu(), again.cpu())


def test_random_numbers_follow_the_devices_own_generator(npu):
    torch.npu.manual_seed(5)
    first, second = torch.randn(4, device=DEVICE), torch.rand(4, device=DEVICE)
    state = torch.npu.get_rng_state()
    third = torch.randn(4, device=DEVICE)
    torch.npu.manual_seed(5)
    assert torch.equal(torch.randn(4, device=DEVICE).cpu(), first.cpu())
    assert torch.equal(torch.rand(4, device=DEVICE).cpu(), second.cpu())
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(4, device=DEVICE).cpu(), third.cpu())
    assert not torch.equal(first.cpu(), third.cpu())


def test_random_numbers_leave_the_hosts_generator_alone(npu):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    torch.nn.functional.dropout(torch.ones(100, device=DEVICE), 0.5)
    torch.empty(10, device=DEVICE).normal_(generator=torch.Generator(device=DEVICE).manual_seed(1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_generator_of_the_host_is_refused_as_torch_npu_does(npu):
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator but found 'cpu'"):
        torch.multinomial(torch.ones(2, 3, device=DEVICE), 1, generator=torch.Generator())


def test_fresh_memory_is_poisoned(npu):
    for fresh in (torch.empty(3, device=DEVICE), torch.ones(2, device=DEVICE).new_empty(4)):
        assert fresh.isnan().all()
    with EmulatedNPU(poison=False):
        assert torch.empty(3, device=DEVICE).shape == (3,)


def test_the_log_counts_launches_and_bytes(npu):
    x, gamma = torch.ones(4, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    npu.log.clear()
    ops.npu_rms_norm(x, gamma)
    (x.t()[:, 1:].unsqueeze(0) + 1).squeeze(0)
    assert npu.log.names == ["npu::npu_rms_norm", "aten::add.Tensor"]
    assert npu.log.fused == ["npu::npu_rms_norm"]
    assert npu.log.counts() == {"npu::npu_rms_norm": 1, "aten::add.Tensor": 1}
    read, written = 4 * 16 + 16, 4 * 16 + 4
    assert npu.log.bytes()["npu::npu_rms_norm"] == 4 * (read + written)
    assert "emulated" in str(npu.log)


WAITING = {
    "item": lambda x: x.sum().item(),
    "to the host": lambda x: x.cpu(),
    "into a host tensor": lambda x: torch.empty(4).copy_(x),
    "python truth": lambda x: bool((x > 0).all()),
    "list": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "boolean assignment": lambda x: x.__setitem__(x > 0, 0.0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeats on the device": lambda x: torch.repeat_interleave(x, torch.ones(4, dtype=torch.long, device=DEVICE)),
    "masked select": lambda x: x.masked_select(x > 0),
}


@pytest.mark.parametrize("name", WAITING)
def test_waits_of_the_host_are_logged_and_can_be_forbidden(npu, name):
    x = torch.ones(4, device=DEVICE)
    npu.log.clear()
    WAITING[name](x)
    assert npu.log.host_syncs
    with npu.forbid_host_sync(), pytest.raises(HostSyncError, match="makes the host wait"):
        WAITING[name](torch.ones(4, device=DEVICE))


@pytest.mark.parametrize("wait", [lambda: torch.npu.synchronize(), lambda: torch.npu.current_stream().synchronize()])
def test_waits_that_are_no_operators_show_when_the_block_ends(npu, wait):
    with pytest.raises(HostSyncError, match="a stream, an event or the device"), npu.forbid_host_sync():
        wait()


def test_work_without_waits_is_allowed(npu):
    with npu.forbid_host_sync():
        x = torch.ones(4, 6).pin_memory().to(DEVICE, non_blocking=True)
        y = x[torch.tensor([1, 0]).pin_memory().to(DEVICE, non_blocking=True)].softmax(-1).masked_fill(x[:2] > 2, 0.0)
        ops.npu_swiglu(y)
        y.to("cpu", non_blocking=True)
    assert npu.log.host_syncs == [] and len(npu.log.uploads) == 2


COPIES = {
    "up": lambda host, there, ask: host.to(DEVICE, non_blocking=ask),
    "up into": lambda host, there, ask: there.copy_(host, non_blocking=ask),
    "down": lambda host, there, ask: there.to("cpu", non_blocking=ask),
    "down into": lambda host, there, ask: host.copy_(there, non_blocking=ask),
}


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("ask", [False, True])
@pytest.mark.parametrize("name", COPIES)
def test_copies_wait_where_torch_npus_own_code_waits(booted_npu, name, ask, pinned):
    host, there = torch.ones(4), torch.ones(4).to(DEVICE)
    host = host.pin_memory() if pinned else host
    with dry_run() as launches:
        COPIES[name](host, there, ask)
    with EmulatedNPU() as emulated:
        COPIES[name](host, there, ask)
    assert bool(emulated.log.host_syncs) == any(launch.name.startswith("host:") for launch in launches)


def test_an_operator_without_a_reference_is_named(npu):
    with pytest.raises(NoReferenceError, match="npu::npu_silu has no reference"):
        ops.npu_silu(torch.ones(3, device=DEVICE))


def test_an_argument_that_a_reference_does_not_know_is_named(npu):
    x = torch.ones(1, 1, 1, 8, device=DEVICE)
    with pytest.raises(NoReferenceError, match="npu_rotary_mul: argument rotate is not emulated"):
        ops.npu_rotary_mul(x, x, x, "half", torch.eye(8, device=DEVICE))


def test_a_reference_that_disagrees_with_the_meta_kernel_is_caught(npu, monkeypatch):
    from atb_modules.testing.npu import dispatch

    def wrong(input, dim=-1):
        return find_reference("npu::npu_swiglu")(input, dim)[..., :1]

    monkeypatch.setattr(dispatch, "find_reference", lambda name: wrong if name == "npu::npu_swiglu" else None)
    with pytest.raises(OperatorError, match=r"output 0 is torch.float32 \(2, 1\) here and torch.float32 \(2, 4\)"):
        ops.npu_swiglu(torch.ones(2, 8, device=DEVICE))


def test_tensors_on_the_wrong_side_are_refused(npu):
    with pytest.raises(OperatorError, match="gamma is on cpu; it must be on the device"):
        ops.npu_rms_norm(torch.ones(2, 8, device=DEVICE), torch.ones(8))


def test_attention_of_pytorch_shows_as_the_fused_operator(npu):
    q = torch.ones(1, 2, 4, 8, device=DEVICE)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    with torch.inference_mode():
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert npu.log.fused == ["npu::npu_fusion_attention_v3"] * 2


def test_somebodys_own_operator_runs_its_kernel_for_the_device(npu):
    library = torch.library.Library("atb_modules_test", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CPU")
    x = torch.ones(3, device=DEVICE)
    npu.log.clear()
    assert torch.ops.atb_modules_test.doubled(x).cpu().tolist() == [2.0, 2.0, 2.0]
    assert npu.log.host_syncs[0] == "atb_modules_test::doubled", "torch_npu falls back to the CPU"
    with npu.forbid_host_sync(), pytest.raises(HostSyncError, match="no kernel for the device"):
        torch.ops.atb_modules_test.doubled(x)
    library.impl("doubled", lambda x: x + x, "PrivateUse1")
    npu.log.clear()
    assert torch.ops.atb_modules_test.doubled(x).cpu().tolist() == [2.0, 2.0, 2.0]
    assert npu.log.names[:2] == ["aten::add.Tensor", "atb_modules_test::doubled"]
    assert npu.log.calls[1].host_sync is False


def test_fake_tensors_go_past_it_to_meta_kernels(npu):
    with FakeTensorMode():
        x = torch.randn(3, 8, device=DEVICE)
        normed, rstd = torch.ops.npu.npu_rms_norm(x + 1, x[0])
    assert normed.shape == (3, 8) and rstd.shape == (3, 1) and normed.device == x.device
    assert "FakeTensor" in repr(normed)
    assert not npu.log.calls
