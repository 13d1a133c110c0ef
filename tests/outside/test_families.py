"""All families against transformers: logits, gradients, greedy tokens, and weights saved back."""

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file

from atb_modules.models.loading import load_inference_model, load_model
from atb_modules.models.saving import family_state_dict, save_model
from atb_modules.models.slots import weight_slots

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe")
LENGTH = 33


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory, build_tiny_model):
    """(transformers' model, directory it was saved into)"""
    directory = tmp_path_factory.mktemp(request.param)
    model = build_tiny_model(request.param)
    model.save_pretrained(directory)
    return model, directory


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def test_logits_equal(pair, ids):
    theirs, directory = pair
    expected = theirs(ids).logits.detach()
    assert expected.std() > 0.3
    torch.testing.assert_close(load_model(directory)(ids).logits.detach(), expected, atol=1e-4, rtol=0)
    model = load_inference_model(directory)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=0)
    cache = model.new_cache(64, page_size=4, num_pages=40)
    parts = [model(part, past_key_values=cache).logits for part in ids.split([10, 1, 1, 21], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-4, rtol=0)


def one_by_one(tensors):
    """Names and tensors of transformers' modules as its files have them, each expert by itself."""
    found = {}
    for name, tensor in tensors.items():
        start, _, part = name.partition(".experts.")
        if not part:
            found[name] = tensor
            continue
        mixtral = "block_sparse_moe" in name
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        names = names[:2] if part == "gate_up_proj" else names[2:]
        for number, expert in enumerate(tensor):
            for own, weight in zip(names, expert.chunk(len(names)), strict=True):
                found[f"{start}.experts.{number}.{own}.weight"] = weight
    return found


def test_gradients_equal(pair, ids):
    theirs, directory = pair
    theirs.zero_grad()
    theirs(ids, labels=ids).loss.backward()
    ours = load_model(directory)
    output = ours(ids, labels=ids)
    output.loss.backward()
    stored = ".block_sparse_moe." if theirs.config.model_type == "mixtral" else ".mlp."
    parameters = {name.replace(".mlp.", stored): parameter for name, parameter in theirs.named_parameters()}
    expected = one_by_one({name: parameter.grad for name, parameter in parameters.items()})
    holder = copy.deepcopy(ours)
    for parameter, other in zip(holder.parameters(), ours.parameters(), strict=True):
        parameter.data = other.grad
    gradients = family_state_dict(holder)
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-4, rtol=1e-3, msg=name)
    theirs.zero_grad()


def test_greedy_tokens_equal(pair, ids):
    theirs, directory = pair
    model = load_inference_model(directory)
    expected = theirs.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None)
    ours = model.generate(ids, max_new_tokens=30, eos_token_ids=[])
    assert torch.equal(ours, expected)
    alone = model.generate(ids[1].tolist(), 30, eos_token_ids=[])
    assert alone == expected[1].tolist()


def test_padding_on_either_side_changes_nothing(pair, ids):
    theirs, directory = pair
    model = load_inference_model(directory)
    alone = theirs(ids[:1, :20]).logits[0].detach()
    for side in ("left", "right"):
        padded = torch.zeros_like(ids)
        mask = torch.zeros_like(ids)
        place = slice(LENGTH - 20, None) if side == "left" else slice(0, 20)
        padded[0, place], mask[0, place] = ids[0, :20], 1
        padded[1], mask[1] = ids[1], 1
        for cache in (None, model.new_cache(64, page_size=4, num_pages=40)):
            logits = model(padded, attention_mask=mask, past_key_values=cache).logits
            torch.testing.assert_close(logits[0, place], alone, atol=1e-4, rtol=0)
        expected = theirs.generate(ids[:1, :20], max_new_tokens=9, do_sample=False, eos_token_id=None)
        new = model.generate(padded, 9, attention_mask=mask, eos_token_ids=[])
        assert new[0, LENGTH:].tolist() == expected[0, 20:].tolist()


def test_weights_save_back_in_the_familys_names(pair, tmp_path):
    theirs, directory = pair
    path = save_model(load_model(directory), tmp_path)
    saved, original = load_file(path), load_file(directory / "model.safetensors")
    assert set(saved) == set(original)
    assert all(torch.equal(saved[name], original[name]) for name in saved)
    theirs.config.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), theirs.parameters(), strict=True))


def test_a_state_dict_with_separate_projections_loads(pair, ids):
    _, directory = pair
    model = load_model(directory)
    expected = model(ids).logits
    state = {name: slot.clone() for name, slot in weight_slots(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    assert torch.equal(model(ids).logits, expected)
