"""Small vision-language models on the emulated NPU against the CPU: several images, rows of text alone, gradients."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
import transformers

import atb_modules as atb
from atb_modules.testing.npu import EmulatedNPU

from .borrowed import TESTS

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "llava")


@pytest.fixture(scope="module")
def small():
    """The small random models and batches of the tests against transformers."""
    spec = importlib.util.spec_from_file_location("small_vlms", TESTS / "outside/vlm/conftest.py")
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["small_vlms"] = module  # its dataclass looks its own module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def directory(small, tmp_path_factory):
    """Where a family's random model was saved, as transformers saves it."""
    made = {}

    def of(family):
        if family not in made:
            torch.manual_seed(0)
            model = transformers.AutoModelForImageTextToText.from_config(small.config_of(family))
            small.stir(model)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return of


def moved(arguments):
    return {name: value.to("npu:0") for name, value in arguments.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(npu: EmulatedNPU, small, directory, family):
    model = atb.load_model(directory(family))
    twin = copy.deepcopy(model).to("npu:0")
    size = (4, 6)
    batch = small.compose(family, [[4, ("image", size), 5], [12], [("image", (8, 4)), 2, ("image", size), 3]])
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    truth = model(**batch.ours(), labels=labels)
    npu.log.clear()
    mine = twin(**moved(batch.ours()), labels=labels.to("npu:0"))
    real = batch.attention_mask.bool()
    torch.testing.assert_close(mine.logits.cpu()[real], truth.logits[real], atol=1e-4, rtol=1e-4)
    truth.loss.backward()
    mine.loss.backward()
    found = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name].grad.cpu(), parameter.grad, atol=1e-4, rtol=1e-3, msg=name)
    names = set(npu.log.names)
    assert {"npu::npu_fusion_attention", "npu::npu_fusion_attention_grad", "npu::npu_swiglu"} <= names
    assert not [n for n in names if n.startswith(("aten::scaled_dot_product", "aten::_softmax", "aten::softmax"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens(npu, small, directory, family):
    """Half precision, whose decode reads pages; float32 decides what the tokens are."""
    model = atb.load_inference_model(directory(family))
    twin = copy.deepcopy(model).to("npu:0")
    batch = small.compose(family, [[5, ("image", (4, 6)), 6]])
    expected = model.generate(**batch.ours(), max_new_tokens=6)
    found = twin.generate(**moved(batch.ours()), max_new_tokens=6)
    assert torch.equal(found.cpu(), expected)
