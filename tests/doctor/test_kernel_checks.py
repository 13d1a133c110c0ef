"""Every kernel of the registry is run once, a broken one is found out, and every reason is told."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

import atb_modules.kernels  # noqa: F401  (registers every kernel)
from atb_modules.doctor import report
from atb_modules.doctor.calls import SMALL_CALLS, Inputs
from atb_modules.doctor.places import Places
from atb_modules.kernels import registry
from atb_modules.kernels.ascend.socs import SOCS
from atb_modules.strategies import OP_FAMILIES, use_strategy

BARE = Places(environ={}, package_path=())
ON_CPU = [(op, k.strategy.value) for op in OP_FAMILIES for k in registry.kernels(op) if "npu" not in k.device_types]


@pytest.fixture(scope="module")
def whole():
    return report(places=BARE)


def plant(monkeypatch, op, strategy, **changes):
    """Put another kernel in the place of one of the registry."""
    planted = [
        dataclasses.replace(kernel, **changes) if kernel.strategy == strategy else kernel
        for kernel in registry.kernels(op)
    ]
    monkeypatch.setitem(registry._KERNELS, op, planted)
    registry.forget_choices()


@pytest.fixture(autouse=True)
def forget():
    yield
    registry.forget_choices()


def test_every_op_of_the_registry_has_a_small_call(whole):
    assert set(SMALL_CALLS) == set(OP_FAMILIES)
    assert whole.unchecked_ops == ()


def test_every_kernel_that_can_run_here_ran_and_agrees(whole):
    assert whole.ok and not whole.failed
    for op, strategy in ON_CPU:
        checks = [c for c in whole.checked if (c.op, c.strategy, c.device) == (op, strategy, "cpu")]
        assert [c.dtype for c in checks] == ["float32", "bfloat16"], (op, strategy)
        for check in checks:
            if strategy == "flex":
                assert check.status == "not run" and "--slow" in check.why[0]
            else:
                assert check.status == "agrees" and check.largest_error <= check.allowed, check


def test_kernels_of_the_npu_say_why_not(whole):
    ascend = [c for c in whole.checked if c.strategy == "ascend"]
    assert ascend and {c.status.value for c in ascend} == {"cannot"}
    assert {c.why for c in ascend} == {("runs on npu, the tensors are on cpu",)}


def test_it_is_short_and_quick(whole):
    assert whole.seconds < 10
    assert len(str(whole).splitlines()) < 40
    assert "fine: " in str(whole) and "0 mismatch(es)" in str(whole)


def test_the_library_of_the_cpu(whole):
    native = whole.native
    assert native.problem is None and native.in_use in native.instruction_sets
    assert f"C++ kernels  {native.in_use} in use" in str(whole)


@pytest.mark.parametrize(
    "broken,said",
    [
        (lambda x, weight, eps, *more: 1.001 * registry_reference(x, weight, eps), "off by 1.0e-03"),
        (lambda x, weight, eps, *more: x * float("nan"), "off by inf"),
        (lambda x, *more: x[:, :3], r"the kernel returned \(5, 3\), its reference \(5, 64\)"),
        (lambda *more: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_broken_kernel_is_found_out(monkeypatch, broken, said):
    import re

    plant(monkeypatch, "rms_norm", "torch", function=broken)
    found = report(places=BARE)
    (check,) = [c for c in found.failed if c.dtype == "float32" and c.op != "decode_layer"]
    assert (check.op, check.strategy) == ("rms_norm", "torch") and re.search(said, "; ".join(check.why))
    assert not found.ok and "NOT FINE" in str(found) and re.search("torch FAILS in fp32.*" + said, str(found))
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["ok"] is False


def registry_reference(x, weight, eps):
    return x.float().pow(2).mean(-1, keepdim=True).add(eps).rsqrt().mul(x.float()).to(x.dtype) * weight


@pytest.mark.parametrize("op", sorted(set(OP_FAMILIES) - {"decode_layer"}))
def test_a_fault_in_any_op_is_found_out(monkeypatch, op):
    """Results of a kernel a tenth too large, whatever the op returns or writes: it is named, and what is made of it."""
    kernel = next(k for k in registry.kernels(op) if k.strategy.value in ("torch", "eager", "unified"))

    def wrong(*args, **kwargs):
        out = kernel.function(*args, **kwargs)
        for tensor in args[2:4] if op == "cache_append" else args[:1] if op == "rotary_append" else ():
            tensor.mul_(1.1)
        if isinstance(out, tuple):
            return tuple(None if t is None else 1.1 * t for t in out)
        return None if out is None else 1.1 * out

    plant(monkeypatch, op, kernel.strategy, function=wrong)
    failed = {(c.op, c.strategy) for c in report(places=BARE).failed}
    assert (op, kernel.strategy.value) in failed
    assert failed <= {(op, kernel.strategy.value), ("decode_layer", "modules"), *INSIDE.get(op, ())}


#: kernels that call others
INSIDE = {"attention": {("multimodal_attention", way) for way in ("three_call", "prefix", "unified")}}


def test_a_fault_in_the_decode_step_is_found_out(monkeypatch):
    from atb_modules.kernels.cpu import DecodeStackPlan

    real = DecodeStackPlan.run

    def wrong(plan, hidden, *rest):
        real(plan, hidden, *rest)
        hidden[..., :3] += 0.2

    monkeypatch.setattr(DecodeStackPlan, "run", wrong)
    assert {(c.op, c.strategy) for c in report(places=BARE).failed} == {("decode_layer", "cpu")}


def test_rules_that_raise_do_not_end_the_report(monkeypatch):
    plant(monkeypatch, "moe", "torch", reasons=lambda spec, traits: 1 / 0)
    found = report(places=BARE)
    failed = {(c.op, c.strategy, c.why) for c in found.failed}
    assert failed == {("moe", "all", ("cannot be asked: ZeroDivisionError: division by zero",))}
    assert "moe                      all raised/raised" in str(found)


def test_a_reference_that_raises_does_not_end_the_report(monkeypatch):
    plant(monkeypatch, "rotary_append", "reference", function=lambda *args: 1 / 0)
    failed = {(c.op, c.strategy) for c in report(places=BARE).failed if "its reference raised" in c.why[0]}
    assert failed >= {("rotary_append", "cpu"), ("rotary_append", "torch"), ("rotary_append", "reference")}


def test_slow_kernels_run_where_they_are_asked_for(monkeypatch):
    """Compiling takes half a minute, so that another kernel stands in."""
    eager = next(k for k in registry.kernels("attention") if k.strategy == "eager")
    lengths = []

    def compiled(q, k, v, spec, **options):
        lengths.append((q.shape[2], k.shape[2]))
        return eager.function(q, k, v, spec, **options)

    plant(monkeypatch, "attention", "flex", function=compiled)
    found = report(places=BARE, slow=True)
    assert found.ok and {c.status.value for c in found.checked if c.strategy == "flex"} == {"agrees"}
    assert len(lengths) == 2 and min(min(pair) for pair in lengths) >= 128


def test_whatever_the_defaults_of_the_process_are():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            found = report(places=BARE)
    finally:
        torch.set_default_dtype(before)
    assert found.ok, found.failed


def test_reasons_of_kernels_are_told(monkeypatch):
    plant(monkeypatch, "linear", "torch", reasons=lambda spec, traits: ("is not in the mood",))
    found = report(places=BARE)
    assert "not run: torch (linear): is not in the mood" in str(found) and found.ok


def test_a_report_leaves_no_trace():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with use_strategy(attention="reference"), torch.enable_grad():
        report(places=BARE)
        assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_inputs_are_the_same_each_time_and_wide_ones_hold_the_same_numbers():
    first, second, wide = (Inputs(torch.bfloat16, wide=w).normal(3, 4) for w in (False, False, True))
    assert torch.equal(first, second) and torch.equal(first.double(), wide) and wide.dtype == torch.float64


@pytest.mark.parametrize("soc", SOCS)
def test_plans_for_every_chip(soc):
    found = report(soc, places=BARE, kernels=False)
    assert found.planned_soc == soc and found.checked == ()
    of_npu = {op for op in OP_FAMILIES for k in registry.kernels(op) if "npu" in k.device_types}
    assert {row.op for row in found.planned} == of_npu
    norms = {row.dtype: row.reasons for row in found.planned if (row.op, row.strategy) == ("rms_norm", "ascend")}
    assert bool(norms["bfloat16"]) is not SOCS[soc].bfloat16 and norms["float16"] == ()
    assert "nothing ran" in str(found)


@pytest.mark.parametrize(
    "arguments,error,message",
    [
        ({"soc": "h100"}, ValueError, "soc is 'h100'; allowed: ascend910b1"),
        ({"soc": 7}, TypeError, "soc is int"),
        ({"places": "/"}, TypeError, "places is "),
        ({"kernels": 1}, TypeError, "kernels is 1"),
        ({"slow": None}, TypeError, "slow is None"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        report(**arguments)


def test_the_import_is_lazy():
    code = """
import sys, atb_modules.doctor as doctor
assert not [name for name in sys.modules if name.startswith("atb_modules.doctor.")]
assert callable(doctor.report) and callable(doctor.explain_log) and doctor.Places and doctor.Report
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    import atb_modules.doctor

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        atb_modules.doctor.nothing  # noqa: B018
