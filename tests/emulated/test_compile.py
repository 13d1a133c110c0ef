"""torch.compile on an NPU: one graph of fused operators, without a break."""

from __future__ import annotations

import pytest
import torch

from atb_modules import TransformerLayer, ops
from atb_modules.kernels.pages import QuantizedPages
from atb_modules.spec import AttentionSpec
from atb_modules.testing.npu import EmulatedNPU


@pytest.fixture(autouse=True)
def fresh_compiler():
    """What one test compiled is nothing to the next."""
    torch.compiler.reset()


def compiled(function, *arguments):
    """(result, names of the operators in the one graph): traced as on an NPU, run on the emulated one."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)

        def run(*inputs):
            with EmulatedNPU():
                return graph(*inputs)

        return run

    out = torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    assert len(graphs) == 1
    return out, {str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"}


def on_device(*tensors):
    with EmulatedNPU():
        return [tensor.to("npu:0") for tensor in tensors]


@pytest.mark.parametrize("strategy", ["auto", "ascend"])
def test_a_norm(strategy):
    x, weight = torch.randn(5, 64), torch.rand(64)
    out, names = compiled(lambda x, w: ops.rms_norm(x, w, strategy=strategy), *on_device(x, weight))
    with EmulatedNPU():
        torch.testing.assert_close(out.cpu(), ops.rms_norm(x, weight), atol=1e-6, rtol=1e-5)
    assert any("npu_rms_norm" in name for name in names), names


def test_attention():
    q, k, v = torch.randn(3, 1, 4, 9, 16).half()
    spec = AttentionSpec(causal=True)
    with torch.no_grad():
        out, names = compiled(lambda *t: ops.attention(*t, spec, strategy="ascend")[0], *on_device(q, k, v))
    with EmulatedNPU():
        torch.testing.assert_close(out.cpu(), ops.attention(q, k, v, spec)[0], atol=2e-3, rtol=2e-3)
    assert any("npu_fused_infer_attention_score_v2" in name for name in names), names


def test_a_layer():
    torch.manual_seed(0)
    layer = TransformerLayer(64, 4, num_kv_heads=2, mode="inference")
    x = torch.randn(2, 9, 64)
    expected = layer(x)
    with EmulatedNPU():
        layer = layer.to("npu:0")
    out, names = compiled(layer, *on_device(x))
    with EmulatedNPU():
        torch.testing.assert_close(out.cpu(), expected, atol=2e-5, rtol=2e-5)
    for wanted in ("npu_rms_norm", "npu_add_rms_norm", "npu_fusion_attention", "npu_swiglu"):
        assert any(wanted in name for name in names), (wanted, names)


def test_writes_to_int8_pages_are_one_graph():
    """What a traced step writes is what it writes without: no look of the host at the slots."""

    def write(k, v, slots, *memory):
        k_pages, v_pages = QuantizedPages(*memory[:2]), QuantizedPages(*memory[2:])
        ops.cache_append(k, v, k_pages, v_pages, slots, strategy="ascend", trusted=True)
        return [part + 0 for part in memory]

    states = torch.randn(2, 3, 2, 8)
    memory = [torch.full((3, 2, 4, 8), 9, dtype=torch.int8), torch.full((3, 2), 0.5)] * 2
    slots = torch.tensor([1, 8, -1])
    here = [part.clone() for part in memory]
    ops.cache_append(*states, QuantizedPages(*here[:2]), QuantizedPages(*here[2:]), slots, strategy="reference")
    there, _ = compiled(write, *on_device(*states, slots, *(part.clone() for part in memory)))
    for mine, theirs in zip(there, here, strict=True):
        assert torch.equal(mine.cpu(), theirs)


def test_dropout_is_not_traced_into_the_fused_attention():
    """A graph would keep the seed of its mask, a number, and the backward would drop others than the forward."""
    q, k, v = on_device(*torch.randn(3, 2, 4, 9, 16))

    def drop(q, k, v, strategy="auto"):
        return ops.attention(q, k, v, AttentionSpec(causal=True), dropout_p=0.5, strategy=strategy)[0]

    _, names = compiled(drop, q, k, v)
    assert not any("npu_fusion_attention" in name for name in names), names
    with pytest.raises(Exception, match="which a traced graph would keep for ever"):
        compiled(lambda *tensors: drop(*tensors, strategy="ascend"), q, k, v)
