"""Placeholders: counted image by image, merged by their place in the prompt."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atb_modules.multimodal.placeholders import Span, find_spans, image_numbers, merge_features, span_index

IMAGE = 99


def row(*parts):
    """Token ids: numbers of text tokens, and negative numbers of placeholders."""
    ids = []
    for part in parts:
        ids += [IMAGE] * -part if part < 0 else list(range(1, part + 1))
    return torch.tensor([ids])


def test_each_image_gets_its_placeholders():
    ids = torch.stack([row(2, -4, 3, -2)[0], row(-2, 4, -3, 2)[0]])
    assert find_spans(ids, IMAGE, [4, 2, 2, 3]) == [
        Span(0, 2, 4, 0),
        Span(0, 9, 2, 1),
        Span(1, 0, 2, 2),
        Span(1, 6, 3, 3),
    ]


def test_images_side_by_side_need_no_separator():
    assert find_spans(row(1, -12, 2), IMAGE, [4, 8]) == [Span(0, 1, 4, 0), Span(0, 5, 8, 1)]


def test_totals_that_agree_do_not_help():
    with pytest.raises(
        ValueError, match=r"row 0, image 1: 4 placeholders, 8 features \(a run of 8 .* at token 2 .*of which 4"
    ):
        find_spans(row(2, -8, 1, -4), IMAGE, [4, 8])
    with pytest.raises(ValueError, match="row 0, image 0: 15 placeholders, 16 features"):
        find_spans(torch.stack([row(3, -15, 1)[0], row(2, -17)[0]]), IMAGE, [16, 16])
    with pytest.raises(ValueError, match="row 0, image 0: 10 placeholders, 16 features"):
        find_spans(row(-10, 1, -22), IMAGE, [16, 16])


def test_a_prompt_cut_inside_of_an_image_is_refused():
    with pytest.raises(ValueError, match="row 0, image 0: 12 placeholders, 16 features"):
        find_spans(row(4, -12), IMAGE, [16])


def test_missing_and_left_over_images_are_refused():
    with pytest.raises(ValueError, match=r"4 placeholders \(99\) left at token 2 of row 0; 0 images with 0 features"):
        find_spans(row(2, -4), IMAGE, [])
    with pytest.raises(
        ValueError, match=r"3 images were given and input_ids has placeholders \(99\) for 1: image 1 has 6"
    ):
        find_spans(row(2, -4), IMAGE, [4, 6, 7])
    with pytest.raises(ValueError, match="2 videos were given"):
        find_spans(row(2, -4), IMAGE, [4, 6], name="video")


def test_padding_is_no_placeholder():
    mask = torch.ones(1, 6, dtype=torch.int64)
    mask[0, :2] = 0
    assert find_spans(torch.full((1, 6), IMAGE), IMAGE, [4], mask) == [Span(0, 2, 4, 0)]


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=3), min_size=1, max_size=3))
def test_merging_puts_every_feature_at_its_place_and_moves_nothing_else(rows):
    lists = [[token for text, image in parts for token in [1] * text + [IMAGE] * image] + [2] for parts in rows]
    longest = max(map(len, lists))
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in lists])
    counts = [image for parts in rows for _, image in parts]
    spans = find_spans(ids, IMAGE, counts)
    embeds = torch.randn(*ids.shape, 3)
    features = torch.randn(sum(counts), 3)
    merged = merge_features(embeds, features, spans)
    assert torch.equal(merged[ids == IMAGE], features)
    assert torch.equal(merged[ids != IMAGE], embeds[ids != IMAGE])
    numbers = image_numbers(spans, *ids.shape)
    assert torch.equal(numbers >= 0, ids == IMAGE)
    assert numbers.flatten()[span_index(spans, longest)].tolist() == [
        item for item, count in enumerate(counts) for _ in range(count)
    ]


def test_gradients_reach_features_and_the_text_around_them():
    ids = row(2, -2, 1)
    embeds = torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)
    features = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    spans = find_spans(ids, IMAGE, [2])
    assert torch.autograd.gradcheck(lambda e, f: merge_features(e, f, spans), (embeds, features))


def test_features_of_another_number_are_refused():
    spans = find_spans(row(2, -3), IMAGE, [3])
    with pytest.raises(ValueError, match=r"features has shape \(2, 4\); 1 spans take \(3, 4\)"):
        merge_features(torch.zeros(1, 5, 4), torch.zeros(2, 4), spans)
