"""The measured cost model behind AUTO: ``python -m benchmarks.cost_model fit | check``.

``fit`` times every kernel on random calls, and writes seconds an operation, a byte and a call of each kernel, dtype
and direction to ``atb_modules/kernels/rates/``, the file of this kind of processor. ``check`` draws other calls, times
every kernel that can serve them and says how often AUTO's choice is within a tenth of the fastest; a call in which it
is not is timed once more, so that a moment's other load does not count. Both want an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field

import numpy
import torch
from torch import Tensor

from atb_modules.attention.functional import attention
from atb_modules.attention.rope import rotary
from atb_modules.kernels import costs
from atb_modules.kernels.registry import explain_call, kernels
from atb_modules.linear import linear
from atb_modules.mlp.functional import gated_activation
from atb_modules.norm.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from atb_modules.spec import AttentionSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: never chosen: the oracle, and what compiles for seconds
UNTIMED = ("reference", "flex")
#: calls of a kernel below which its rates are not told apart
LEAST_SAMPLES = 6


@dataclass
class Call:
    """One call that several kernels can serve."""

    op: str
    what: str
    run: Callable[..., object]  # takes strategy
    leaves: list[Tensor]
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        explanation = explain_call(self.run)
        self.spec, self.traits = explanation.spec, explanation.traits
        self.chosen = explanation.chosen
        self.strategies = [r.strategy for r in explanation.rows if not r.reasons and r.strategy not in UNTIMED]

    def once(self, strategy: str) -> None:
        out = self.run(strategy=strategy)
        if self.traits.requires_grad:
            out = out[0] if isinstance(out, tuple) else out
            torch.autograd.grad(out, self.leaves, torch.ones_like(out))

    def measure(self, budget: float) -> None:
        """The lower quartile of interleaved rounds, which is what repeats on a machine that others use too.

        A strategy that is four times as slow as another one is timed no further.
        """
        times: dict[str, list[float]] = {strategy: [] for strategy in self.strategies}
        rounds, racing = 0, list(self.strategies)
        while rounds < 3 or (rounds < 60 and sum(map(sum, times.values())) < budget * len(racing)):
            for strategy in racing:
                if not rounds:
                    self.once(strategy)
                start = time.perf_counter()
                self.once(strategy)
                times[strategy].append(time.perf_counter() - start)
            rounds += 1
            if rounds >= 3:
                fastest = min(min(times[strategy]) for strategy in racing)
                racing = [strategy for strategy in racing if min(times[strategy]) < 4 * fastest]
        self.seconds = {strategy: float(numpy.quantile(values, 0.25)) for strategy, values in times.items()}


def calls(seed: int, count: int, part: str = "all") -> Iterator[Call]:
    """Random calls of every op, most of them of attention, or of "attention" or the "rows" ops alone."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for index in range(count):
        dtype = DTYPES[index % 3]
        grad = draw.random() < 0.35
        make = _attention if part == "attention" or (part == "all" and index % 5 < 3) else _row_ops
        call = make(draw, dtype, grad)
        if len(call.strategies) > 1:
            yield call


def _length(draw: random.Random, low: float, high: float) -> int:
    """Log-uniform."""
    return round(low * (high / low) ** draw.random())


def _tensor(*shape: int, dtype: torch.dtype, grad: bool) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


def _attention(draw: random.Random, dtype: torch.dtype, grad: bool) -> Call:
    kv_heads, group = draw.choice((1, 2, 3, 4, 8, 12)), draw.choice((1, 1, 1, 2, 4))
    dim = draw.choice((32, 64, 64, 80, 96, 128, 128))
    kv_len = _length(draw, 16, 3000)
    q_len = draw.choice((kv_len, kv_len, kv_len, 1, _length(draw, 1, kv_len)))
    kind = draw.choice(("full", "causal", "causal", "window", "window", "global", "packed", "mask", "bias", "blocks"))
    batch = 1 if kind == "packed" else draw.choice((1, 1, 2, 4, 16))
    while batch > 1 and batch * kv_heads * group * q_len * kv_len * dim > 1e9:
        batch //= 2
    if batch * kv_heads * group * q_len * kv_len * dim > 4e9:
        q_len = kv_len = 384
    spec, options = AttentionSpec(), {}
    width = _length(draw, 8, max(kv_len, 16))
    if kind == "causal":
        spec = AttentionSpec(causal=True)
    elif kind == "window":
        spec = AttentionSpec(causal=True, window=(width, None))
    elif kind == "global":
        spec = AttentionSpec(causal=True, window=(width, None), global_tokens=min(4, kv_len))
    elif kind == "packed":
        q_len = kv_len
        cuts = sorted(draw.sample(range(1, kv_len), min(draw.choice((1, 4, 16)), kv_len - 1)))
        starts = torch.tensor([0, *cuts, kv_len]).int()
        spec, options = AttentionSpec(causal=True), {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    elif kind == "mask":
        mask = torch.rand(batch, 1, q_len, kv_len) > 0.3
        mask[..., 0] = True
        options = {"mask": mask}
    elif kind == "bias":
        options = {"mask": torch.randn(1, kv_heads * group, q_len, kv_len)}
    elif kind == "blocks":
        size = draw.choice((32, 64, 128))
        live = torch.rand(1, 1, -(-q_len // size), -(-kv_len // size)) < draw.choice((0.1, 0.3, 0.6))
        spec, options = AttentionSpec(block_size=size), {"block_mask": live}
    q = _tensor(batch, kv_heads * group, q_len, dim, dtype=dtype, grad=grad)
    k, v = (_tensor(batch, kv_heads, kv_len, dim, dtype=dtype, grad=grad) for _ in range(2))
    what = f"{kind} {tuple(q.shape)} over {tuple(k.shape)[1:3]}, width {width}"
    return Call(
        "attention", what, lambda strategy="auto": attention(q, k, v, spec, strategy=strategy, **options), [q, k, v]
    )


def _row_ops(draw: random.Random, dtype: torch.dtype, grad: bool) -> Call:
    rows, width = _length(draw, 1, 3000), draw.choice((64, 192, 576, 768, 1024, 1536, 2048, 4096))
    x, y, weight, bias = (
        _tensor(*shape, dtype=dtype, grad=grad) for shape in ((rows, width), (rows, width), (width,), (width,))
    )
    what = f"({rows}, {width})"
    name = draw.choice(
        ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "gate", "linear", "linear", "rotary")
    )
    if name == "rms_norm":
        return Call(name, what, lambda strategy="auto": rms_norm(x, weight, strategy=strategy), [x, weight])
    if name == "add_rms_norm":
        return Call(name, what, lambda strategy="auto": add_rms_norm(x, y, weight, strategy=strategy), [x, y, weight])
    if name == "layer_norm":
        return Call(name, what, lambda strategy="auto": layer_norm(x, weight, bias, strategy=strategy), [x, weight])
    if name == "add_layer_norm":
        return Call(
            name, what, lambda strategy="auto": add_layer_norm(x, y, weight, bias, strategy=strategy), [x, y, weight]
        )
    if name == "gate":
        kind = draw.choice(("silu", "gelu", "gelu_tanh"))
        run = lambda strategy="auto": gated_activation(x, y, kind, strategy=strategy)  # noqa: E731
        return Call("gated_activation", f"{kind} {what}", run, [x, y])
    if name == "rotary":
        heads, dim = draw.choice((2, 8, 16)), draw.choice((32, 64, 128))
        z = _tensor(rows, heads, dim, dtype=dtype, grad=grad)
        angles = torch.rand(rows, dim // 2)
        layout = draw.choice(("half", "interleaved"))
        run = lambda strategy="auto": rotary(z, angles.cos(), angles.sin(), layout=layout, strategy=strategy)  # noqa: E731
        return Call("rotary", f"{tuple(z.shape)} {layout}", run, [z])
    out = draw.choice((64, 256, 768, 1536, 3072))
    while rows * width * out > 2e9:
        rows //= 2
    a = _tensor(rows, width, dtype=dtype, grad=grad)
    matrix = _tensor(out, width, dtype=dtype, grad=grad)
    run = lambda strategy="auto": linear(a, matrix, strategy=strategy)  # noqa: E731
    return Call("linear", f"{tuple(a.shape)} to {out}", run, [a, matrix])


Sample = tuple[list[float], float]  # what a call takes, and the seconds that it took


def sample(call: Call, strategy: str) -> tuple[str, Sample]:
    """The name of the rates that the kernel's call belongs to, and its sample."""
    kernel = next(k for k in kernels(call.op) if k.strategy.value == strategy)
    cost = kernel.full_cost(call.spec, call.traits)
    return costs.key(call.op, strategy, call.spec, call.traits), (list(astuple(cost)), call.seconds[strategy])


def fitted(samples: list[Sample]) -> list[float]:
    """Non-negative rates whose relative errors are small for most samples: outliers lose their weight."""
    table, seconds = (numpy.array(column) for column in zip(*samples, strict=True))
    scaled = table / seconds[:, None]
    size = numpy.maximum(numpy.abs(scaled).max(axis=0), 1e-30)
    weights = numpy.ones(len(seconds))
    for _ in range(8):
        rates = _non_negative(scaled / size * weights[:, None], weights)
        weights = 1.0 / numpy.sqrt(numpy.maximum(numpy.abs(scaled / size @ rates - 1.0), 0.05))
    return [float(rate) for rate in rates / size]


def _non_negative(table: numpy.ndarray, wanted: numpy.ndarray) -> numpy.ndarray:
    """Least squares over non-negative factors the best of all sets of them that are positive."""
    best, least = numpy.zeros(table.shape[1]), numpy.inf
    for chosen in itertools.product((False, True), repeat=table.shape[1]):
        columns = numpy.flatnonzero(chosen)
        if not len(columns):
            continue
        factors = numpy.linalg.lstsq(table[:, columns], wanted, rcond=None)[0]
        error = numpy.square(table[:, columns] @ factors - wanted).sum()
        if (factors >= 0).all() and error < least:
            best, least = numpy.zeros(table.shape[1]), error
            best[columns] = factors
    return best


def fit(count: int, seed: int, budget: float, part: str) -> None:
    """Writes the rates of every kernel that was timed often enough, and prints how far they are off."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    for call in calls(seed, count, part):
        call.measure(budget)
        for strategy in call.seconds:
            name, one = sample(call, strategy)
            samples[name].append(one)
    store(samples)


def store(samples: dict[str, list[Sample]]) -> None:
    file = costs.rates_file()
    stored = json.loads(file.read_text()) if file.exists() else {}
    for name, taken in samples.items():
        if len(taken) < LEAST_SAMPLES:
            continue
        rates = fitted(taken)
        errors = [abs(numpy.dot(rates, features) / seconds - 1) for features, seconds in taken]
        print(f"{name:<48} {len(taken):>4} calls, median error {numpy.median(errors):.0%}")
        stored[name] = [float(f"{rate:.4g}") for rate in rates]
    lines = ",\n".join(f' "{name}": {json.dumps(rates)}' for name, rates in sorted(stored.items()))
    file.write_text(f"{{\n{lines}\n}}\n")


def check(count: int, seed: int, budget: float) -> None:
    """Prints the share of calls in which AUTO's choice is within a tenth of the fastest, and the worst of them."""
    ratios = []
    for call in calls(seed, count):
        call.measure(budget)
        assert call.chosen is not None
        ratio = call.seconds[call.chosen] / min(call.seconds.values())
        if ratio > 1.1:
            call.measure(2 * budget)
            ratio = call.seconds[call.chosen] / min(call.seconds.values())
        ratios.append((ratio, call))
    good = sum(ratio <= 1.1 for ratio, _ in ratios)
    for ratio, call in sorted(ratios, key=lambda pair: -pair[0])[:40]:
        if ratio > 1.1:
            times = ", ".join(f"{s} {1e6 * t:.0f} us" for s, t in call.seconds.items())
            grad = " grad" if call.traits.requires_grad else ""
            print(f"{ratio:5.2f}  {call.op} {call.what} {call.traits.dtype}{grad}: {call.chosen}; {times}")
    print(f"AUTO within 10% of the fastest: {good} of {len(ratios)} calls ({good / len(ratios):.1%})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model", description=__doc__)
    parser.add_argument("action", choices=("fit", "check"))
    parser.add_argument("--calls", type=int, default=0, help="how many calls are drawn")
    parser.add_argument("--seed", type=int, default=None, help="of the calls; the two actions have different ones")
    parser.add_argument("--budget", type=float, default=0.05, help="seconds a call and strategy")
    parser.add_argument("--part", choices=("all", "attention", "rows"), default="all", help="what is fitted")
    arguments = parser.parse_args()
    if arguments.action == "fit":
        fit(arguments.calls or 900, 1 if arguments.seed is None else arguments.seed, arguments.budget, arguments.part)
    else:
        check(arguments.calls or 300, 2 if arguments.seed is None else arguments.seed, arguments.budget)
