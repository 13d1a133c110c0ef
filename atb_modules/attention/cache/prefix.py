"""Prefix index: finds pages whose whole history of tokens equals a new prompt's.

The index is a trie of full pages. The key of a page is (its parent in the trie, its token ids as a tuple,
the images that begin in it), and the key of a root is (salt, adapter): two pages are equal only when
everything before them is equal too. Token ids are compared themselves, not a hash of them, so that
two prompts can never be taken for each other; images are compared by the SHA-256 of their whole content
with dtype and shape.

Nodes live in one flat dict by number, so that a deep prompt copies (`copy.deepcopy`) without recursion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

PrefixImage = tuple[int, "Tensor | bytes"]
"""(index of the first placeholder token of an image, its content as pixels or bytes)."""

_RootKey = tuple[str | None, str | None]
_NodeKey = tuple["int | _RootKey", tuple[int, ...], tuple[tuple[int, bytes], ...]]


@dataclass
class PrefixNode:
    """One registered page of tokens: where it hangs, and its page id in each layer group (-1: not kept)."""

    key: _NodeKey
    pages: list[int]
    children: set[int] = field(default_factory=set)


def image_digest(content: Tensor | bytes) -> bytes:
    """SHA-256 of the whole image, with dtype and shape for a tensor."""
    digest = hashlib.sha256()
    if isinstance(content, Tensor):
        data = content.detach().to("cpu").contiguous()
        digest.update(f"tensor {data.dtype} {tuple(data.shape)} ".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(content, bytes):
        digest.update(b"bytes ")
        digest.update(content)
    else:
        raise TypeError(f"image content is a Tensor or bytes, got {type(content).__name__}")
    return digest.digest()


class PrefixIndex:
    """Trie of registered pages; page ids are those of the pools of the cache that owns the index."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.nodes: dict[int, PrefixNode] = {}
        self._by_key: dict[_NodeKey, int] = {}
        self._next_id = 0

    def keys(
        self,
        tokens: Sequence[int],
        images: Sequence[PrefixImage],
    ) -> list[tuple[tuple[int, ...], tuple[tuple[int, bytes], ...]]]:
        """The part of each full page's key that does not depend on the trie."""
        size = self.page_size
        full = len(tokens) // size
        begins: dict[int, list[tuple[int, bytes]]] = {}
        for start, content in images:
            if not 0 <= start < len(tokens):
                raise ValueError(f"an image begins at token {start}, the prompt has {len(tokens)} tokens")
            begins.setdefault(start // size, []).append((start % size, image_digest(content)))
        return [(tuple(tokens[i * size : (i + 1) * size]), tuple(sorted(begins.get(i, ())))) for i in range(full)]

    def walk(
        self,
        tokens: Sequence[int],
        salt: str | None,
        adapter: str | None,
        images: Sequence[PrefixImage],
    ) -> list[PrefixNode]:
        """The registered nodes that the prompt's full pages run through, longest run from the start."""
        found: list[PrefixNode] = []
        parent: int | _RootKey = (salt, adapter)
        for page_tokens, page_images in self.keys(tokens, images):
            node_id = self._by_key.get((parent, page_tokens, page_images))
            if node_id is None:
                break
            found.append(self.nodes[node_id])
            parent = node_id
        return found

    def child(
        self,
        parent: int | _RootKey,
        tokens: tuple[int, ...],
        images: tuple[tuple[int, bytes], ...],
        groups: int,
    ) -> int:
        """The node for this page below `parent`, made when it does not exist (with no pages yet)."""
        key: _NodeKey = (parent, tokens, images)
        node_id = self._by_key.get(key)
        if node_id is None:
            node_id = self._next_id
            self._next_id += 1
            self._by_key[key] = node_id
            self.nodes[node_id] = PrefixNode(key, [-1] * groups)
            if isinstance(parent, int):
                self.nodes[parent].children.add(node_id)
        return node_id

    def drop(self, node_id: int) -> list[PrefixNode]:
        """Removes a node and all below it; returns what was removed."""
        removed: list[PrefixNode] = []
        parent = self.nodes[node_id].key[0]
        if isinstance(parent, int):
            self.nodes[parent].children.discard(node_id)
        stack = [node_id]
        while stack:
            node = self.nodes.pop(stack.pop())
            del self._by_key[node.key]
            stack.extend(node.children)
            removed.append(node)
        return removed

    def clear(self) -> None:
        self.nodes.clear()
        self._by_key.clear()
