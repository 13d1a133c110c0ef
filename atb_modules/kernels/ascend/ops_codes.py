"""int8 pages on NPUs: written and read by operators on the device alone, so that a decode step waits for nothing.

torch_npu has no operator that writes codes under a scale for each page and head. What it takes to write them is the
plain PyTorch of ``kernels/torch/cache.py`` without what makes the host wait there: which pages are touched, and by
whom, is known to the host where a cache's step said so, and is found by comparing the tokens of a step with each other
where nobody said it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atb_modules.kernels.ascend.derived import derived
from atb_modules.kernels.host_values import freeze, host_values, known_values, upload
from atb_modules.kernels.pages import QuantizedPages
from atb_modules.kernels.torch.cache import needed_scales, write_codes

#: tokens that are compared with each other on the device; of more, the host asks for the slots
_MOST_COMPARED = 256


@dataclass(frozen=True, eq=False)
class Places:
    """Where the tokens of a step go; made for the first layer that writes to these slots, and kept for the others.

    Args:
        source: which tokens are written; one that is not stands for another that is, and writes the same again.
        page, offset: of each of them.
        touched: the pages that change, each as often as it has tokens where the host knows nothing.
        of: where in ``touched`` each token's page stands.
        members: (len(touched), n), the tokens of each page, repeated where there are fewer than n.
        held: how many tokens of each touched page stay.
        some: bool (), whether any token is written; None: yes.
    """

    source: Tensor
    page: Tensor
    offset: Tensor
    touched: Tensor
    of: Tensor
    members: Tensor
    held: Tensor
    some: Tensor | None = None


def append_codes(k: Tensor, v: Tensor, k_pages: QuantizedPages, v_pages: QuantizedPages, slots: Tensor) -> None:
    """``cache_append`` for codes, see ``QuantizedPages``: k, v (tokens, kv_heads, head_dim)."""
    size = k_pages.shape[2]
    places = derived(slots, ("places", size), lambda: _places(slots, size))
    if places is None:
        return
    where = places.page, places.offset, places.touched, places.of, places.held
    alike = k.shape == v.shape and k.dtype == v.dtype
    for sides in [((k, k_pages), (v, v_pages))] if alike else [((k, k_pages),), ((v, v_pages),)]:
        states = torch.stack([tensor for tensor, _ in sides]).index_select(1, places.source).float()
        needed = needed_scales(states)[:, places.members].amax(dim=2)
        write_codes(states, [pages for _, pages in sides], *where, needed, places.some)


def _places(slots: Tensor, size: int) -> Places | None:
    """None where nothing is written, and the host knows it."""
    if not slots.numel():
        return None
    values = None if torch.compiler.is_compiling() else known_values(slots)
    if values is None and slots.numel() <= _MOST_COMPARED:
        return _compared(slots, size)
    return _counted(np.asarray(host_values(slots)), size, slots.device)


def _compared(slots: Tensor, size: int) -> Places:
    """On the device, every token with every other."""
    own = torch.arange(slots.numel(), device=slots.device)
    written = slots >= 0
    last = torch.where(written, own, -1).amax()
    source = torch.where(written, own, last.clamp(min=0))
    taken = slots[source].clamp(min=0)
    page, offset = taken.div(size, rounding_mode="floor"), taken.remainder(size)
    together = page[:, None] == page
    members = torch.where(together, own, own[:, None])
    return Places(source, page, offset, page, own, members, offset[members].amin(dim=1), last >= 0)


def _counted(slots: np.ndarray, size: int, device: torch.device) -> Places | None:
    """On the host, in one upload."""
    source = np.nonzero(slots >= 0)[0]
    if not source.size:
        return None
    page, offset = slots[source] // size, slots[source] % size
    touched, of, counts = np.unique(page, return_inverse=True, return_counts=True)
    held = np.full(touched.size, size)
    np.minimum.at(held, of, offset)
    order, begins = np.argsort(of, kind="stable"), np.cumsum(counts) - counts
    members = order[begins[:, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1)]
    parts = [source, page, offset, touched, of, held, members.ravel()]
    there = upload(torch.from_numpy(np.concatenate(parts).astype(np.int64)), device)
    source, page, offset, touched, of, held, flat = there.split([part.size for part in parts])
    return Places(source, page, offset, touched, of, flat.view(members.shape), held)


def takes_codes(pages: QuantizedPages) -> bool:
    """Whether the fused attention reads these pages as they lie, one query a row.

    npu_fused_infer_attention_score_v2: where Q_S is 1, pages of int8 want a block_size in steps of 32, "up to 512"; the
    channels are asked to fill lines of 32 bytes, too, which the documentation says of longer queries.
    """
    return pages.codes.is_contiguous() and pages.shape[2] % 32 == 0 and pages.shape[3] % 32 == 0


def scales_by_token(pages: QuantizedPages, table: Tensor) -> Tensor:
    """float32 (rows, kv_heads, blocks * page_size): the scale of each token behind a block table (rows, blocks)."""
    rows, blocks = table.shape
    _, heads, size, _ = pages.shape
    scales = pages.scales[derived(table, "without -1", lambda: table.clamp(min=0))]
    spread = scales.transpose(1, 2).unsqueeze(-1).expand(rows, heads, blocks, size)
    return spread.contiguous().view(rows, heads, blocks * size)


def first_blocks(table: Tensor, longest: int, size: int) -> Tensor:
    """The columns of a block table that hold the ``longest`` row."""
    width = max(1, -(-longest // size))
    if width >= table.shape[1]:
        return table

    def cut() -> Tensor:
        columns = table[:, :width].contiguous()
        freeze(columns)  # what is made of it is kept, too
        return columns

    return derived(table, ("first blocks", width), cut)


def written_out(
    k_pages: QuantizedPages, v_pages: QuantizedPages, table: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of ``dtype`` with the values of those behind a block table (rows, blocks), and the table of these."""

    def numbered() -> tuple[Tensor, Tensor]:
        own = torch.arange(table.numel(), dtype=table.dtype, device=table.device).view(table.shape)
        renumbered = torch.where(table < 0, table, own)
        freeze(renumbered)
        return table.clamp(min=0).flatten(), renumbered

    taken, own = derived(table, "written out", numbered)
    k, v = ((p.codes[taken].float() * p.scales[taken][:, :, None, None]).to(dtype) for p in (k_pages, v_pages))
    return k, v, own
