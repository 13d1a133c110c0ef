"""What must hold of every vision-language model: packing, padding, chunks, prefixes, placeholders, frozen towers."""

import dataclasses

import pytest
import torch

import atb_modules as atb
from atb_modules.multimodal.vision import towers
from atb_modules.overlays import Overlays

FAMILIES = ("llava", "llava_next", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
QWEN = FAMILIES[3:]
KINDS = [(family, "mixed") for family in FAMILIES] + [(family, "video") for family in QWEN]


def packed_of(batch):
    """The rows of a batch as one packed row: (input_ids, overlays, lengths)."""
    lengths = batch.attention_mask.sum(1)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    ids = batch.input_ids[batch.attention_mask.bool()].unsqueeze(0)
    return ids, Overlays(starts, starts), lengths.tolist()


def gradients(model, loss):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, parameters, allow_unused=True)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_packed_samples_are_the_samples_alone(checkpoint, batch_of, family, kind):
    model = atb.load_model(checkpoint(family)[1])
    batch = batch_of(family, kind)
    ids, overlays, lengths = packed_of(batch)
    rows = model(**batch.ours()).logits[batch.attention_mask.bool()]
    packed = model(ids, overlays=overlays, **batch.visual).logits[0]
    torch.testing.assert_close(packed, rows, atol=1e-5, rtol=1e-4)
    weight = torch.randn_like(rows)
    for ours, theirs in zip(
        gradients(model, (packed * weight).sum()), gradients(model, (rows * weight).sum()), strict=True
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-4 * max(1.0, theirs.abs().max().item()), rtol=1e-3)
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 140
    again = model(changed, overlays=overlays, **batch.visual).logits[0]
    others = sum(lengths[:-1])
    assert torch.equal(again[:others], packed[:others])
    assert not torch.equal(again[others:], packed[others:])


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_padding_on_either_side_changes_nothing(checkpoint, batch_of, family, kind):
    model = atb.load_model(checkpoint(family)[1])
    right, left = (batch_of(family, kind, padding=side) for side in ("right", "left"))
    with torch.no_grad():
        a, b = (model(**batch.ours()).logits[batch.attention_mask.bool()] for batch in (right, left))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("family", "kind"), KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_any_prefill_chunk_gives_the_same_answer(checkpoint, batch_of, family, kind, chunk):
    model = atb.load_inference_model(checkpoint(family)[1])
    batch = batch_of(family, kind, padding="left")
    whole = model.generate(**batch.ours(), max_new_tokens=6)
    assert torch.equal(model.generate(**batch.ours(), max_new_tokens=6, prefill_chunk_size=chunk), whole)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_forward_with_a_cache_is_the_forward_without(checkpoint, batch_of, family, kind):
    model = atb.load_model(checkpoint(family)[1])
    batch = batch_of(family, kind)
    cache = model.new_cache(256, page_size=4, num_pages=256)
    with torch.no_grad():
        dense = model(**batch.ours())
        cached = model(**batch.ours(), past_key_values=cache)
        torch.testing.assert_close(
            cached.logits[batch.attention_mask.bool()], dense.logits[batch.attention_mask.bool()], atol=1e-5, rtol=1e-4
        )
        more = torch.randint(3, 140, (batch.input_ids.shape[0], 5))
        lengths = batch.attention_mask.sum(1)
        longer = torch.cat([batch.input_ids, torch.zeros_like(more)], 1)
        mask = torch.cat([batch.attention_mask, torch.zeros_like(more)], 1)
        for row, length in enumerate(lengths.tolist()):
            longer[row, length : length + 5], mask[row, length : length + 5] = more[row], 1
        expected = model(longer, mask, **batch.visual).logits
        found = model(more, past_key_values=cache).logits
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(found[row], expected[row, length : length + 5], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_images_may_come_with_a_later_call_on_a_cache(checkpoint, batch_of, family):
    model = atb.load_model(checkpoint(family)[1])
    first, second = batch_of(family, "one"), batch_of(family, "one", seed=1)
    ids = torch.cat([first.input_ids, second.input_ids], 1)
    both = {key: torch.cat([first.visual[key], second.visual[key]]) for key in first.visual}
    cache = model.new_cache(256, page_size=4, num_pages=64)
    with torch.no_grad():
        expected = model(ids, **both).logits
        model(first.input_ids, **first.visual, past_key_values=cache)
        found = model(second.input_ids, **second.visual, past_key_values=cache).logits
    torch.testing.assert_close(found, expected[:, first.input_ids.shape[1] :], atol=1e-5, rtol=1e-4)


class Counter:
    """Counts the images that a tower encodes."""

    def __init__(self, monkeypatch, model):
        self.calls = 0
        run = type(model.vision)._states

        def counted(*args, **options):
            self.calls += 1
            return run(*args, **options)

        monkeypatch.setattr(towers.VisionTower, "_states", counted)


@pytest.mark.parametrize("page_size", [4, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_question_reads_the_image_from_the_cache(checkpoint, batch_of, monkeypatch, family, page_size):
    model = atb.load_inference_model(checkpoint(family)[1])
    batch = batch_of(family, "one")
    cache = model.new_cache(256, page_size=page_size, num_pages=128)
    counter = Counter(monkeypatch, model)
    question = torch.cat([batch.input_ids, torch.tensor([[7, 8, 9]])], 1)
    other = torch.cat([batch.input_ids, torch.tensor([[11, 12]])], 1)
    cold = model.generate(other, 8, **batch.visual)
    assert counter.calls == 1
    model.generate(question, 8, **batch.visual, cache=cache)
    assert counter.calls == 2
    assert torch.equal(model.generate(other, 8, **batch.visual, cache=cache), cold)
    assert counter.calls == 2
    changed = {key: value + 0.5 if value.is_floating_point() else value for key, value in batch.visual.items()}
    assert torch.equal(model.generate(other, 8, **changed, cache=cache), model.generate(other, 8, **changed))
    assert counter.calls == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_generated_placeholder_is_text(checkpoint, batch_of, family):
    model = atb.load_inference_model(checkpoint(family)[1])
    batch = batch_of(family, "one")
    token = model.placeholders["image"]
    cache = model.new_cache(256)
    out = model(**batch.ours(), past_key_values=cache).logits
    again = model(torch.tensor([[token]]), past_key_values=cache).logits
    assert torch.isfinite(again).all() and out.shape[0] == 1
    with torch.no_grad():
        model.language.lm_head.weight[token] += 100.0 * model.language.lm_head.weight.abs().max()
    found = model.generate(**batch.ours(), max_new_tokens=3)
    assert found.shape[1] == batch.input_ids.shape[1] + 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_text_needs_no_image(checkpoint, batch_of, family):
    model = atb.load_model(checkpoint(family)[1])
    batch = batch_of(family, "mixed")
    alone = batch.input_ids[1:2, :12]
    with torch.no_grad():
        together = model(**batch.ours()).logits[1, :12]
        torch.testing.assert_close(model(alone).logits[0], together, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_keeps_nothing_for_the_backward(checkpoint, batch_of, family):
    model = atb.load_model(checkpoint(family)[1])
    model.vision.requires_grad_(False)
    batch = batch_of(family, "one")
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hook = model.vision.register_forward_hook(lambda *_: saved.append("tower"))
        model(**batch.ours()).logits.sum()
        hook.remove()
    assert not any(parameter.requires_grad for parameter in model.parts()["vision"])
    inside = saved[: saved.index("tower")] if "tower" in saved else []
    assert not [entry for entry in inside if isinstance(entry, torch.Tensor) and entry.numel() > 160 * 64]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_with_a_cache_keeps_nothing_of_the_tower(checkpoint, batch_of, family):
    model = atb.load_model(checkpoint(family)[1])
    features = []
    model.projector.register_forward_hook(lambda *call: features.append(call[-1].requires_grad))
    batch = batch_of(family, "one")
    model(**batch.ours(), past_key_values=model.new_cache(256))
    model(**batch.ours())
    assert features == [False, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_disjoint_and_whole(checkpoint, family):
    model = atb.load_model(checkpoint(family)[1])
    parts = model.parts()
    numbers = [id(parameter) for part in parts.values() for parameter in part]
    assert len(numbers) == len(set(numbers)) == len(list(model.parameters()))
    assert set(parts) == {"vision", "projector", "language"} and all(parts.values())


@pytest.mark.parametrize("family", QWEN)
def test_beams_and_forks_keep_the_positions_behind_an_image(checkpoint, batch_of, family):
    model = atb.load_model(checkpoint(family)[1])
    batch = batch_of(family, "video")
    model.config = dataclasses.replace(model.config, mrope_advance="max")
    cache = model.new_cache(256, page_size=4, num_pages=512)
    with torch.no_grad():
        model(**batch.ours(), past_key_values=cache)
        ahead = cache.next_positions
        cache.reorder([1, 0, 1])
        assert cache.next_positions == (ahead[1], ahead[0], ahead[1])
        cache.crop(2)
        assert cache.next_positions == (2, 2, 2)
