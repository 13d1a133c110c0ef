"""transformers' models with attn_implementation="atb" against the same models with "eager"."""

import copy

import pytest
import torch
import transformers

from atb_modules.integrations import transformers_masks
from atb_modules.integrations.transformers import register
from atb_modules.integrations.transformers_masks import StructuredMask
from atb_modules.kernels.registry import record_choices

register()

LENGTH = 26
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH = ["sliding_attention", "full_attention"]
DECODERS = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 7}),
    "qwen2": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "gemma2": (
        transformers.Gemma2Config,
        {"head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9},
    ),
    "gemma3": (transformers.Gemma3TextConfig, {"head_dim": 16, "sliding_window": 7, "layer_types": BOTH}),
    "llama4": (
        transformers.Llama4TextConfig,
        {
            "head_dim": 16,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {"head_dim": 16, "sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": BOTH},
    ),
    "phi3": (transformers.Phi3Config, {"sliding_window": 7}),
    "cohere2": (transformers.Cohere2Config, {"sliding_window": 7, "layer_types": BOTH, "logit_scale": 1.0}),
    "olmo2": (transformers.Olmo2Config, {}),
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "image_size": 16,
    "patch_size": 4,
}


def build(cls, config, seed=0):
    """A random model with eager attention and weights large enough that attention shows in the output."""
    torch.manual_seed(seed)
    make = getattr(cls, "from_config", None) or cls._from_config
    model = make(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name or not name.endswith("weight"):
                parameter.normal_(std=0.15)
    return model.eval()


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request):
    """(name, the model with eager attention, the same with ours)"""
    config_class, own = DECODERS[request.param]
    config = config_class(**{**SIZES, **own})
    model = build(transformers.AutoModelForCausalLM, config)
    ours = copy.deepcopy(model)
    ours.set_attn_implementation("atb")
    assert ours.config._attn_implementation == "atb" and model.config._attn_implementation == "eager"
    return request.param, model, ours


@pytest.fixture(autouse=True)
def one_thread():
    """Models as small as these run faster on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def padding(side):
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if side == "left":
        mask[0, :5] = 0
    elif side == "right":
        mask[0, -5:] = 0
    return mask


def assert_close(ours, expected, mask=None):
    assert expected.std() > 0.1
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(ours[real], expected[real], atol=1e-4, rtol=0)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_logits(decoder, ids, side):
    _, model, ours = decoder
    mask = padding(side)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        assert_close(ours(ids, attention_mask=mask).logits, expected, mask)
        if side == "none":
            assert_close(ours(ids).logits, expected)


def packed_positions():
    return torch.stack(
        [torch.cat([torch.arange(n) for n in row]) for row in ([LENGTH - 16, 3, 13], [2, LENGTH - 13, 11])]
    )


def test_packed_logits(decoder, ids):
    name, model, ours = decoder
    places = packed_positions()
    with torch.no_grad():
        expected = model(ids, position_ids=places, use_cache=False).logits
        assert_close(ours(ids, position_ids=places, use_cache=False).logits, expected)
        if name != "gpt_oss":  # transformers makes no masks of packed sequences there
            alone = ours(ids[:1, LENGTH - 16 : LENGTH - 13]).logits
            assert_close(alone, expected[:1, LENGTH - 16 : LENGTH - 13])


@pytest.mark.parametrize("side", ["none", "right"])
def test_gradients(decoder, ids, side):
    _, model, ours = decoder
    mask = padding(side)
    labels = ids.masked_fill(mask == 0, -100)
    gradients = []
    for one in (model, ours):
        one.zero_grad()
        one(ids, attention_mask=mask, labels=labels).loss.backward()
        gradients.append({name: p.grad for name, p in one.named_parameters() if "layers.0" in name})
        one.zero_grad()
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients[0].values())
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-4, rtol=1e-3, msg=name)


def generate(model, ids, mask, **options):
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )


@pytest.mark.parametrize("side", ["none", "left"])
def test_greedy_tokens(decoder, ids, side):
    _, model, ours = decoder
    mask = padding(side)
    assert torch.equal(generate(ours, ids, mask), generate(model, ids, mask))


def test_beam_search_tokens(decoder, ids):
    _, model, ours = decoder
    mask = padding("left")
    assert torch.equal(generate(ours, ids, mask, num_beams=2), generate(model, ids, mask, num_beams=2))


@pytest.mark.parametrize("decoder", ["llama", "gemma3", "llama4"], indirect=True)  # one of each kind of cache and mask
def test_greedy_tokens_with_a_static_cache(decoder, ids):
    _, model, ours = decoder
    static = {"cache_implementation": "static"}
    for mask in (None, padding("left")):
        assert torch.equal(generate(ours, ids, mask, **static), generate(model, ids, mask, **static))


def test_gradient_checkpointing(decoder, ids):
    _, _, ours = decoder
    ours.train()
    gradients = []
    for checkpoint in (False, True):
        if checkpoint:
            ours.gradient_checkpointing_enable()
        ours.zero_grad()
        ours(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([p.grad for p in ours.parameters() if p.grad is not None])
    ours.gradient_checkpointing_disable()
    ours.zero_grad()
    ours.eval()
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, atol=1e-5, rtol=1e-4)


def test_a_prompt_in_parts_behind_caches(decoder, ids):
    name, model, ours = decoder
    for make in (
        lambda: transformers.DynamicCache(),
        lambda: transformers.DynamicCache(config=model.config),
        lambda: transformers.StaticCache(config=model.config, max_cache_len=40),
    ):
        caches = make(), make()
        for part in ids.split([3, 9, 1, 1, 12], dim=1):
            with torch.no_grad():
                expected, out = (
                    one(part, cache=cache).logits for one, cache in zip((model, ours), caches, strict=True)
                )
            torch.testing.assert_close(out, expected, atol=1e-4, rtol=0, msg=name)


def check_pair(model, inputs, mask=None, field="last_hidden_state"):
    ours = copy.deepcopy(model)
    ours.set_attn_implementation("atb")
    with torch.no_grad(), record_choices() as choices:
        out = getattr(ours(**inputs), field)
    assert choices, "attention did not come through this library"
    assert_close(out, getattr(model(**inputs), field).detach(), mask)
    return ours


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_bert(ids, side):
    config = transformers.BertConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"})
    mask = padding(side)
    check_pair(build(transformers.BertModel, config), {"input_ids": ids, "attention_mask": mask}, mask)


def test_cross_attention(ids):
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    config = transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    states = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(1))
    real = torch.ones(2, 9, dtype=torch.long)
    real[1, 6:] = 0
    inputs = {"input_ids": ids, "encoder_hidden_states": states, "encoder_attention_mask": real}
    check_pair(build(transformers.BertModel, config), inputs)


def test_a_decoder_whose_modules_do_not_say_that_they_are_causal(ids):
    config = transformers.BigBirdPegasusConfig(
        vocab_size=97, d_model=48, decoder_layers=2, decoder_ffn_dim=64, decoder_attention_heads=4
    )
    model = build(transformers.BigBirdPegasusForCausalLM, config)
    assert not model.model.decoder.layers[0].self_attn.is_causal
    check_pair(model, {"input_ids": ids}, field="logits")


def test_position_bias(ids):
    config = transformers.T5Config(
        vocab_size=97, d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0, decoder_start_token_id=0
    )
    mask = padding("right")
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :9]}
    check_pair(build(transformers.T5Model, config), inputs)


@pytest.mark.parametrize("name", ["vit", "siglip", "clip"])
def test_vision(name):
    config_class, cls = {
        "vit": (transformers.ViTConfig, transformers.ViTModel),
        "siglip": (transformers.SiglipVisionConfig, transformers.SiglipVisionModel),
        "clip": (transformers.CLIPVisionConfig, transformers.CLIPVisionModel),
    }[name]
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    check_pair(build(cls, config_class(**VISION)), {"pixel_values": pixels})


def test_clip_text_and_image(ids):
    text = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    config = transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=24)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    mask = padding("right")
    ids = ids.clone()
    ids[:, -6] = 2
    inputs = {"input_ids": ids, "pixel_values": pixels, "attention_mask": mask}
    for field in ("text_embeds", "image_embeds"):
        check_pair(build(transformers.CLIPModel, config), inputs, field=field)


def tiny(name, **changes):
    config_class, own = DECODERS[name]
    model = build(transformers.AutoModelForCausalLM, config_class(**{**SIZES, **own, **changes}))
    model.set_attn_implementation("atb")
    return model


def test_a_window_reaches_the_kernel_and_no_square_mask_is_made(ids, monkeypatch, caplog):
    monkeypatch.setattr(transformers_masks, "_LOGGED", set())
    model = tiny("mistral")
    seen = []
    monkeypatch.setattr(
        model.model.layers[0].self_attn, "forward", watched(model.model.layers[0].self_attn.forward, seen)
    )
    with torch.no_grad(), record_choices() as choices:
        model(ids, attention_mask=padding("right"))
    (mask,) = seen
    assert isinstance(mask, StructuredMask) and mask.window == (6, None) and mask.causal
    held = [value for value in vars(mask).values() if isinstance(value, torch.Tensor)]
    assert [tensor.numel() for tensor in held] == [2 * LENGTH]
    ((_, choice),) = [(key, value) for key, value in choices.items() if key[0] == "attention"]
    assert choice.spec.window == (6, None) and choice.spec.is_causal
    assert choice.traits.num_kv_heads == 2 and choice.traits.mask_elements == 2 * LENGTH
    with torch.no_grad(), record_choices() as choices:
        model(ids)
    assert all(choice.traits.mask == "none" for key, choice in choices.items() if key[0] == "attention")
    assert not caplog.records


def watched(forward, seen):
    def wrapper(*args, **kwargs):
        seen.append(kwargs["attention_mask"])
        return forward(*args, **kwargs)

    return wrapper


def test_a_prepared_mask_of_four_axes_is_passed_on(ids):
    model = tiny("llama")
    every_other = torch.ones(LENGTH, LENGTH).tril().bool() & (torch.arange(LENGTH) % 2 == 0)
    with torch.no_grad():
        out = model(ids, attention_mask=every_other[None, None].expand(2, 1, -1, -1)).logits
        bias = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~every_other, torch.finfo(torch.float32).min)
        added = model(ids, attention_mask=bias).logits
        model.set_attn_implementation("eager")
        expected = model(ids, attention_mask=bias).logits
    assert_close(out, expected)
    assert_close(added, expected)


def test_packed_by_cu_seq_lens(ids):
    model = tiny("mistral")
    places = packed_positions()[:1]
    starts = torch.tensor([0, LENGTH - 16, LENGTH - 13, LENGTH])
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 13, "max_length_k": 13}
    with torch.no_grad():
        out = model(ids[:1], position_ids=places, use_cache=False, **packed).logits
        assert_close(out, model(ids[:1], position_ids=places, use_cache=False).logits)
        wrong = {**packed, "cu_seq_lens_q": torch.tensor([0, 5, 9, LENGTH])}
        with pytest.raises(ValueError, match="cu_seq_lens_q is \\[0, 5, 9, 26\\]; position_ids say"):
            model(ids[:1], position_ids=places, use_cache=False, **wrong)


def test_dropout(ids):
    model = tiny("llama", attention_dropout=0.3).train()
    torch.manual_seed(0)
    first = model(ids).logits
    assert not torch.allclose(first, model(ids).logits)
    assert torch.isfinite(first).all()


def test_a_decoder_made_bidirectional(ids):
    model = tiny("llama", is_causal=False)
    with torch.no_grad():
        out = model(ids, use_cache=False).logits
        model.set_attn_implementation("eager")
        assert_close(out, model(ids, use_cache=False).logits)


def test_attention_weights_are_refused(ids):
    with pytest.raises(ValueError, match="output_attentions is given, and attn_implementation='atb' cannot serve it"):
        tiny("llama")(ids, output_attentions=True)


def test_compiled_model(ids):
    model = tiny("mistral")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert_close(compiled(ids, use_cache=False).logits, expected)
