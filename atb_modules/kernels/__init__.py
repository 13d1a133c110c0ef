"""Kernels: the registry, and one folder a backend. Importing this package registers every kernel."""

from atb_modules.kernels import cpu, reference, torch  # noqa: F401  (registration)
