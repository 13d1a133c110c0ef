"""The fixture of a machine to fake software on."""

from __future__ import annotations

import pytest

from .installations import Installation


@pytest.fixture
def machine(tmp_path):
    """An empty machine."""
    return Installation(tmp_path / "root")
