"""load_model and load_inference_model: a checkpoint becomes a DecoderModel, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from atb_modules.checks import check_path
from atb_modules.convert.checkpoint import Checkpoint, open_checkpoint
from atb_modules.layer import LayerMode

from .config import InferenceConfig, check_dtype
from .decoder import DecoderModel
from .slots import weight_slots


class _WithoutDraws(TorchFunctionMode):
    """Skips `normal_`: weights that are about to be read need no start, and on the meta device the first
    draw imports torch's decompositions, which takes seconds and 150 MB."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.init.normal_:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def load_model(path: str | Path, *, dtype: torch.dtype | None = None) -> DecoderModel:
    """The trainable model of a checkpoint.

    Args:
        path: a directory with config.json and safetensors, or a GGUF file; families in `atb_modules.convert`.
        dtype: of the parameters; None for that of the checkpoint (float32 for a GGUF).

    Raises:
        ValueError: a dtype that is not floating.
        FileNotFoundError, ValueError: see `atb_modules.convert.open_checkpoint`.
    """
    check_path("path", path)
    check_dtype(dtype, torch.float64)
    return _load(open_checkpoint(path), LayerMode.TRAIN, dtype, "flash")


def load_inference_model(path: str | Path, config: InferenceConfig | None = None) -> DecoderModel:
    """The model of a checkpoint for generating: no gradients, options in `config`; the rest as
    `load_model`.
    """
    check_path("path", path)
    config = InferenceConfig() if config is None else config
    if not isinstance(config, InferenceConfig):
        raise TypeError(f"config must be an InferenceConfig, got {type(config).__name__}")
    config.validate()
    model = _load(open_checkpoint(path), LayerMode.INFERENCE, config.dtype, config.attention_type)
    model.inference_config = config
    return model


def _load(checkpoint: Checkpoint, mode: LayerMode, dtype: torch.dtype | None, attention_type: str) -> DecoderModel:
    dtype = checkpoint.dtype if dtype is None else dtype
    with _WithoutDraws():
        model = DecoderModel(checkpoint.config, mode=mode, attention_type=attention_type, device="meta", dtype=dtype)
    # Memory of its final size is reserved once and written once: nothing is held twice but the piece that is
    # read.
    model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for name, slot in weight_slots(model).items():
            checkpoint.read_into(name, slot)
    checkpoint.source.close()
    model.unused_tensors = checkpoint.unused
    return model
