"""generate: against a loop without any cache, for ragged rows, chunks, end tokens, sampling and shared
prefixes.
"""

import copy

import numpy as np
import pytest
import torch

from atb_modules.attention import OutOfPagesError
from atb_modules.inference.prefill import next_counts, prefill
from atb_modules.inference.prompt import Prompt
from atb_modules.inference.sampling import Sampler
from atb_modules.models.config import InferenceConfig
from atb_modules.strategies import use_strategy

IDS = torch.ones(1, 3, dtype=torch.int64)


def plain_greedy(model, prompt, count):
    """The whole sequence through the model for every token: the slow truth."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


def test_greedy_equals_a_loop_without_a_cache(model, prompt_of):
    prompt = prompt_of(20)
    assert model.generate(prompt, 25) == plain_greedy(model, prompt, 25)


def test_forms_of_ids(model, prompt_of):
    prompt = prompt_of(6)
    expected = plain_greedy(model, prompt, 4)
    assert model.generate(prompt, 4) == expected
    assert model.generate([prompt], 4) == [expected]
    assert model.generate(torch.tensor(prompt), 4).tolist() == expected
    batched = model.generate(torch.tensor([prompt, prompt], dtype=torch.int32), 4)
    assert batched.dtype == torch.int32 and batched.tolist() == [expected, expected]
    assert not batched.is_inference()
    assert model.generate(prompt, 0) == prompt
    assert model.generate(torch.tensor([prompt]), 0).tolist() == [prompt]
    assert model.generate([], 3) == []


@pytest.mark.parametrize("fused", [True, False])
def test_ragged_rows_equal_each_alone(model, prompt_of, fused):
    rows = [prompt_of(n, seed=3) for n in (1, 40, 7, 7, 19)]
    rows.append(list(rows[2]))
    expected = [plain_greedy(model, row, 12) for row in rows]
    with use_strategy(decode="auto" if fused else "modules"):
        assert model.generate(rows, 12) == expected
        assert model.generate(rows[::-1], 12, prefill_chunk_size=9) == expected[::-1]


def test_cache_options_change_no_token(model, prompt_of):
    rows = [prompt_of(50), prompt_of(9), prompt_of(50)]
    plain = copy.copy(model)
    plain.inference_config = InferenceConfig(enable_kv_cache_opt=False, page_size=4)
    assert plain.generate(rows, 9) == model.generate(rows, 9)


def test_more_rows_than_the_native_road_takes(model, prompt_of):
    rows = [prompt_of(3 + n) for n in range(20)]
    alone = [model.generate(row, 6) for row in rows]
    assert model.generate(rows, 6) == alone
    # Rows end at different steps, so that the rest goes over to the native road on the way.
    ends = sorted({row[-4] for row in alone})
    assert model.generate(rows, 6, eos_token_ids=ends) == [model.generate(row, 6, eos_token_ids=ends) for row in rows]


def passes_of(lengths, size):
    prompts, done, passes = [Prompt([1] * length) for length in lengths], [0] * len(lengths), []
    while any(counts := next_counts(prompts, done, size)):
        passes.append(counts)
        done = [a + b for a, b in zip(done, counts, strict=True)]
    return passes


class TestChunks:
    """Prompts in passes of any size: same tokens, same logits, same cache, each token written once."""

    @pytest.mark.parametrize("windows", [(None, None), (16, 16)])
    @pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65, 97])
    def test_any_size(self, build_model, prompt_of, windows, length):
        model = build_model(windows)
        prompt = prompt_of(length)
        whole = model.new_cache(128, page_size=8)
        whole.begin(1)
        expected = prefill(model, whole, [Prompt(prompt)], None)
        tokens = model.generate(prompt, 8)
        for size in (1, 7, 32, 1000):
            cache = model.new_cache(128, page_size=8)
            cache.begin(1)
            logits = prefill(model, cache, [Prompt(prompt)], size)
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
            assert cache.lengths == (length,)
            for layer in range(2):
                for ours, all_at_once in zip(cache.gather(layer, 0), whole.gather(layer, 0), strict=True):
                    kept = ours.shape[1]
                    torch.testing.assert_close(ours, all_at_once[:, -kept:], atol=1e-5, rtol=0)
            model.inference_config.prefill_chunk_size = size
            assert model.generate(prompt, 8) == tokens
            model.inference_config.prefill_chunk_size = None

    def test_passes_are_bounded_and_cover_everything_once(self):
        lengths = [5, 0, 17, 1, 30]
        for size in (1, 4, 7, 53, 1000):
            passes = passes_of(lengths, size)
            assert all(0 < sum(counts) <= size for counts in passes)
            assert [sum(column) for column in zip(*passes, strict=True)] == lengths
        assert passes_of(lengths, None) == [lengths]


def test_end_tokens(model, prompt_of):
    rows = [prompt_of(9), prompt_of(4)]
    free = model.generate(rows, 10)
    end = free[0][9 + 3]
    cut = model.generate(rows, 10, eos_token_ids=end)
    for row, prompt, whole in zip(cut, rows, free, strict=True):
        answer = whole[len(prompt) :]
        expected = answer[: answer.index(end) + 1] if end in answer else answer
        assert row == prompt + expected
    padded = model.generate(torch.tensor([rows[0]] * 2), 10, eos_token_ids=[end], pad_token_id=77)
    assert padded.shape[1] == len(cut[0])
    assert model.generate(rows[0], 10, eos_token_ids=[]) == free[0]


def test_tensor_rows_that_end_early_are_filled(model, prompt_of):
    rows = torch.tensor([prompt_of(5, seed) for seed in range(4)])
    free = model.generate(rows, 8)
    end = int(free[0, 6])
    out = model.generate(rows, 8, eos_token_ids=end, pad_token_id=55)
    for row, whole in zip(out.tolist(), free.tolist(), strict=True):
        answer = whole[5:]
        length = answer.index(end) + 1 if end in answer else 8
        assert row[5 : 5 + length] == answer[:length]
        assert set(row[5 + length :]) <= {55}


def test_tokens_are_streamed_in_order(model, prompt_of):
    rows = [prompt_of(3), prompt_of(8)]
    seen = {0: [], 1: []}
    out = model.generate(rows, 5, on_token=lambda row, token: seen[row].append(token))
    assert [prompt + seen[row] for row, prompt in enumerate(rows)] == out


class TestSampling:
    def test_draws_follow_the_probabilities(self):
        logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
        sampler = Sampler(temperature=0.7, seed=1)
        counts = torch.bincount(torch.tensor([sampler(logits)[0] for _ in range(4000)]), minlength=4)
        torch.testing.assert_close(counts / 4000, (logits[0] / 0.7).softmax(0), atol=0.03, rtol=0)

    def test_top_k_and_top_p(self):
        logits = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05], [0.05, 0.1, 0.15, 0.2, 0.5]]).log()
        top2 = Sampler(top_k=2).probabilities(logits)
        assert (top2 > 0).sum(1).tolist() == [2, 2]
        torch.testing.assert_close(top2[0, :2], torch.tensor([5 / 7, 2 / 7]))
        nucleus = Sampler(top_p=0.8).probabilities(logits)
        torch.testing.assert_close(nucleus[0], torch.tensor([0.5, 0.2, 0.15, 0, 0]) / 0.85)
        torch.testing.assert_close(nucleus[1], nucleus[0].flip(0))
        assert (Sampler(top_p=1e-6).probabilities(logits) > 0).sum(1).tolist() == [1, 1]
        both = Sampler(temperature=0.5, top_k=3, top_p=0.5).probabilities(logits)
        assert (both > 0).sum(1).tolist() == [1, 1]

    def test_seeds(self, model, prompt_of):
        prompt = prompt_of(5)
        first = model.generate(prompt, 12, temperature=1.0, seed=7)
        assert model.generate(prompt, 12, temperature=1.0, seed=7) == first
        generator = torch.Generator().manual_seed(7)
        assert model.generate(prompt, 12, temperature=1.0, generator=generator) == first
        assert model.generate(prompt, 12, temperature=1.0, seed=8) != first
        assert model.generate(prompt, 12, temperature=0) == model.generate(prompt, 12)
        assert model.generate(prompt, 12, top_k=1, seed=3) == model.generate(prompt, 12)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temperature": -1}, "temperature is -1; allowed"),
            ({"temperature": float("nan")}, "temperature is nan; allowed"),
            ({"top_k": 0}, "top_k is 0; allowed: a positive int"),
            ({"top_p": 1.5}, r"top_p is 1.5; allowed: 0 < top_p <= 1"),
            ({"seed": 1, "generator": torch.Generator()}, "generator and seed are both given"),
            ({"temperature": float("inf")}, "temperature is inf"),
            ({"temperature": 10**400}, "temperature is 1000"),
            ({"top_k": -3}, "top_k is -3"),
            ({"top_p": 0.0}, "top_p is 0.0"),
            ({"top_p": float("nan")}, "top_p is nan"),
            ({"seed": 2**64}, "seed is 18446744073709551616"),
        ],
    )
    def test_errors(self, options, message):
        with pytest.raises(ValueError, match=message):
            Sampler(**options)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("temperature", value) for value in ("1", True, [1.0], torch.tensor(1.0))),
            *(("top_k", value) for value in ("4", True, 4.0)),
            *(("top_p", value) for value in ("x", True, [0.5])),
            *(("seed", value) for value in ("4", True, 4.0)),
            ("generator", 4),
        ],
    )
    def test_types(self, name, value):
        with pytest.raises(TypeError, match=f"{name} is .*allowed: "):
            Sampler(**{name: value})

    @pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}])
    @pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-40, 1e-46, 5e-324])
    def test_temperatures_near_zero_are_greedy(self, model, prompt_of, temperature, options):
        """Logits divided by them overflow float32: inf - inf is NaN, from which nothing can be drawn."""
        logits = torch.tensor([[3.0, 1.0, -200.0, 2.999], [0.0, 4.0, 4.0, -1.0]])
        probabilities = Sampler(temperature, **options).probabilities(logits)
        torch.testing.assert_close(probabilities[0], torch.tensor([1.0, 0.0, 0.0, 0.0]))
        assert probabilities.isfinite().all() and probabilities[1, [0, 3]].sum() == 0
        assert model.generate(prompt_of(5), 6, temperature=temperature, **options) == model.generate(prompt_of(5), 6)

    @pytest.mark.parametrize("top_p", [1e-40, 1e-46, 5e-324])
    def test_the_smallest_nucleus_is_the_likeliest_token(self, top_p):
        probabilities = Sampler(top_p=top_p).probabilities(torch.tensor([[0.0, 2.0, 1.0]]))
        assert probabilities.tolist() == [[0.0, 1.0, 0.0]]

    def test_high_temperatures_are_even(self):
        probabilities = Sampler(1e300).probabilities(torch.tensor([[0.0, 2.0, 1.0, -500.0]]))
        torch.testing.assert_close(probabilities, torch.full((1, 4), 0.25))


class TestSharedCache:
    def test_prefixes_are_found_again(self, model, prompt_of):
        """A system prompt computed once serves later calls, with the tokens of a cold run."""
        system = prompt_of(30)
        cache = model.new_cache(200, page_size=8, num_pages=60)
        for turn in range(3):
            prompt = system + prompt_of(5 + turn, seed=9)
            assert cache.match_prefix(prompt) == (24 if turn else 0)
            assert model.generate(prompt, 6, cache=cache) == model.generate(prompt, 6)
            assert cache.batch_size == 0 and cache.memory_stats().pages_used == 0

    def test_forks_of_a_stored_prompt(self, model, prompt_of):
        prompt = prompt_of(6)
        stored = model.new_cache(64, page_size=4, num_pages=40)
        stored.begin(1)
        model(torch.tensor([prompt]), past_key_values=stored)
        before = stored.gather(0, 0)[0].clone()
        twin = copy.deepcopy(stored)
        for cache in (stored, twin):
            for _ in range(3):
                (row,) = cache.fork(0)
                cache.reorder([row, 0])
                tokens = list(prompt)
                token = torch.tensor([[plain_greedy(model, prompt, 1)[-1]], [0]])
                for _ in range(4):
                    tokens.append(int(token[0, 0]))
                    logits = model(token, attention_mask=torch.tensor([[1], [0]]), past_key_values=cache).logits
                    token = logits[:, -1].argmax(-1, keepdim=True)
                assert tokens == plain_greedy(model, prompt, 4)
                cache.leave(0)
                assert cache.lengths == (6,) and torch.equal(cache.gather(0, 0)[0], before)

    def test_a_full_pool_leaves_nothing_open(self, model, prompt_of):
        cache = model.new_cache(200, page_size=8, num_pages=3)
        with pytest.raises(OutOfPagesError, match="num_pages=3"):
            model.generate(prompt_of(20), 30, cache=cache)
        assert cache.batch_size == 0 and cache.memory_stats().pages_used == 0
        cache.begin(1)
        with pytest.raises(ValueError, match="cache has 1 open sequences; allowed: none"):
            model.generate(prompt_of(5), 2, cache=cache)


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"),
    [
        ([[1], []], {}, ValueError, "ids has no token in row 1"),
        ([1, 101], {}, ValueError, "ids has token 101 in row 0; vocab_size is 101"),
        ([[1], [2.0]], {}, TypeError, r"ids has 2.0 \(float\) in row 1"),
        (torch.ones(1, 3), {}, ValueError, r"ids must be int64 or int32 \(batch, seq\), got torch.float32"),
        ([1] * 395, {}, ValueError, "row 0 of ids has 395 tokens and max_new_tokens is 8: .*max_positions=400"),
        ([1], {"max_new_tokens": -1}, ValueError, "max_new_tokens is -1"),
        ([1], {"prefill_chunk_size": 0}, ValueError, "prefill_chunk_size is 0"),
        ([1], {"eos_token_ids": [-2]}, ValueError, "eos_token_ids has -2"),
        ([1], {"beams": 2}, TypeError, "beams"),
        ([1], {"attention_mask": torch.ones(1, 1)}, ValueError, "lists of token ids have no padding"),
        (np.array([1, 2]), {}, TypeError, r"ids is array.*\(ndarray\); allowed: integers \(batch, seq\)"),
        ([np.array([1, 2])], {}, TypeError, r"ids\[0\] is array"),
        ([np.int64(1)], {}, TypeError, r"ids\[0\] is .*1.* \(int64\)"),
        (1.5, {}, TypeError, r"ids is 1.5 \(float\)"),
        (1, {}, TypeError, r"ids is 1 \(int\)"),
        (None, {}, TypeError, "ids is None"),
        ("hello", {}, TypeError, "ids is 'hello'"),
        (["hello"], {}, TypeError, r"ids\[0\] is 'hello'"),
        ({"input_ids": [1]}, {}, TypeError, "ids is {'input_ids'"),
        ([[1], 2], {}, TypeError, r"ids\[1\] is 2 \(int\); allowed: .*a list of such lists"),
        ([1, [2]], {}, TypeError, r"ids has \[2\] \(list\) in row 0"),
        ([[[1]]], {}, TypeError, r"ids has \[1\] \(list\) in row 0"),
        ([1, None], {}, TypeError, "ids has None"),
        ([True], {}, TypeError, "ids has True"),
        ([1, -1], {}, ValueError, "ids has token -1 in row 0"),
        ([1, 2**70], {}, ValueError, "ids has token 1180591620717411303424"),
        ([[]], {}, ValueError, "ids has no token in row 0"),
        (torch.zeros(2, 0, dtype=torch.int64), {}, ValueError, "ids has no token in row 0"),
        (torch.tensor(3), {}, ValueError, r"ids must be int64 or int32 \(batch, seq\), got torch.int64 \(\)"),
        (torch.tensor([101]), {}, ValueError, "ids has token 101"),
        (IDS, {"attention_mask": np.ones((1, 3))}, TypeError, "attention_mask is ndarray"),
        (IDS, {"attention_mask": torch.ones(1, 3)}, TypeError, "attention_mask is torch.float32; allowed: bool or int"),
        (IDS, {"attention_mask": torch.ones(1, 2, dtype=torch.bool)}, ValueError, r"attention_mask has shape \(1, 2\)"),
        (IDS, {"attention_mask": torch.zeros(1, 3, dtype=torch.bool)}, ValueError, "ids has no token in row 0"),
        ([1], {"max_new_tokens": 2.0}, ValueError, "max_new_tokens is 2.0; allowed: an int of at least 0"),
        ([1], {"max_new_tokens": True}, ValueError, "max_new_tokens is True"),
        ([1], {"max_new_tokens": "4"}, ValueError, "max_new_tokens is '4'"),
        ([1], {"max_new_tokens": None}, ValueError, "max_new_tokens is None"),
        ([1], {"max_new_tokens": 10**20}, ValueError, "max_new_tokens is 1000"),
        ([1], {"prefill_chunk_size": True}, ValueError, "prefill_chunk_size is True"),
        ([1], {"prefill_chunk_size": 2.0}, ValueError, "prefill_chunk_size is 2.0"),
        ([1], {"eos_token_ids": 1.5}, TypeError, "eos_token_ids is 1.5; allowed: a token id, or a list"),
        ([1], {"eos_token_ids": "</s>"}, TypeError, "eos_token_ids is '</s>'"),
        (
            [1],
            {"eos_token_ids": torch.tensor(1)},
            TypeError,
            r"eos_token_ids is tensor\(1\); allowed: a token id, or a",
        ),
        ([1], {"eos_token_ids": torch.tensor([1])}, TypeError, r"eos_token_ids is tensor\(\[1\]\)"),
        ([1], {"eos_token_ids": np.array(1)}, TypeError, r"eos_token_ids is array\(1\)"),
        ([1], {"eos_token_ids": True}, ValueError, "eos_token_ids has True"),
        ([1], {"eos_token_ids": [None]}, ValueError, "eos_token_ids has None"),
        ([1], {"pad_token_id": "0"}, TypeError, "pad_token_id is '0'"),
        ([1], {"pad_token_id": 1.0}, TypeError, "pad_token_id is 1.0"),
        ([1], {"pad_token_id": 2**40}, ValueError, "pad_token_id is 1099511627776"),
        ([1], {"on_token": 3}, TypeError, "on_token is int; allowed: a function"),
        ([1], {"cache": {}}, TypeError, "cache must be a KVCacheManager, got dict"),
        ([1], {"temperature": "hot"}, TypeError, r"temperature is 'hot' \(str\); allowed: a finite number"),
        ([1], {"generator": 7}, TypeError, "generator is 7 .*allowed: Generator or None"),
    ],
)
def test_errors_name_the_argument(model, ids, options, error, message):
    with pytest.raises(error, match=message):
        model.generate(ids, **{"max_new_tokens": 8, **options})


def test_mask_with_a_hole(model):
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    with pytest.raises(ValueError, match="attention_mask has a hole in row 1"):
        model.generate(torch.ones(2, 3, dtype=torch.int64), 2, attention_mask=mask)


def test_options_are_checked_when_used(model):
    broken = copy.copy(model)
    broken.inference_config = InferenceConfig()
    broken.inference_config.prefill_chunk_size = 0
    with pytest.raises(ValueError, match="prefill_chunk_size is 0; allowed: a positive int"):
        broken.generate([1], 2)
