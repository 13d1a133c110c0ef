"""What the operators of torch_npu and ATB compute, written from their public documentation.

A reference takes the operator's own arguments by name and returns CPU tensors; its docstring quotes the sentences it
follows ("docs" means torch_npu's operator documentation, which its wheel carries). Arithmetic is float32 at least,
with one rounding at the end, whatever a device does inside. A call that the documentation forbids raises
``OperatorError``; a call that it allows and that surprises (a mask of None with a causal mode) does what the
documentation says, in silence.
"""

from atb_modules.testing.npu.references.registry import find_reference, reference, reference_names

__all__ = ["find_reference", "reference", "reference_names"]
