"""Checkpoints of other libraries: one file a model family, foreign weights to ours and back."""

from .checkpoint import Checkpoint, open_checkpoint
from .families import FAMILIES
from .family import Family

__all__ = ["FAMILIES", "Checkpoint", "Family", "open_checkpoint"]
