"""Book of one page pool: who refers to a page, which pages are free, which are kept for a prefix.

A pool knows nothing of tensors or sequences. A page is in one of three states:

* in use: at least one sequence refers to it;
* kept: no sequence refers to it, but the prefix index does, so that a later prompt can find it;
* free: nobody refers to it.

Kept pages count as available: they are given away, oldest first, once no free page is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class OutOfPagesError(RuntimeError):
    """The pool has too few pages for a request; the cache is left exactly as it was.

    Attributes:
        needed: pages a layer that the request asked for.
        available: pages a layer that could be handed out.
    """

    def __init__(self, needed: int, available: int, num_pages: int, what: str) -> None:
        super().__init__(
            f"{what} needs {needed} more page(s) a layer, {available} of num_pages={num_pages} are free; "
            "nothing was changed: free a sequence (leave, crop) or build the cache with more num_pages"
        )
        self.needed = needed
        self.available = available
        self.num_pages = num_pages
        self.what = what

    def __reduce__(self) -> tuple[type[OutOfPagesError], tuple[int, int, int, str]]:
        return type(self), (self.needed, self.available, self.num_pages, self.what)


@dataclass
class PagePool:
    """Reference counts and free list for `num_pages` page ids."""

    num_pages: int
    refs: list[int] = field(init=False)
    free: list[int] = field(init=False)
    kept: dict[int, None] = field(init=False)
    """Pages held by the prefix index alone, in the order in which they are given up."""
    node_of: dict[int, int] = field(init=False)
    """Registered page -> id of its node in the prefix index."""

    def __post_init__(self) -> None:
        self.refs = [0] * self.num_pages
        # Taken from the end: low page ids first, and the page freed last (still warm) before others.
        self.free = list(range(self.num_pages - 1, -1, -1))
        self.kept = {}
        self.node_of = {}

    @property
    def available(self) -> int:
        return len(self.free) + len(self.kept)

    @property
    def in_use(self) -> int:
        return self.num_pages - self.available

    def take_free(self) -> int:
        """A free page with one reference; the caller has made sure that there is one."""
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def oldest_kept(self) -> int:
        return next(iter(self.kept))

    def share(self, page: int) -> None:
        """One more sequence refers to `page`."""
        if self.refs[page] == 0:
            del self.kept[page]
        self.refs[page] += 1

    def release(self, page: int) -> None:
        """One sequence less refers to `page`."""
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if page in self.node_of:
                self.kept[page] = None
            else:
                self.free.append(page)

    def register(self, page: int, node: int) -> None:
        """The prefix index refers to `page`, which a sequence holds now, through `node`."""
        self.node_of[page] = node

    def unregister(self, page: int) -> None:
        """The prefix index no longer refers to `page`."""
        del self.node_of[page]
        if self.refs[page] == 0:
            del self.kept[page]
            self.free.append(page)
