"""Every operator that the package calls on NPUs has a real schema, and a reference that the parity tests run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from atb_modules.kernels import ascend
from atb_modules.testing.npu.references import find_reference

from .test_dry_run import CALLS

SOURCES = [path.read_text() for path in Path(ascend.__file__).parent.glob("*.py")]
CALLED = sorted(
    {("npu", name) for text in SOURCES for name in re.findall(r"(?:_NPU|ops\.npu)\.(\w+)\(", text)}
    | {("atb", name) for text in SOURCES for name in re.findall(r"(?:_ATB|ops\.atb)\.(\w+)\(", text)}
)


def test_the_list_is_found():
    assert len(CALLED) >= 19
    assert {("npu", "npu_fusion_attention_grad"), ("atb", "_npu_reshape_and_cache")} <= set(CALLED)


@pytest.mark.parametrize("space,name", CALLED)
def test_schema_and_reference(space, name):
    packet = getattr(getattr(torch.ops, space), name)
    assert packet.overloads()
    assert find_reference(f"{space}::{name}") is not None


@pytest.mark.parametrize("space,name", CALLED)
def test_it_goes_through_the_host_code_and_the_tracer(space, name):
    """``CALLS`` runs dry on four chips, and under FakeTensor where there is a Meta kernel."""
    assert f"{space}::{name}" in {case[0].operator for case in CALLS.values()}
