"""The doctor on the emulated NPU: its kernels are run like those of the CPU, and all of it is called emulated."""

from __future__ import annotations

import dataclasses

import pytest

from atb_modules.doctor import report
from atb_modules.doctor.places import Places
from atb_modules.kernels import registry
from atb_modules.strategies import OP_FAMILIES
from atb_modules.testing.npu import NoReferenceError

BARE = Places(environ={}, package_path=())
ASCEND = [op for op in OP_FAMILIES for kernel in registry.kernels(op) if "npu" in kernel.device_types]


@pytest.fixture
def found():
    return report(places=BARE)


def test_every_npu_kernel_agrees_in_each_dtype_that_it_takes(found):
    assert not [check for check in found.failed if check.strategy == "ascend"]
    for op in ASCEND:
        checks = {c.dtype: c for c in found.checked if (c.op, c.strategy, c.device) == (op, "ascend", "npu")}
        assert set(checks) == {"float32", "bfloat16", "float16"}
        assert checks["bfloat16"].status == checks["float16"].status == "agrees"
        assert checks["float32"].status == "agrees" or "the call is float32" in checks["float32"].why[0]


def test_it_says_that_it_is_emulated(found):
    assert found.software.emulated and found.verdict == "unknown"
    assert found.software.soc.value == "ascend910b1" and "on stubs" in found.software.torch_npu.source
    text = str(found)
    assert "Kernels on npu (emulated)" in text and "emulated: torch_npu runs on stubs" in text


def test_it_uses_the_emulation_that_is_on(npu):
    report(places=BARE)
    assert "npu::npu_rms_norm" in npu.log.names


def test_a_broken_npu_kernel_is_found_out(monkeypatch):
    (broken,) = [k for k in registry.kernels("rms_norm") if k.strategy == "ascend"]
    wrong = dataclasses.replace(broken, function=lambda *args, **kwargs: 1.1 * broken.function(*args, **kwargs))
    others = [k for k in registry.kernels("rms_norm") if k is not broken]
    monkeypatch.setitem(registry._KERNELS, "rms_norm", [wrong, *others])
    registry.forget_choices()
    failed = {(check.op, check.strategy, check.device) for check in report(places=BARE).failed}
    assert ("rms_norm", "ascend", "npu") in failed and {device for _, _, device in failed} == {"npu"}


def test_what_the_emulation_cannot_compute_is_no_failure(monkeypatch):
    def unknown(*args, **kwargs):
        raise NoReferenceError("npu::unknown has no reference")

    planted = [
        dataclasses.replace(k, function=unknown) if k.strategy == "ascend" else k for k in registry.kernels("rms_norm")
    ]
    monkeypatch.setitem(registry._KERNELS, "rms_norm", planted)
    registry.forget_choices()
    checks = [c for c in report(places=BARE).checked if c.op == "rms_norm" and c.strategy == "ascend"]
    checks = [c for c in checks if c.device == "npu"]
    assert {c.status.value for c in checks} == {"not run"} and "the emulation does not compute it" in checks[0].why[0]
