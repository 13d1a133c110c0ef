"""A layer as a line of steps, each with what it reads and writes in device memory if it is a kernel of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from atb_modules.kernels.ascend.rules import is_310p
from atb_modules.kernels.ascend.socs import Soc
from atb_modules.optimize.planner.shapes import LayerShape


@dataclass(frozen=True)
class Buffer:
    """A tensor in device memory.

    Args:
        name: unique in a layer.
        elements, itemsize: how many, and bytes each.
        layout: "ND" (rows), or "NZ" (fractals of 16 x 16, what cube cores without a converter want).
        kept: whether it is an output of the layer, or state, and must be written whatever is fused.
    """

    name: str
    elements: int
    itemsize: int
    layout: str = "ND"
    kept: bool = False

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True)
class Step:
    """One step.

    Args:
        name: unique in a layer.
        kind: what the rules match: "norm", "matmul", "head_norm", "rotary", "append", "scores", "softmax", "values",
            "activation", "multiply", "add".
        reads, writes: buffers.
        operations: floating point operations.
        rows, width: of its output, as vector cores see it.
    """

    name: str
    kind: str
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    operations: float
    rows: int
    width: int


def layer_steps(shape: LayerShape, soc: Soc) -> tuple[Step, ...]:
    """The steps of a layer in order; on a chip whose cube cores want fractals, products read and write those."""
    build = _Builder(shape, "NZ" if is_310p(soc) else "ND")
    x = build.buffer("hidden states", shape.hidden_size)
    normed = build.norm("attention norm", x)
    attended = build.attention(normed)
    projected = build.matmul("output projection", attended, shape.hidden_size)
    stream = build.add("attention residual", projected, x)
    mixed = build.feed_forward(build.norm("mlp norm", stream))
    build.add("mlp residual", mixed, stream, kept=True)
    return tuple(build.steps)


class _Builder:
    def __init__(self, shape: LayerShape, product_layout: str) -> None:
        self.shape, self.layout = shape, product_layout
        self.size = shape.dtype.itemsize
        self.steps: list[Step] = []

    def buffer(self, name: str, width: int, layout: str = "ND", kept: bool = False, size: int = 0) -> Buffer:
        return Buffer(name, self.shape.tokens * width, size or self.size, layout, kept)

    def step(
        self, name: str, kind: str, reads: Iterable[Buffer], writes: Iterable[Buffer], operations: float, width: int
    ) -> None:
        self.steps.append(Step(name, kind, tuple(reads), tuple(writes), operations, self.shape.tokens, width))

    def norm(self, name: str, x: Buffer) -> Buffer:
        width = self.shape.hidden_size
        out = self.buffer(f"{name} output", width)
        weight = Buffer(f"{name} weight", width, self.size)
        self.step(name, "norm", (x, weight), (out,), 6.0 * out.elements, width)
        return out

    def add(self, name: str, branch: Buffer, stream: Buffer, kept: bool = False) -> Buffer:
        width = self.shape.hidden_size
        out = self.buffer(f"{name} output", width, kept=kept)
        self.step(name, "add", (branch, stream), (out,), 1.0 * out.elements, width)
        return out

    def matmul(self, name: str, x: Buffer, width: int, bias: bool = False) -> Buffer:
        inner = x.elements // self.shape.tokens
        out = self.buffer(f"{name} output", width, self.layout)
        reads = [x, Buffer(f"{name} weight", inner * width, self.size, self.layout)]
        if bias:
            reads.append(Buffer(f"{name} bias", width, self.size))
        self.step(name, "matmul", reads, (out,), 2.0 * self.shape.tokens * inner * width, width)
        return out

    def writes_parts(self, *parts: Buffer) -> None:
        """The last step's output is read in parts as it lies, without a copy."""
        self.steps[-1] = dataclasses.replace(self.steps[-1], writes=parts)

    def attention(self, normed: Buffer) -> Buffer:
        shape = self.shape
        q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        q, k, v = (self.buffer(name, w, self.layout) for name, w in (("q", q_width), ("k", kv_width), ("v", kv_width)))
        self.matmul("qkv projection", normed, q_width + 2 * kv_width, shape.bias)
        self.writes_parts(q, k, v)
        if shape.qk_norm:
            outs = tuple(Buffer(f"normed {b.name}", b.elements, self.size) for b in (q, k))
            self.step("head norms", "head_norm", (q, k), outs, 6.0 * sum(b.elements for b in outs), q_width + kv_width)
            q, k = outs
        if shape.rotary:
            outs = tuple(Buffer(f"rotated {b.name}", b.elements, self.size) for b in (q, k))
            angles = self.buffer("cosines and sines", shape.head_dim, size=4)
            self.step("rotary", "rotary", (q, k, angles), outs, 3.0 * sum(b.elements for b in outs), q_width + kv_width)
            q, k = outs
        if shape.cached:
            slots = self.buffer("slots", 1, size=8)
            pages = [self.buffer(f"pages of new {name}", kv_width, kept=True) for name in ("keys", "values")]
            self.step("cache append", "append", (k, v, slots), pages, 0.0, 2 * kv_width)
        seen = shape.batch * shape.kv_len * kv_width
        k, v = (Buffer(name, seen, self.size) for name in ("keys", "values"))
        pairs = shape.tokens * shape.num_heads * shape.kv_len
        scores, weights = Buffer("scores", pairs, 4), Buffer("weights", pairs, self.size)
        out = self.buffer("attended", q_width)
        products = 2.0 * pairs * shape.head_dim
        self.step("scores", "scores", (q, k), (scores,), products, shape.kv_len)
        self.step("softmax", "softmax", (scores,), (weights,), 5.0 * pairs, shape.kv_len)
        self.step("values", "values", (weights, v), (out,), products, q_width)
        return out

    def feed_forward(self, normed: Buffer) -> Buffer:
        shape, width = self.shape, self.shape.intermediate_size
        if not shape.gated:
            up = self.matmul("up projection", normed, width)
            active = self.buffer("activated", width)
            self.step("activation", "activation", (up,), (active,), 8.0 * active.elements, width)
            return self.matmul("down projection", active, shape.hidden_size)
        gate, up = (self.buffer(name, width, self.layout) for name in ("gate", "up"))
        self.matmul("gate and up projection", normed, 2 * width)
        self.writes_parts(gate, up)
        active, hidden = self.buffer("activated", width), self.buffer("gated", width)
        self.step("activation", "activation", (gate,), (active,), 8.0 * active.elements, width)
        self.step("gate product", "multiply", (active, up), (hidden,), 1.0 * hidden.elements, width)
        return self.matmul("down projection", hidden, shape.hidden_size)
