"""What ran on the emulated NPU: every launch with its bytes, every wait of the host for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

FUSED = ("npu::", "atb::", "atb_modules::")


@dataclass(frozen=True)
class OperatorCall:
    """One operator on the device.

    Args:
        name: with overload, "npu::npu_rms_norm" or "aten::add.Tensor".
        bytes: of all tensors that it read and wrote, each counted once.
        host_sync: whether the host had to wait for its result.
        upload: whether it copied from the host to the device.
    """

    name: str
    bytes: int
    host_sync: bool = False
    upload: bool = False


@dataclass
class OperatorLog:
    """Calls in order. Views, allocations and other work without a launch are not in it."""

    calls: list[OperatorCall] = field(default_factory=list)

    def __iter__(self) -> Iterator[OperatorCall]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def clear(self) -> None:
        self.calls.clear()

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    @property
    def fused(self) -> list[str]:
        """Names of the operators of torch_npu, ATB and this library, in order."""
        return [call.name for call in self.calls if call.name.startswith(FUSED)]

    @property
    def host_syncs(self) -> list[str]:
        return [call.name for call in self.calls if call.host_sync]

    @property
    def uploads(self) -> list[str]:
        return [call.name for call in self.calls if call.upload]

    def counts(self) -> dict[str, int]:
        """Launches by operator."""
        return dict(Counter(self.names))

    def bytes(self) -> dict[str, int]:
        """Bytes read and written by operator."""
        totals: Counter[str] = Counter()
        for call in self.calls:
            totals[call.name] += call.bytes
        return dict(totals)

    def __str__(self) -> str:
        counts, totals = self.counts(), self.bytes()
        rows = [f"{name:<44} {counts[name]:>6} {totals[name]:>14}" for name in sorted(counts, key=lambda n: -totals[n])]
        return "\n".join([f"{'operator (emulated)':<44} {'calls':>6} {'bytes':>14}", *rows])
