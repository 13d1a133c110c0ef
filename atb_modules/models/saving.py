"""save_model: a model's weights back in the names of the family it came from."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from atb_modules.convert.families import FAMILIES
from atb_modules.convert.family import hf_name

from .decoder import DecoderModel
from .slots import weight_slots


def family_state_dict(model: DecoderModel) -> dict[str, Tensor]:
    """The weights in the names that transformers' model of the family has, projections unfused.

    The tensors are views of the model's own memory where it is stored fused. A tied head is left out.

    Raises:
        ValueError: `model.config.family` is not one of `atb_modules.convert.FAMILIES`.
    """
    name = model.config.family
    if name not in FAMILIES:
        raise ValueError(f"config.family is {name!r}; allowed: {', '.join(FAMILIES)}")
    return {hf_name(FAMILIES[name], ours): slot for ours, slot in weight_slots(model).items()}


def save_model(model: DecoderModel, directory: str | Path) -> Path:
    """Writes `model.safetensors` in the family's names into `directory`; returns the file's path.

    config.json is the source checkpoint's own and is not written: put that file beside it.
    """
    path = Path(directory) / "model.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in family_state_dict(model).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return path
