"""Making a finished model of another library fast: ``apply_optimizations`` and ``restore``."""

from atb_modules.optimize.swap import apply_optimizations, restore

__all__ = ["apply_optimizations", "restore"]
