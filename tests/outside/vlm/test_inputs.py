"""Inputs off the beaten track: images at the edges of rows, given positions, parts in other dtypes, copies, compile."""

import copy
import dataclasses
import pickle

import pytest
import torch

import atb_modules as atb
from atb_modules.attention import OutOfPagesError
from atb_modules.multimodal.llava import LlavaModel
from atb_modules.multimodal.qwen_vl import QwenVLConfig, QwenVLModel
from atb_modules.multimodal.tiling import AnyResolution

from .conftest import FAMILIES, QWEN, compose

SIZES = {"llava_next": [(40, 90), (90, 25), (20, 30)], **{family: [(12, 16), (2, 2), (2, 18)] for family in QWEN}}


def images_of(family):
    return [("image", size) for size in SIZES.get(family, [(4, 4)] * 3)]


def as_transformers(model):
    if isinstance(model, QwenVLModel):
        model.config = dataclasses.replace(model.config, mrope_advance="spatial")
    return model


def rows_of(family, kind):
    a, b, c = images_of(family)
    rows = {
        "first_row": [[2, a, 3], [6], [5]],
        "last_row": [[6], [5], [2, b, 3]],
        "three_sizes": [[2, a, 1, b, 1, c, 2]],
        "at_the_start": [[a, 4], [b, 2]],
        "at_the_end": [[4, a], [2, b, 3], [1, c]],
        "nothing_else": [[a]],
        "one_frame": [[3, ("video", (1, 4, 4)), 4]],
        "between": [[2, ("video", (2, 4, 6)), 1, a, 2, ("video", (3, 4, 4)), 1, b, 3], [c, 2, ("video", (1, 2, 2)), 1]],
    }
    return rows[kind]


KINDS = ("first_row", "last_row", "three_sizes", "at_the_start", "at_the_end", "nothing_else")
CASES = [(family, kind) for family in FAMILIES for kind in KINDS]
CASES += [(family, kind) for family in QWEN for kind in ("one_frame", "between")]


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits_and_the_first_tokens(checkpoint, family, kind, padding):
    theirs, directory = checkpoint(family)
    ours = as_transformers(atb.load_inference_model(directory))
    batch = compose(family, rows_of(family, kind), padding=padding)
    real = batch.attention_mask.bool()
    with torch.no_grad():
        found = ours(**batch.ours()).logits
        torch.testing.assert_close(found[real], theirs(**batch.theirs()).logits[real], atol=1e-4, rtol=1e-4)
    # Behind a row that ends in an image transformers' generate counts on from the last token's own axes, unlike its
    # forward: what a forward of ours says next is compared instead.
    last = real.long().cumsum(1).argmax(1)
    expected = found[torch.arange(len(last)), last].argmax(-1)
    assert torch.equal(ours.generate(**batch.ours(), max_new_tokens=1)[:, -1], expected)
    if padding == "right":
        return
    cache = ours.new_cache(256, page_size=8, num_pages=128)
    ours(**batch.ours(), past_key_values=cache)
    token = expected.unsqueeze(1) % 140
    stepped = ours(token, past_key_values=cache).logits
    mask = torch.cat([batch.attention_mask, torch.ones_like(token)], 1)
    whole = ours(torch.cat([batch.input_ids, token], 1), mask, **batch.visual).logits
    torch.testing.assert_close(stepped[:, 0], whole[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("advance", ["spatial", "max"])
@pytest.mark.parametrize("family", QWEN)
def test_text_behind_a_long_video_is_generated_where_a_forward_puts_it(checkpoint, family, advance):
    theirs, directory = checkpoint(family)
    ours = atb.load_inference_model(directory)
    ours.config = dataclasses.replace(ours.config, mrope_advance=advance)
    batch = compose(family, [[2, ("video", (7, 2, 4)), 1], [4, ("video", (6, 2, 2))]], padding="left")
    cache = ours.new_cache(128, page_size=8, num_pages=64)
    ours(**batch.ours(), past_key_values=cache)
    ids, mask = batch.input_ids, batch.attention_mask
    more = torch.tensor([[5, 6], [7, 8]])
    found = ours(more, past_key_values=cache).logits
    whole = ours(torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1), **batch.visual).logits
    torch.testing.assert_close(found, whole[:, -2:], atol=1e-4, rtol=1e-4)
    if advance == "spatial":
        one = compose(family, [[2, ("video", (7, 2, 4)), 1]])
        expected = theirs.generate(**one.theirs(), max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert torch.equal(ours.generate(**one.ours(), max_new_tokens=8), expected)


@pytest.mark.parametrize("family", QWEN)
def test_given_positions_are_gone_on_from(checkpoint, batch_of, family):
    theirs, directory = checkpoint(family)
    ours = as_transformers(atb.load_inference_model(directory))
    batch = batch_of(family, "video", padding="left")
    grids = {key: value for key, value in batch.visual.items() if key.endswith("thw")}
    kinds = {"mm_token_type_ids": batch.theirs()["mm_token_type_ids"], "attention_mask": batch.attention_mask}
    positions, _ = theirs.model.get_rope_index(batch.input_ids, **grids, **kinds)
    caches = [ours.new_cache(256, page_size=8, num_pages=128) for _ in range(2)]
    given = ours(**batch.ours(), position_ids=positions, past_key_values=caches[0]).logits
    real = batch.attention_mask.bool()
    assert torch.equal(given[real], ours(**batch.ours(), past_key_values=caches[1]).logits[real])
    assert caches[0].next_positions == caches[1].next_positions
    more = torch.tensor([[5, 6], [7, 8]])
    first, second = (ours(more, past_key_values=cache).logits for cache in caches)
    assert torch.equal(first, second)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_may_have_dtypes_of_their_own(checkpoint, batch_of, family):
    model = atb.load_model(checkpoint(family)[1])
    batch = batch_of(family, "mixed")
    real = batch.attention_mask.bool()
    expected = model(**batch.ours()).logits[real]
    model.language.to(torch.bfloat16)
    found = model(**batch.ours())
    assert found.logits.dtype == torch.bfloat16
    assert (found.logits[real].float() - expected).abs().max() < 0.1 * expected.abs().max()
    found.logits.float().sum().backward()
    assert all(parameter.grad.dtype == parameter.dtype for parameter in model.parts()["projector"])
    assert model.generate(**batch.ours(), max_new_tokens=2).shape == (3, batch.input_ids.shape[1] + 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_another_dtype(checkpoint, batch_of, family, dtype):
    model = atb.load_model(checkpoint(family)[1], dtype=dtype)
    batch = batch_of(family, "mixed")
    real = batch.attention_mask.bool()
    with torch.no_grad():
        expected = atb.load_model(checkpoint(family)[1])(**batch.ours()).logits[real]
        found = model(**batch.ours()).logits[real]
    limit = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float64: 1e-5}[dtype]
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() < limit * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_compute_the_same(checkpoint, batch_of, family):
    model = atb.load_model(checkpoint(family)[1])
    batch = batch_of(family, "two_images")
    with torch.no_grad():
        expected = model(**batch.ours()).logits
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(**batch.ours()).logits, expected)


def test_a_compiled_model_computes_the_same(checkpoint, batch_of):
    model = atb.load_model(checkpoint("qwen2_vl")[1])
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    batch = batch_of("qwen2_vl", "two_images")
    with torch.no_grad():
        expected = model(**batch.ours()).logits
        torch.testing.assert_close(compiled(**batch.ours()).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_image_in_two_questions_of_a_batch_is_encoded_once(checkpoint, batch_of, family, monkeypatch):
    model = atb.load_inference_model(checkpoint(family)[1])
    batch = batch_of(family, "one")
    encoded = []
    encode = model.encode
    monkeypatch.setattr(model, "encode", lambda part: encoded.append(len(part.visuals)) or encode(part))
    ids = torch.cat([batch.input_ids, torch.tensor([[7]])], 1).repeat(2, 1)
    ids[1, -1] = 9
    twice = {key: torch.cat([value, value]) for key, value in batch.visual.items()}
    found = model.generate(ids, 4, **twice)
    assert encoded == [1]
    alone = [model.generate(ids[row : row + 1], 4, **batch.visual) for row in range(2)]
    assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_share_text_or_images_are_not_taken_for_each_other(checkpoint, family):
    model = atb.load_inference_model(checkpoint(family)[1])
    image = images_of(family)[2]
    rows = [[6, image, 3, image, 4]]
    prompts = []
    for words in range(2):
        for pixels in range(2):
            prompt = compose(family, rows, seed=words)
            prompt.visual = compose(family, rows, seed=10 + pixels).visual
            prompts.append(prompt)
    cold = [model.generate(**prompt.ours(), max_new_tokens=4) for prompt in prompts]
    cache = model.new_cache(256, page_size=4, num_pages=72)  # too few to keep all: pages are given up and taken again
    for number in (0, 1, 2, 3, 1, 0, 3, 2, 2, 0):
        chunk = (None, 5)[number % 2]
        found = model.generate(**prompts[number].ours(), max_new_tokens=4, cache=cache, prefill_chunk_size=chunk)
        assert torch.equal(found, cold[number])
    both = {key: torch.cat([prompt.visual[key] for prompt in prompts[:2]]) for key in prompts[0].visual}
    found = model.generate(prompts[0].input_ids.repeat(2, 1), 4, **both)
    assert torch.equal(found, torch.cat(cold[:2]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_is_too_small_stays_usable(checkpoint, batch_of, family):
    model = atb.load_inference_model(checkpoint(family)[1])
    batch = batch_of(family, "sizes", padding="left")
    cache = model.new_cache(256, page_size=4, num_pages=3)
    for _ in range(2):
        with pytest.raises(OutOfPagesError):
            model.generate(**batch.ours(), max_new_tokens=2, cache=cache)
        with pytest.raises(OutOfPagesError):
            model(**batch.ours(), past_key_values=cache)
        assert cache.batch_size == 0
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(model.generate(ids, 4, cache=cache), model.generate(ids, 4))


def test_the_size_of_an_image_is_part_of_its_content():
    tiling = AnyResolution(8, [[28, 28], [56, 28], [28, 56]], 28, 7)
    pixels = torch.randn(1, 3, 3, 28, 28)
    digests = [tiling.cut(pixels, [size]).digest(0) for size in ((28, 40), (28, 42), (28, 40))]
    assert digests[0] == digests[2] != digests[1]


def test_parts_that_do_not_go_together(checkpoint):
    llava, qwen = (atb.load_model(checkpoint(family)[1]) for family in ("llava", "qwen2_vl"))
    with pytest.raises(TypeError, match="tiling is 3"):
        LlavaModel(llava.vision, llava.projector, llava.language, image_token_id=150, tiling=3)
    with pytest.raises(TypeError, match="config is"):
        QwenVLModel(qwen.vision, qwen.projector, qwen.language, {"image_token_id": 150})
    with pytest.raises(ValueError, match="language has rotary positions of 1 axes; allowed: 3"):
        QwenVLModel(qwen.vision, qwen.projector, llava.language, qwen.config)
    with pytest.raises(ValueError, match="image_token_id and video_token_id are 5; allowed: two ids"):
        QwenVLConfig(5, 5)
    with pytest.raises(TypeError, match=r"deepstack_layers\[1\] is 'b'"):
        QwenVLConfig(5, 6, deepstack_layers=(1, "b"))
