"""Kernels: the registry, and one folder a backend. Importing this package registers every kernel.

The order of registration is the order of preference where costs do not decide.
"""

from atb_modules.kernels import cpu, ascend, torch, reference  # noqa: F401, I001  (registration, in this order)
