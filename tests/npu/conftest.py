"""Tests that need an Ascend NPU with CANN and torch_npu. Elsewhere they are collected and reported as not run.

On such a machine: ``source set_env.sh; python -m pytest tests/npu``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def real_npu():
    """Whether a device is there that runs kernels; the emulated one does not."""
    from atb_modules.testing.npu import booted

    if booted() is not None or importlib.util.find_spec("torch_npu") is None:
        return False
    import torch_npu  # noqa: F401

    return torch.npu.is_available()


def pytest_configure(config):
    config.addinivalue_line("markers", "npu: needs an Ascend NPU")


def pytest_collection_modifyitems(items):
    mine = [item for item in items if HERE in Path(item.path).parents]
    there = real_npu() if mine else False
    for item in mine:
        item.add_marker("npu")
        if not there:
            item.add_marker(pytest.mark.skip(reason="needs an NPU"))
