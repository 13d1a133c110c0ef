"""A small random model for generation: three layers, one of them windowed."""

import pytest
import torch

from atb_modules.attention.rope import RotaryConfig
from atb_modules.models.config import InferenceConfig, ModelConfig
from atb_modules.models.decoder import DecoderModel


def build(windows=(None, 16, None), seed=0, mode="inference", **changes):
    config = ModelConfig(
        family="llama",
        vocab_size=101,
        hidden_size=64,
        num_layers=len(windows),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        windows=windows,
        rotary=(RotaryConfig(),) * len(windows),
        max_positions=400,
        **changes,
    )
    torch.manual_seed(seed)
    model = DecoderModel(config, mode=mode)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.15)
    model.inference_config = InferenceConfig(page_size=8)
    return model


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="session")
def build_model():
    return build


@pytest.fixture
def prompt_of():
    def make(length, seed=0):
        generator = torch.Generator().manual_seed(1000 * seed + length)
        return torch.randint(0, 101, (length,), generator=generator).tolist()

    return make
