"""What can go wrong in the emulated NPU, as exceptions with names."""

from __future__ import annotations


class BootError(RuntimeError):
    """torch_npu cannot be loaded on stubs in this process; the message says what is missing and what to do."""


class OperatorError(RuntimeError):
    """A call breaks a documented rule of the operator; the message names the operator and the rule."""


class NoReferenceError(NotImplementedError):
    """An operator without a written reference was called, or one with an argument that its reference does not know."""


class HostSyncError(RuntimeError):
    """The host waited for the device where the caller had forbidden it."""
