"""PagedCache inside transformers' generate: the same tokens and logits as DynamicCache, and pages that come back."""

import copy

import pytest
import torch
import transformers

from atb_modules import OutOfPagesError
from atb_modules.integrations import transformers_masks
from atb_modules.integrations.transformers import register
from atb_modules.integrations.transformers_cache import PagedCache
from atb_modules.integrations.transformers_pages import CachedStates
from atb_modules.kernels.registry import record_choices

register()

FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "llama4_text",
    "gpt_oss",
    "phi3",
    "cohere2",
    "olmo2",
]
PROMPT, NEW = 21, 14


@pytest.fixture(autouse=True)
def one_thread():
    """Models as small as these run faster on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(build_tiny_model):
    """Models by family and attention implementation, built once."""
    built = {}

    def get(family, implementation="atb"):
        if family not in built:
            built[family] = {"eager": build_tiny_model(family)}
        if implementation not in built[family]:
            model = copy.deepcopy(built[family]["eager"])
            model.set_attn_implementation(implementation)
            built[family][implementation] = model
        return built[family][implementation]

    return get


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, PROMPT), generator=torch.Generator().manual_seed(5))


def padding(side):
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    if side == "left":
        mask[0, :7] = 0
    elif side == "holes":
        mask[0, 3:6] = 0
    return mask


def paged(model, **options):
    return PagedCache(model.config, **{"max_seq_len": 64, "page_size": 4, "max_batch_size": 2} | options)


def generate(model, ids, cache=None, mask=None, **options):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        cache=cache,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **{"max_new_tokens": NEW, "do_sample": False} | options,
    )


def assert_same(ours, expected):
    assert torch.equal(ours.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["none", "left", "holes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_dynamic_cache(models, ids, family, side):
    model, mask = models(family), padding(side)
    cache = paged(model)
    assert_same(generate(model, ids, cache, mask), generate(model, ids, mask=mask))
    # Left padding takes no pages, where the mask has a form that shows it: not so for chunks that begin after it.
    short = PROMPT + NEW - (8 if side == "left" and family != "llama4_text" else 1)
    assert cache.manager.lengths == (short, PROMPT + NEW - 1)
    cache.reset()
    assert cache.manager.memory_stats().pages_used == 0


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "llama4_text", "cohere2"])
def test_other_implementations_get_dense_tensors(models, ids, family, implementation):
    model, mask = models(family, implementation), padding("left")
    assert_same(generate(model, ids, paged(model), mask), generate(model, ids, mask=mask))


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_in_chunks(models, ids, family):
    model, mask = models(family), padding("left")
    expected = generate(model, ids, mask=mask, prefill_chunk_size=6)
    assert_same(generate(model, ids, paged(model), mask, prefill_chunk_size=6), expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_beams_share_pages(models, ids, family, monkeypatch):
    model, mask = models(family), padding("left")
    shared = []
    reorder = PagedCache.reorder_cache

    def watched(cache, beam_idx):
        reorder(cache, beam_idx)
        shared.append(cache.manager.memory_stats().pages_shared)

    monkeypatch.setattr(PagedCache, "reorder_cache", watched)
    ours = generate(model, ids, paged(model, max_batch_size=6), mask, num_beams=3)
    expected = generate(model, ids, mask=mask, num_beams=3)
    assert torch.equal(ours.sequences, expected.sequences)
    torch.testing.assert_close(ours.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=1e-5)
    assert max(shared) > 0


def test_sampling(models, ids):
    model = models("gemma3")
    drawn = []
    for cache in (None, paged(model)):
        torch.manual_seed(3)
        drawn.append(generate(model, ids, cache, do_sample=True, temperature=1.5, top_k=20))
    assert_same(drawn[1], drawn[0])


@pytest.mark.parametrize("family", ["llama", "mistral", "llama4_text"])
def test_assisted_generation(models, ids, family):
    """Drafts that are refused are cropped, also after a window has rolled."""
    model = models(family)
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    ours = generate(model, ids[1:], paged(model), assistant_model=assistant, max_new_tokens=30)
    assert torch.equal(ours.sequences, generate(model, ids[1:], max_new_tokens=30).sequences)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_several_calls_in_a_row(models, ids, family):
    """A conversation goes on in the same cache, and after reset() another begins."""
    model = models(family)
    cache, dynamic = paged(model), transformers.DynamicCache(config=model.config)
    turn = ids
    for more in (5, 3, 1):
        ours, expected = (generate(model, turn, c, max_new_tokens=4) for c in (cache, dynamic))
        assert_same(ours, expected)
        turn = torch.cat([expected.sequences, ids[:, :more]], dim=1)
    cache.reset()
    assert_same(generate(model, ids.flip(0)[:1], cache), generate(model, ids.flip(0)[:1]))


@pytest.mark.parametrize("implementation", ["atb", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_rows_and_tokens_are_changed_as_in_dynamic_cache(models, ids, family, implementation):
    model = models(family, "eager" if family != "llama" and implementation == "sdpa" else implementation)
    caches = paged(model, max_batch_size=4), transformers.DynamicCache(config=model.config)
    for cache in caches:
        cache.activate_past_recording()
    parts = iter(ids.repeat(4, 2).split([9, 1, 7, 1, 1, 8, 3, 12], dim=1))

    def advance(rows):
        part = next(parts)[:rows]
        with torch.no_grad():
            expected, out = (model(part, cache=cache).logits for cache in caches[::-1])
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        assert len({cache.get_seq_length() for cache in caches}) == 1

    def change(name, *args):
        for cache in caches:
            getattr(cache, name)(*args)

    advance(2)
    change("batch_repeat_interleave", 2)
    advance(4)
    change("crop", -3)
    advance(4)
    change("batch_select_indices", torch.tensor([3, 0, 0]))
    advance(3)
    advance(3)
    change("crop", -2)
    change("reorder_cache", torch.tensor([2, 2, 1]))
    advance(3)
    change("crop", 0)
    for ours, theirs in zip(*caches, strict=True):
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            kept = min(a.shape[2], b.shape[2])
            torch.testing.assert_close(a[:, :, a.shape[2] - kept :], b[:, :, b.shape[2] - kept :], atol=1e-5, rtol=1e-5)
    change("crop", -1000)
    assert caches[0].get_seq_length() == 0 and caches[0].manager.memory_stats().pages_used == 0


def test_window_pages_are_let_go(models, ids):
    model = models("mistral")
    cache = paged(model, max_seq_len=200)
    generate(model, ids, cache, max_new_tokens=100)
    (group,) = cache.manager.memory_stats().groups
    assert group.window == model.config.sliding_window - 1 and group.pages_used <= 2 * (-(-group.window // 4) + 1)


def test_attention_reads_the_pages(models, ids, monkeypatch):
    """No dense keys are made while decoding, with a window and left padding too."""
    monkeypatch.setattr(transformers_masks, "_LOGGED", set())
    monkeypatch.setattr(CachedStates, "dense", lambda self: pytest.fail("keys were gathered"))
    for family in ("llama", "gemma3", "gpt_oss"):
        model = models(family)
        with record_choices() as choices:
            generate(model, ids, paged(model), padding("left"))
        assert any(op == "paged_attention" for op, _ in choices)


def test_a_handle_is_a_tensor_for_everybody_else(models, ids):
    model = models("llama")
    cache = paged(model)
    with torch.no_grad():
        model(ids, cache=cache)
    k, v = torch.randn(2, 2, 2, 3, 12)
    keys, values = cache.update(k, v, 0)
    assert isinstance(keys, CachedStates) and keys.shape == (2, 2, PROMPT + 3, 12) and keys.size(2) == PROMPT + 3
    assert torch.equal(torch.matmul(keys, torch.eye(12))[:, :, -3:], k) and torch.equal(values[:, :, -3:], v)
    assert keys.dtype == torch.float32 and torch.equal(keys.transpose(1, 2)[:, -3:], k.transpose(1, 2))


def test_a_prompt_joins_a_registered_prefix(models, ids):
    """Prefix sharing across requests: the second prompt computes only what the first did not hold."""
    for family in ("llama", "gemma3"):
        model = models(family)
        cache = paged(model, max_batch_size=4)
        first = generate(model, ids, cache)
        assert cache.register_prefix(first.sequences, salt="a") == (PROMPT + NEW - 1) // 4 * 4
        cache.reset()
        second = torch.cat([first.sequences[:, :18], ids[:, :5]], dim=1)
        assert cache.join_prefix(second) == 0 and cache.join_prefix(second, salt="b") == 0
        held = cache.join_prefix(second, salt="a")
        assert held == (16 if family == "llama" else 0)  # behind a window the earlier pages are gone
        assert cache.get_seq_length() == held
        assert_same(generate(model, second, cache), generate(model, second))
        with pytest.raises(ValueError, match="the cache holds .* tokens; allowed: an empty one"):
            cache.join_prefix(second)


def test_a_cache_holds_lower_precision_than_the_model(models, ids):
    model = models("llama")
    cache = paged(model, dtype=torch.bfloat16)
    out, expected = generate(model, ids, cache), generate(model, ids)
    assert cache.pages(0)[0].dtype == torch.bfloat16
    torch.testing.assert_close(out.logits[1], expected.logits[1], atol=0.1, rtol=0.1)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("implementation", ["atb", "eager"])
def test_int8_pages(models, ids, family, implementation):
    """The logits of the steps stay near; greedy tokens are given, so that a near tie does not lead elsewhere."""
    model = models(family, implementation)
    cache, dynamic = paged(model, quantization="int8"), transformers.DynamicCache(config=model.config)
    for part in ids.split([15, 1, 1, 4], dim=1):
        with torch.no_grad():
            out, expected = (model(part, cache=one).logits for one in (cache, dynamic))
        assert (out - expected).abs().max() < 0.05 * expected.std() * 4
    plain = paged(model)
    with torch.no_grad():
        model(ids, cache=plain)
    assert 3 < plain.manager.memory_stats().bytes_reserved / cache.manager.memory_stats().bytes_reserved < 4


def test_a_larger_batch_and_a_full_pool(models, ids):
    model = models("llama")
    cache = paged(model, max_batch_size=1, max_seq_len=24)
    with torch.no_grad():
        model(ids[:1], cache=cache)
        cache.reset()
        model(ids, cache=cache)
    assert cache.batch_size == 2
    with pytest.raises(ValueError, match="positions go up to max_seq_len=24"), torch.no_grad():
        model(ids[:, :5], cache=cache)
    assert cache.get_seq_length() == PROMPT
    small = paged(model, num_pages=6)
    with pytest.raises(OutOfPagesError), torch.no_grad():
        model(ids, cache=small)
    assert small.get_seq_length() == 0
    with torch.no_grad():
        model(ids[:1], cache=small)


def test_what_does_not_fit_is_named(models, ids):
    model = models("llama")
    cache = paged(model)
    with pytest.raises(ValueError, match="keys require gradients"):
        model(ids, cache=cache)
    with torch.no_grad():
        model(ids, cache=cache)
        with pytest.raises(ValueError, match="keys have batch 1, the cache holds 2 rows"):
            model(ids[:1], cache=cache)
        with pytest.raises(ValueError, match="-tokens_to_remove is -3"):
            cache.crop(3)
        shown = torch.ones(2, PROMPT + 1, dtype=torch.long)
        padded = paged(model)
        model(ids, attention_mask=padding("left"), cache=padded)
        with pytest.raises(ValueError, match="attention_mask shows tokens that were padding"):
            model(ids[:, :1], attention_mask=shown, cache=padded)
        interrupted = paged(model)
        k = torch.randn(2, 2, 3, 12)
        interrupted.update(k, k, 0)
        with pytest.raises(ValueError, match=r"layer 0 comes again, but the layers \[1, 2, 3\] did not"):
            interrupted.update(k, k, 0)
        with pytest.raises(ValueError, match="1 of 4 layers took part"):
            interrupted.reorder_cache(torch.tensor([0]))
        with pytest.raises(ValueError, match="layer 1 brings 2 tokens of 2 rows, earlier ones 3 of 2"):
            interrupted.update(k[:, :, :2], k[:, :, :2], 1)
        with pytest.raises(ValueError, match="layer 1 has 1 kv heads of 12 channels, earlier ones 2 of 12"):
            interrupted.update(k[:, :1], k[:, :1], 1)
        with pytest.raises(ValueError, match="layer 1 has keys .* and values"):
            interrupted.update(k, k[..., :4], 1)
        interrupted.crop(-3)
        assert interrupted.get_seq_length() == 0
    with pytest.raises(TypeError, match="dtype is 'float32'"):
        paged(model, dtype="float32")
    with pytest.raises(TypeError, match="config is {}"):
        PagedCache({}, 64)
    with pytest.raises(TypeError, match="input_ids is list"):
        paged(model).register_prefix([[1]])
    with pytest.raises(ValueError, match="max_seq_len is 0"):
        paged(model, max_seq_len=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.T5Config(), "T5Config is of an encoder-decoder model"),
        (transformers.MambaConfig(num_hidden_layers=2), "layer 0 of MambaConfig is"),
        (transformers.Qwen3NextConfig(num_hidden_layers=4), "layer 0 of Qwen3NextConfig is 'linear_attention'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_that_are_not_served_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        PagedCache(config, 64)
