"""SmolLM2-135M-Instruct answers through our layers, then stands beside transformers. Exit status 1 without parity."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings

import torch

os.environ["TQDM_DISABLE"] = "1"
logging.getLogger("transformers").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

from transformers import AutoTokenizer, DynamicCache  # noqa: E402

import atb_modules as atb  # noqa: E402
from atb_modules.kernels.registry import Explanation, record_choices  # noqa: E402
from benchmarks import smollm2  # noqa: E402

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours of the rainbow.",
)
NEW_TOKENS = 48
PARITY_TOKENS = 64
PARITY_BOUND = 1e-3


def main() -> int:
    print(f"atb_modules {atb.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    path = smollm2.gguf_path()
    start = time.perf_counter()
    model = smollm2.ours()
    print(f"Loaded {path.name} as float32 in {time.perf_counter() - start:.1f} s (ours)")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts = [chat_prompt(tokenizer, question) for question in QUESTIONS]
    with record_choices() as choices:
        answer(model, tokenizer, prompts)
    start = time.perf_counter()
    peer = smollm2.theirs()
    print(f"\nLoaded the same file with transformers in {time.perf_counter() - start:.1f} s\n")
    print_choices(choices)
    print_speed(model, peer, prompts[0])
    return 0 if print_parity(model, peer, prompts) else 1


def chat_prompt(tokenizer, question: str) -> list[int]:
    """Token ids of one user turn in the model's own chat format."""
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer(text).input_ids


def answer(model, tokenizer, prompts: list[list[int]]) -> None:
    """Stream the answers, one question after the other."""
    for question, prompt in zip(QUESTIONS, prompts, strict=True):
        print(f"\n> {question}")
        tokens: list[int] = []
        shown = 0

        def stream(row: int, token: int, tokens: list[int] = tokens) -> None:
            nonlocal shown
            tokens.append(token)
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            print(text[shown:], end="", flush=True)
            shown = len(text)

        model.generate(prompt, max_new_tokens=NEW_TOKENS, on_token=stream)
        print()


def print_choices(choices: dict[tuple[str, str], Explanation]) -> None:
    """Which kernel served each op, and why not the others."""
    print("Which kernel served each op, and what spoke against the others:")
    for (op, strategy), table in choices.items():
        others = []
        for line in table.rows:
            if not line.chosen:
                others.append(f"{line.strategy}: {'; '.join(line.reasons) or 'predicted slower'}")
        print(f"  {op:<18} {strategy:<8} {' | '.join(others)}")


@torch.inference_mode()
def print_speed(model, peer, prompt: list[int]) -> None:
    """Tokens per second and cache memory of both, interleaved in one run."""
    ids = torch.tensor([(prompt * 60)[:512]])
    ours, theirs = [], []
    cache = model.new_cache(1024)
    for _ in range(2):
        start = time.perf_counter()
        cache.reset()
        cache.begin(1)
        model(ids, past_key_values=cache)
        ours.append(time.perf_counter() - start)
        dynamic = DynamicCache(config=peer.config)
        start = time.perf_counter()
        peer(ids, past_key_values=dynamic)
        theirs.append(time.perf_counter() - start)
    from atb_modules.inference.plan import DecodeStep

    step, token = DecodeStep(model, cache), torch.tensor([[42]])
    step_times, peer_times = [], []
    for _ in range(24):
        start = time.perf_counter()
        step([42])
        step_times.append(time.perf_counter() - start)
        start = time.perf_counter()
        peer(token, past_key_values=dynamic)
        peer_times.append(time.perf_counter() - start)
    middle = len(step_times) // 2
    decode, peer_decode = 1 / sorted(step_times)[middle], 1 / sorted(peer_times)[middle]
    prefill, peer_prefill = 512 / min(ours), 512 / min(theirs)
    held = cache.memory_stats().bytes_used / 2**20
    padded = sum(t.numel() * t.element_size() for layer in dynamic.layers for t in (layer.keys, layer.values)) / 2**20
    print(f"\n{'512 tokens of past':<28}{'ours':>10}{'transformers':>14}{'ratio':>8}")
    print(f"{'prefill, tokens/s':<28}{prefill:>10.0f}{peer_prefill:>14.0f}{prefill / peer_prefill:>7.2f}x")
    print(f"{'decode, tokens/s':<28}{decode:>10.1f}{peer_decode:>14.1f}{decode / peer_decode:>7.2f}x")
    print(f"{'cache, MiB':<28}{held:>10.1f}{padded:>14.1f}")


def greedy(peer, ids: torch.Tensor) -> list[int]:
    """What transformers' model says next, token by token; past end tokens too, which its generate would suppress."""
    cache = DynamicCache(config=peer.config)
    tokens: list[int] = []
    for _ in range(PARITY_TOKENS):
        ids = peer(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    return tokens


@torch.inference_mode()
def print_parity(model, peer, prompts: list[list[int]]) -> bool:
    """Largest logit difference against transformers on every prompt, and the greedy tokens of the first."""
    difference = 0.0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        difference = max(difference, float((model(ids).logits - peer(ids).logits).abs().max()))
    mine = model.generate(prompts[0], max_new_tokens=PARITY_TOKENS, eos_token_ids=[])
    equal = mine[len(prompts[0]) :] == greedy(peer, torch.tensor([prompts[0]]))
    ok = difference < PARITY_BOUND and equal
    print(
        f"\nParity with transformers: {'holds' if ok else 'FAILS'} (largest logit difference {difference:.2e}, allowed "
        f"{PARITY_BOUND:.0e}; {PARITY_TOKENS} greedy tokens {'equal' if equal else 'DIFFER'})"
    )
    return ok


if __name__ == "__main__":
    sys.exit(main())
