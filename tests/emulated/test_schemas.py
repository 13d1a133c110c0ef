"""References beside torch_npu's own schemas, and calls traced under FakeTensor on ``npu:0``."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

from atb_modules.testing.npu import TensorSpec
from atb_modules.testing.npu.meta import BROKEN_META, has_meta
from atb_modules.testing.npu.references import find_reference, reference, reference_names

from .test_dry_run import CALLS


def overload(name):
    namespace, _, rest = name.partition("::")
    base, _, variant = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), variant or "default")


@pytest.mark.parametrize("name", reference_names())
def test_a_reference_takes_what_its_operator_takes(name):
    arguments = {argument.name: argument for argument in overload(name)._schema.arguments}
    function = find_reference(name)
    assert inspect.getdoc(function), "quotes the documentation"
    for parameter in inspect.signature(function).parameters.values():
        argument = arguments[parameter.name]
        if parameter.default is not inspect.Parameter.empty:
            assert parameter.default == argument.default_value or argument.default_value is None, parameter.name


@pytest.mark.parametrize("name", reference_names())
def test_a_reference_asks_for_what_its_operator_asks_for(name):
    known = inspect.signature(find_reference(name)).parameters
    for argument in overload(name)._schema.arguments:
        if argument.name not in known:
            assert argument.has_default_value() or argument.kwarg_only, f"{argument.name} must be known"


#: Operators of ATB that write into tensors they are given.
WITHOUT_META = {"paged_attention", "paged_attention_mla", "reshape_and_cache"}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_traced_under_fake_tensor(name):
    assert has_meta(CALLS[name][0].operator) == (name not in WITHOUT_META)
    if name in WITHOUT_META:
        return
    call = CALLS[name][0]
    with FakeTensorMode():
        build = lambda v: torch.empty(v.shape, dtype=v.dtype, device="npu:0") if isinstance(v, TensorSpec) else v  # noqa: E731
        args, kwargs = tree_map(build, (list(call.args), dict(call.kwargs)))
        results = tree_flatten(overload(call.operator)(*args, **kwargs))[0]
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    assert all(tensor.device.type == "npu" for tensor in tensors)


def test_broken_meta_kernels_are_still_broken():
    """A list of exceptions must not outlive what it excuses."""
    assert list(BROKEN_META) == ["npu::npu_geglu_grad"]
    x = torch.empty(2, 4, device="meta")
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        torch.ops.npu.npu_geglu_grad(x, torch.empty(2, 8, device="meta"), x)


def test_an_operator_has_one_reference():
    with pytest.raises(ValueError, match="a reference for npu::npu_swiglu is registered already"):
        reference("npu::npu_swiglu")(lambda: None)
