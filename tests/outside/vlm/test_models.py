"""Vision-language checkpoints of transformers through our models: logits, gradients, generation, saving."""

import dataclasses

import pytest
import torch
import transformers

import atb_modules as atb
from atb_modules.multimodal.qwen_vl import QwenVLModel

FAMILIES = ("llava", "llava_next", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
QWEN = FAMILIES[3:]
KINDS = ("one", "sizes", "two_images", "mixed", "text")
CASES = [(family, kind) for family in FAMILIES for kind in KINDS] + [(family, "video") for family in QWEN]


def as_transformers(model):
    """Text goes on behind a video as in the installed release."""
    if isinstance(model, QwenVLModel):
        model.config = dataclasses.replace(model.config, mrope_advance="spatial")
    return model


def real(tensor, batch):
    return tensor[batch.attention_mask.bool()]


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits(checkpoint, batch_of, family, kind, padding):
    theirs, directory = checkpoint(family)
    ours = as_transformers(atb.load_model(directory))
    batch = batch_of(family, kind, padding=padding)
    with torch.no_grad():
        expected = theirs(**batch.theirs()).logits
        found = ours(**batch.ours()).logits
    torch.testing.assert_close(real(found, batch), real(expected, batch), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "kind"), [*((f, "mixed") for f in FAMILIES), *((f, "video") for f in QWEN)])
def test_gradients(checkpoint, batch_of, family, kind):
    theirs, directory = checkpoint(family)
    ours = as_transformers(atb.load_model(directory))
    batch = batch_of(family, kind)
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    theirs.zero_grad()
    loss = theirs(**batch.theirs(), labels=labels).loss
    loss.backward()
    mine = ours(**batch.ours(), labels=labels).loss
    mine.backward()
    assert abs(loss.item() - mine.item()) < 1e-4
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    found = gradients_by_name(ours)
    compared = 0
    for name, gradient in expected.items():
        key = next((one for one in found if name.endswith(one)), None)
        assert key is not None, name
        torch.testing.assert_close(found[key], gradient, atol=1e-4, rtol=1e-3)
        compared += 1
    assert compared > 60
    theirs.zero_grad()


def gradients_by_name(model):
    """Gradients by the ends of transformers' names, through the slots that loading uses."""
    from atb_modules.convert.multimodal import multimodal_family_of

    family = multimodal_family_of(model.checkpoint_config["model_type"])
    kept = {}
    with torch.no_grad():
        for parameter in model.parameters():
            kept[parameter] = parameter.detach().clone()
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        found = {name: slot.clone() for group in family.groups(model) for name, slot in group.slots.items()}
        for parameter, value in kept.items():
            parameter.copy_(value)
    return found


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_greedy_tokens(checkpoint, batch_of, family, kind):
    theirs, directory = checkpoint(family)
    ours = as_transformers(atb.load_inference_model(directory))
    batch = batch_of(family, kind, padding="left")
    expected = theirs.generate(**batch.theirs(), max_new_tokens=32, do_sample=False, pad_token_id=0)
    found = ours.generate(**batch.ours(), max_new_tokens=32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_models_reload_in_transformers(checkpoint, batch_of, family, tmp_path):
    theirs, directory = checkpoint(family)
    ours = atb.load_model(directory)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(1.01)
    ours.save_pretrained(tmp_path)
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").eval()
    batch = batch_of(family, "sizes")
    with torch.no_grad():
        expected = real(ours(**batch.ours()).logits, batch)
        torch.testing.assert_close(real(again(**batch.theirs()).logits, batch), expected, atol=1e-4, rtol=1e-4)
        back = atb.load_model(tmp_path)
        assert torch.equal(real(back(**batch.ours()).logits, batch), expected)
