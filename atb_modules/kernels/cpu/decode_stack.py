"""One token through all layers of a model in one native call: the layers' plans in a row, and what they share."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from . import library, structs
from .decode_layer import DecodeLayerPlan


class DecodeStackPlan:
    """The layers of a model, run one after the other without a return to Python between them.

    Args:
        plans: one a layer, in order; they come to share one workspace.
        rotary_of: for each layer, the number of the rotary tables it takes.
        group_of: for each layer, the number of the slots and the block table it takes.
    """

    def __init__(self, plans: Sequence[DecodeLayerPlan], rotary_of: Sequence[int], group_of: Sequence[int]) -> None:
        if not plans or not len(plans) == len(rotary_of) == len(group_of):
            raise ValueError(
                f"plans, rotary_of and group_of have {len(plans)}, {len(rotary_of)} and {len(group_of)} entries; "
                "allowed: one a layer, at least one"
            )
        self.plans = tuple(plans)
        self.max_batch = min(plan.max_batch for plan in plans)
        count, rotaries, groups = len(plans), max(rotary_of) + 1, max(group_of) + 1
        self._layers = (structs.DecodeArgs * count)()
        self._rotary_of = (ctypes.c_int32 * count)(*rotary_of)
        self._group_of = (ctypes.c_int32 * count)(*group_of)
        self._cos, self._sin = ((ctypes.c_void_p * rotaries)() for _ in range(2))
        self._slots, self._tables = ((ctypes.c_void_p * groups)() for _ in range(2))
        self._max_blocks = (ctypes.c_int64 * groups)()
        self._function = library.get().atb_decode_stack
        address = ctypes.addressof
        self._args = structs.DecodeStackArgs(
            address(self._layers),
            address(self._rotary_of),
            address(self._group_of),
            None,
            address(self._cos),
            address(self._sin),
            address(self._slots),
            address(self._tables),
            address(self._max_blocks),
        )
        self._args.count = count
        self._reference = ctypes.byref(self._args)
        self._threads = 0

    def _prepare(self, threads: int) -> None:
        for index, plan in enumerate(self.plans):
            plan.share_workspace(self.plans[0])
            self._layers[index] = plan.arguments
        self._threads = threads

    def run(
        self,
        hidden: Tensor,
        rotary_tables: Sequence[tuple[Tensor, Tensor]],
        slots: Sequence[Tensor],
        block_tables: Sequence[Tensor],
        kv_lengths: Tensor,
    ) -> None:
        """Updates hidden (batch, hidden_size) float32 in place; trusts its inputs, see ``DecodeLayerPlan.run``.

        ``rotary_tables`` are pairs of cos and sin by number, ``slots`` and ``block_tables`` one a layer group.
        """
        batch, threads = hidden.shape[0], torch.get_num_threads()
        if batch > self.max_batch:
            raise ValueError(f"hidden must have at most max_batch {self.max_batch} rows, got {batch}")
        if threads != self._threads:
            self._prepare(threads)
        for index, (cos, sin) in enumerate(rotary_tables):
            self._cos[index], self._sin[index] = cos.data_ptr(), sin.data_ptr()
        for index, (slot, table) in enumerate(zip(slots, block_tables, strict=True)):
            self._slots[index], self._tables[index] = slot.data_ptr(), table.data_ptr()
            self._max_blocks[index] = table.shape[1]
        args = self._args
        args.hidden, args.kv_lengths = hidden.data_ptr(), kv_lengths.data_ptr()
        args.batch, args.threads = batch, threads
        self._function(self._reference)
