"""save_model: a model as a directory that transformers reads, in the names of its family."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from atb_modules.checks import check_path, check_type
from atb_modules.convert.families import FAMILIES
from atb_modules.convert.family import hf_name
from atb_modules.convert.multimodal.loading import save_multimodal
from atb_modules.multimodal.model import VisionLanguageModel

from .decoder import DecoderModel
from .hf_config import hf_config
from .slots import weight_slots


def family_state_dict(model: DecoderModel) -> dict[str, Tensor]:
    """The weights in the names that transformers' model of the family has, projections unfused.

    The tensors are views of the model's own memory where it is stored fused. A tied head is left out.

    Raises:
        ValueError: `model.config.family` is not one of `atb_modules.convert.FAMILIES`.
    """
    check_type("model", model, DecoderModel)
    name = model.config.family
    if name not in FAMILIES:
        raise ValueError(f"config.family is {name!r}; allowed: {', '.join(FAMILIES)}")
    return {hf_name(FAMILIES[name], ours): slot for ours, slot in weight_slots(model).items()}


def save_model(model: DecoderModel | VisionLanguageModel, directory: str | Path) -> Path:
    """Writes `config.json` and `model.safetensors` into `directory`; returns the path of the second.

    Names and values are those of the family: transformers' `from_pretrained` reads the directory, and so does
    `load_model`. Files of these two names that are there are overwritten.

    Raises:
        ValueError: the configuration has something that a config.json of the family cannot express, or an index
            of other weights files is in the directory; a vision-language model without a `checkpoint_config`. Nothing
            is written then.
    """
    if isinstance(model, VisionLanguageModel):
        return save_multimodal(model, directory)
    check_type("model", model, DecoderModel)
    check_path("directory", directory)
    directory = Path(directory)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        raise ValueError(f"directory has {index}, whose files would be read instead of what is saved; remove it first")
    values = hf_config(model.config, model.dtype)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in family_state_dict(model).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path
