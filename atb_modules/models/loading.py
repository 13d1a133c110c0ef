"""load_model and load_inference_model: a checkpoint becomes a DecoderModel, one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from atb_modules.checks import check_path
from atb_modules.convert.checkpoint import Checkpoint, open_checkpoint
from atb_modules.convert.multimodal.loading import load_multimodal, multimodal_config
from atb_modules.layer import LayerMode
from atb_modules.multimodal.model import VisionLanguageModel

from .config import InferenceConfig, check_dtype
from .decoder import DecoderModel
from .draws import undrawn
from .slots import weight_slots


def load_model(path: str | Path, *, dtype: torch.dtype | None = None) -> DecoderModel | VisionLanguageModel:
    """The trainable model of a checkpoint: a `DecoderModel`, a `LlavaModel` or a `QwenVLModel`.

    Args:
        path: a directory with config.json and safetensors, or a GGUF file; families in `atb_modules.convert` and
            `atb_modules.convert.multimodal`.
        dtype: of the parameters; None for that of the checkpoint (float32 for a GGUF).

    Raises:
        ValueError: a dtype that is not floating.
        FileNotFoundError, ValueError: see `atb_modules.convert.open_checkpoint`.
    """
    check_path("path", path)
    check_dtype(dtype, torch.float64)
    source = multimodal_config(Path(path))
    if source is not None:
        return load_multimodal(Path(path), source, LayerMode.TRAIN, dtype, "flash")
    return _load(open_checkpoint(path), LayerMode.TRAIN, dtype, "flash")


def load_inference_model(path: str | Path, config: InferenceConfig | None = None) -> DecoderModel | VisionLanguageModel:
    """The model of a checkpoint for generating: no gradients, options in `config`; the rest as
    `load_model`.
    """
    check_path("path", path)
    config = InferenceConfig() if config is None else config
    if not isinstance(config, InferenceConfig):
        raise TypeError(f"config must be an InferenceConfig, got {type(config).__name__}")
    config.validate()
    source = multimodal_config(Path(path))
    if source is not None:
        mode = LayerMode.INFERENCE
        multimodal = load_multimodal(Path(path), source, mode, config.dtype, config.attention_type)
        multimodal.language.inference_config = config
        return multimodal
    model = _load(open_checkpoint(path), LayerMode.INFERENCE, config.dtype, config.attention_type)
    model.inference_config = config
    return model


def _load(checkpoint: Checkpoint, mode: LayerMode, dtype: torch.dtype | None, attention_type: str) -> DecoderModel:
    dtype = checkpoint.dtype if dtype is None else dtype
    # Memory of its final size is reserved once and written once: nothing is held twice but the piece that is
    # read.
    model = undrawn(
        lambda: DecoderModel(checkpoint.config, mode=mode, attention_type=attention_type, device="meta", dtype=dtype)
    )
    model.tie_weights()
    with torch.no_grad():
        for name, slot in weight_slots(model).items():
            checkpoint.read_into(name, slot)
    checkpoint.source.close()
    model.unused_tensors = checkpoint.unused
    return model
