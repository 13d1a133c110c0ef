"""A token of a small llama of transformers after 4,096 others: our paged cache against DynamicCache, which copies."""

from __future__ import annotations

import copy

import torch
import transformers

from atb_modules.integrations.transformers import register
from atb_modules.integrations.transformers_cache import PagedCache
from benchmarks.timing import Row, interleave, row

PAST, STEPS = 4096, 24
#: a third of SmolLM2-135M: of its layers and of its vocabulary
SIZES = {
    "vocab_size": 16384,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def rows() -> list[Row]:
    """One sequence and four, against both attention implementations under DynamicCache."""
    register()
    config = transformers.LlamaConfig(**SIZES)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation("atb")
    return [line for batch in (1, 4) for line in _decode(ours, theirs, batch)]


@torch.inference_mode()
def _decode(ours: transformers.PreTrainedModel, theirs: transformers.PreTrainedModel, batch: int) -> list[Row]:
    prompt = torch.randint(SIZES["vocab_size"], (batch, PAST))
    paged = PagedCache(ours.config, PAST + 2 * STEPS, max_batch_size=batch)
    runs = {
        "PagedCache": (ours, paged),
        "DynamicCache, atb": (ours, transformers.DynamicCache(config=ours.config)),
        "DynamicCache, sdpa": (theirs, transformers.DynamicCache(config=theirs.config)),
    }
    for model, cache in runs.values():
        model(prompt, cache=cache, logits_to_keep=1)

    def token(model: transformers.PreTrainedModel, cache: transformers.Cache) -> torch.Tensor:
        return model(prompt[:, -1:], cache=cache).logits

    steps = {name: (lambda run=run: token(*run)) for name, run in runs.items()}
    times = interleave(steps, STEPS, warmup=4)
    name = f"transformers llama, a token of {batch} x {PAST}"
    return [row(name, times, peer, "> 1", ours="PagedCache") for peer in runs if peer != "PagedCache"]
