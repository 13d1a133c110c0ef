"""``EmulatedNPU``: inside this mode, operators on ``npu:`` tensors compute.

torch_npu's schemas, argument parsing and autograd formulas stay in front; behind them, operators of ``npu::`` and
``atb::`` run the references of this package, and all else runs on the CPU over the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from atb_modules.kernels.ascend.socs import Soc, find_soc
from atb_modules.testing.npu.aliases import alias, is_npu, to_device
from atb_modules.testing.npu.binding import bind, call_reference, calling
from atb_modules.testing.npu.boot import boot, booted
from atb_modules.testing.npu.errors import HostSyncError, NoReferenceError
from atb_modules.testing.npu.meta import check_against_meta
from atb_modules.testing.npu.oplog import OperatorCall, OperatorLog
from atb_modules.testing.npu.placement import check_placement
from atb_modules.testing.npu.randomness import drawing, random_generator
from atb_modules.testing.npu.references import find_reference

_EMULATED = ("aten::", "npu::", "atb::", "prims::", "prim::", "_c10d_functional::", "c10d::")
#: Work of the host on a tensor's description or its memory: torch_npu's own code does it.
_ALLOCATIONS = {"aten::empty.memory_format", "aten::empty_strided", "aten::empty_like"}
_ALLOCATIONS |= {"aten::new_empty", "aten::new_empty_strided"}
_BOOKKEEPING = {"aten::detach", "aten::detach_", "aten::alias", "aten::lift_fresh", "aten::lift", "aten::record_stream"}
_BOOKKEEPING |= {"aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor"}
#: Composite operators that torch_npu takes apart itself; in inference mode they arrive here whole.
_TAKEN_APART = {"aten::scaled_dot_product_attention"}
_COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from"}
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_SEARCHES = {"aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}


class EmulatedNPU(TorchDispatchMode):
    """Compute on emulated NPU tensors, keep a log of it, and hold the operators to their documented rules.

    Args:
        check_meta: compare shapes and dtypes of each fused operator's results with torch_npu's Meta kernel.
        soc: whose rules hold, where they differ from those of the booted one; default the booted one.
        poison: fill fresh floating memory with NaN, so that a read before a write shows.

    Raises:
        NoReferenceError: inside, for an operator of torch_npu or ATB without a written reference.
        OperatorError: inside, for a call that the operator's documentation forbids.
    """

    def __init__(self, check_meta: bool = True, soc: str | Soc | None = None, poison: bool = True) -> None:
        super().__init__()
        here = self._booted = booted() or boot()
        self.check_meta = check_meta
        self.soc = here.soc if soc is None else soc if isinstance(soc, Soc) else find_soc(soc)
        self.poison = poison
        self.log = OperatorLog()
        self._syncs_forbidden = False

    @contextmanager
    def forbid_host_sync(self) -> Iterator[None]:
        """Inside, an operator that makes the host wait for the device raises HostSyncError.

        Waits for a stream, an event or the device, which are no operators, raise it when the block ends.
        """
        before, self._syncs_forbidden = self._syncs_forbidden, True
        waits = self._booted.host_waits()
        try:
            yield
        finally:
            self._syncs_forbidden = before
        if self._booted.host_waits() != waits:
            raise HostSyncError("the host waited for a stream, an event or the device")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = _device(args, kwargs)
        if device is None or torch._C._get_dispatch_mode(_FAKE) is not None:  # fake tensors: Meta kernels of torch_npu
            return func(*args, **kwargs)
        name = func._schema.name + ("." + func._schema.overload_name if func._schema.overload_name else "")
        if not name.startswith(_EMULATED):
            return self._run_own_kernel(func, name, args, kwargs)
        if name in _ALLOCATIONS:
            fresh = func(*args, **kwargs)
            if self.poison and fresh.is_floating_point() and fresh.numel():
                alias(fresh).fill_(float("nan"))
            return fresh
        if name in _TAKEN_APART:
            with self:
                return func._op_dk(torch._C.DispatchKey.AutogradPrivateUse1, *args, **kwargs)
        if name in _BOOKKEEPING or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if func.is_view:
            if not func._can_decompose():
                return func(*args, **kwargs)
            with self:  # a view or a copy, as with `to` and `reshape`: its parts tell
                return func.decompose(*args, **kwargs)
        return self._run(func, name, device, args, kwargs)

    def _run_own_kernel(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Somebody's own operator by its kernel for the device; without one, torch_npu falls back to the CPU."""
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        keys = ("PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
        falls_back = not any(has_kernel(name, key) for key in keys)
        if falls_back and self._syncs_forbidden:
            raise HostSyncError(f"{name} has no kernel for the device: it falls back to the CPU")
        with self:
            result = func._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **kwargs)
        self._note(func, name, args, kwargs, result, falls_back)
        return result

    def _run(self, func: Any, name: str, device: torch.device, args: Any, kwargs: Any) -> Any:
        given, layout = tree_flatten((args, kwargs))
        host = [alias(value) if is_npu(value) else value for value in given]
        host_args, host_kwargs = torch.utils._pytree.tree_unflatten(host, layout)
        stays = _to_host(host_kwargs)
        if self._syncs_forbidden and _waits(func, name, args, kwargs):
            raise HostSyncError(f"{name} makes the host wait for the device")
        result = self._compute(func, name, device, (args, kwargs), (host_args, host_kwargs))
        self._note(func, name, args, kwargs, result)
        pairs = [(there, here) for there, here in zip(given, host, strict=True) if is_npu(there)]
        for there, here in pairs:
            _grow(there, here)
        return tree_map(lambda value: _back(value, pairs, device) if not stays else value, result)

    def _compute(self, func: Any, name: str, device: torch.device, given: Any, host: Any) -> Any:
        reference = find_reference(name)
        if reference is None and name.startswith(("npu::", "atb::")):
            raise NoReferenceError(f"{name} has no reference in atb_modules.testing.npu.references")
        if reference is not None:
            with calling(name, self.soc):
                check_placement(name, bind(func._schema, *given))
                result = call_reference(reference, func._schema, bind(func._schema, *host))
            if self.check_meta and not name.startswith("aten::"):
                check_against_meta(func, name, given[0], given[1], result)
            return result
        args, kwargs = host
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = random_generator(kwargs.get("generator"), device)
            kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
            args = tuple(value for value in args if not isinstance(value, torch.Generator))
            with drawing(generator):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, result: Any, waits: bool = False) -> None:
        seen: dict[tuple[int, tuple[int, ...]], int] = {}
        for value in tree_flatten((args, kwargs, result))[0]:
            if isinstance(value, Tensor):
                seen[value.data_ptr(), tuple(value.shape)] = value.numel() * value.element_size()
        upload = name in _COPIES and not any(map(is_npu, _sources(name, args)))
        self.log.calls.append(OperatorCall(name, sum(seen.values()), waits or _waits(func, name, args, kwargs), upload))


def _device(args: Any, kwargs: Any) -> torch.device | None:
    """The NPU that a call runs on, and puts its results on; None where it touches none."""
    asked = kwargs.get("device")
    if asked is not None and torch.device(asked).type == "npu":
        return torch.device(asked)
    return next((value.device for value in tree_flatten((args, kwargs))[0] if is_npu(value)), None)


def _to_host(kwargs: dict[str, Any]) -> bool:
    """Point a ``device`` argument at the CPU; whether the caller meant the CPU."""
    asked = kwargs.get("device")
    if asked is None:
        return False
    kwargs["device"] = torch.device("cpu")
    return torch.device(asked).type != "npu"


def _sources(name: str, args: Any) -> tuple[Any, ...]:
    return args[1:2] if name == "aten::copy_" else args[:1]


def _waits(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Whether the host needs values from the device before it can go on."""
    if name in _COPIES:
        return _copy_waits(name, args, kwargs)
    if name in _SEARCHES:
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] or ())
    if name.startswith("aten::repeat_interleave"):
        return any(is_npu(value) for value in args[-1:]) and kwargs.get("output_size") is None
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def _copy_waits(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a copy between host and device waits: always, unless it is told not to and the host's memory is pinned.

    So does torch_npu's host code, in both directions, as the dry run shows; a copy to the host that makes its own
    result pins it.
    """
    into = name == "aten::copy_"
    source, target = (args[1], args[0]) if into else (args[0], None)
    there = target.device if target is not None else torch.device(kwargs.get("device") or source.device)
    if source.device.type == there.type:
        return False
    asked = kwargs.get("non_blocking") or (into and len(args) > 2 and args[2])
    host = source if source.device.type == "cpu" else target
    return not asked or (host is not None and not host.is_pinned())


def _grow(there: Tensor, here: Tensor) -> None:
    """Follow an ``out=`` tensor that the CPU resized."""
    if here.shape != there.shape:
        there.resize_(here.shape)
        if here.numel():
            alias(there).copy_(here)


def _back(value: Any, pairs: list[tuple[Tensor, Tensor]], device: torch.device) -> Any:
    """A result as the caller sees it: its own tensor for results in place, a view of it, or a new tensor."""
    if not isinstance(value, Tensor):
        return value
    for there, here in pairs:
        if value is here:
            return there
    if value.numel():
        memory = value.untyped_storage().data_ptr()
        for there, here in pairs:
            if here.numel() and here.untyped_storage().data_ptr() == memory:
                return torch.as_strided(there, value.shape, value.stride(), value.storage_offset())
    return to_device(value, device)
