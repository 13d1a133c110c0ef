"""Tests that boot torch_npu on stubs. They need a process of their own: ``python -m pytest tests/emulated``.

Loading torch_npu gives the whole process an accelerator, so a run over all tests leaves this folder out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atb_modules.kernels.ascend import ops_ascendc
from atb_modules.kernels.ascend.ascendc import load
from atb_modules.kernels.registry import forget_choices
from atb_modules.testing.ascendc.binding import build_binding
from atb_modules.testing.npu import EmulatedNPU, boot

HERE = Path(__file__).parent


def alone(config):
    """Whether every path of the command line lies in this folder."""
    paths = [Path(str(argument).split("::")[0]).resolve() for argument in config.args]
    return all(path == HERE or HERE in path.parents for path in paths)


def pytest_ignore_collect(collection_path, config):
    return None if alone(config) else True


@pytest.fixture(scope="session", autouse=True)
def booted_npu():
    """torch_npu on stubs, believing in one Ascend 910B1."""
    return boot("ascend910b1")


@pytest.fixture(scope="session")
def own_kernels(booted_npu):
    """The ops of our Ascend C kernels, over the host's emulation of a core."""
    assert load(build_binding(booted_npu.directory / "torch_npu"))
    return torch.ops.atb_modules


@pytest.fixture
def npu(request, monkeypatch):
    """The emulated NPU, computing. Our own kernels are for tests that ask for them, whoever has loaded them before."""
    if "own_kernels" not in request.fixturenames:
        monkeypatch.setattr(ops_ascendc, "unbuilt_reason", lambda: "this test is of torch_npu's operators alone")
    forget_choices()
    with EmulatedNPU() as emulated:
        yield emulated
    forget_choices()


@pytest.fixture(scope="session")
def triangle():
    """The compressed mask of the fused attentions: 2048 x 2048, True (masked) above the diagonal."""
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)
