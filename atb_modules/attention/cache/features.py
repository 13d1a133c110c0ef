"""FeatureStore: what an encoder made of the images in a cache's prompts, so that none is encoded twice.

Pages hold whole runs of tokens, and an image seldom ends where a page does. Its last tokens are computed again for the
next question about it; their features are kept here, and the encoder does not run.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

from atb_modules.checks import check_int

Features = tuple[Tensor, tuple[Tensor, ...]]
"""(tokens (n, hidden), and the same for each layer that has features of its own)"""


class FeatureStore:
    """Features by the content of their image; those not asked for longest go first.

    They are one model's, with the weights that it had: after a change of weights call the cache's ``reset()``.

    Args:
        max_bytes: most memory that is held.
    """

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        check_int("max_bytes", max_bytes, 0, 2**62)
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Features] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes_used(self) -> int:
        return self._bytes

    def get(self, key: bytes) -> Features | None:
        """The features of an image, None where they are not kept."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, features: Features) -> None:
        """Keeps a copy, unless it alone is too large."""
        size = _bytes(features)
        if key in self._entries or size > self.max_bytes:
            return
        while self._bytes + size > self.max_bytes:
            self._bytes -= _bytes(self._entries.popitem(last=False)[1])
        tokens, layers = features
        self._entries[key] = tokens.detach().clone(), tuple(layer.detach().clone() for layer in layers)
        self._bytes += size

    def clear(self) -> None:
        self._entries.clear()
        self._bytes = 0


def _bytes(features: Features) -> int:
    return sum(part.numel() * part.element_size() for part in (features[0], *features[1]))
