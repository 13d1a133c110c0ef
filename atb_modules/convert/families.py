"""The families that can be read, and how a file says which one it is."""

from __future__ import annotations

from .family import Family
from .gemma3 import GEMMA3
from .llama import LLAMA
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .qwen3_moe import QWEN3_MOE

FAMILIES = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, MIXTRAL, QWEN3_MOE)}


def family_of_model_type(model_type: str) -> Family | None:
    """The family of a config.json's `model_type`."""
    return next((f for f in FAMILIES.values() if model_type in f.model_types), None)


def family_of_gguf(architecture: str) -> Family | None:
    """The family of a GGUF's `general.architecture`."""
    return next((f for f in FAMILIES.values() if architecture in f.gguf_architectures), None)


def families_text(gguf: bool = False) -> str:
    """The words that work, for an error message."""
    families = FAMILIES.values()
    return ", ".join(word for f in families for word in (f.gguf_architectures if gguf else f.model_types))
