"""The pages of the layers of one kind, on the host: which are free, shared or cached.

Layers without a window are a kind, and layers with one are another. If layers have a window, a
sequence has pages for what its next queries see and for what is written soon. It frees the others
as its text leaves them behind.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jspec.engine.chunks import TOTALS

NULL_PAGE = 0  # the page that fills the rows of a table; it is never allocated


def most_held(num_tokens: int, size: int, window: int | None, reach: int) -> int:
    """Return the most pages of ``size`` tokens that a text holds at a time; see ``BlockKind``."""
    pages = -(-num_tokens // size)
    return pages if window is None else min(pages, -(-(window + reach) // size) + 1)


class BlockKind:
    """The pages that are free, allocated or cached.

    Args:
      count: pages, of which number 0 is the null page.
      size: tokens of a page.
      window: tokens that a query sees at most, its own included; None for all.
      reach: tokens that a sequence may write before its pages behind the window are free.
      most: pages that there may be, by doubling when they run out; None for ``count``.
      extend: allocates the memory for a number of pages; returns False if there is too little.
    """

    def __init__(
        self,
        count: int,
        size: int,
        *,
        window: int | None = None,
        reach: int = TOTALS[-1],
        most: int | None = None,
        extend: Callable[[int], bool] = lambda _: True,
    ):
        self.size, self.window, self.most = size, window, count if most is None else most
        self.ref_counts = np.zeros(count, np.int32)  # sequences that share a page
        self._reach, self._extend = reach, extend
        # Pages of no sequence, the first freed first; values are not used.
        self._free = collections.OrderedDict.fromkeys(range(NULL_PAGE + 1, count))
        self._cached: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}  # digests of the cached pages
        self._unclean: set[int] = set()  # free pages that may hold NaN
        self._to_clear: list[int] = []  # allocated ones of these, until the device clears them

    @property
    def num_pages(self) -> int:
        """The number of pages, with the null page."""
        return len(self.ref_counts)

    @property
    def num_free(self) -> int:
        """Pages that may be allocated."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages of sequences."""
        return self.num_pages - 1 - len(self._free)

    def pages_of(self, num_tokens: int) -> int:
        """Return the number of pages for ``num_tokens`` tokens."""
        return -(-num_tokens // self.size)

    def most_held(self, num_tokens: int) -> int:
        """Return the most pages that a text of up to ``num_tokens`` holds at a time."""
        return most_held(num_tokens, self.size, self.window, self._reach)

    def first_pages(self, num_tokens: int, cached: int) -> int:
        """Return the pages that a text has before its prefill, if ``cached`` ones are shared.

        Behind a window these are the pages of the first pass.
        """
        pages = self.pages_of(num_tokens)
        return pages if self.window is None else min(pages, cached + self.pages_of(TOTALS[-1]))

    def unseen(self, num_tokens: int) -> int:
        """Return the number of pages that no query sees after a prefix of ``num_tokens``."""
        return 0 if self.window is None else max(num_tokens + 1 - self.window, 0) // self.size

    def add(self, count: int) -> None:
        """Add ``count`` free pages."""
        first = self.num_pages
        self.ref_counts = np.pad(self.ref_counts, (0, count))
        self._free.update(dict.fromkeys(range(first, first + count)))

    def has_room(self, count: int) -> bool:
        """Return whether ``count`` pages are free; there will be more pages if needed."""
        missing = count - self.num_free
        return missing <= 0 or self._grow(self.num_pages + missing)

    def take(self, count: int) -> list[int]:
        """Return ``count`` free pages for new tokens, evicted from the prefix cache."""
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        self.evict(pages)
        self.ref_counts[pages] = 1
        unclean = self._unclean.intersection(pages)
        self._unclean -= unclean
        self._to_clear += sorted(unclean)
        return pages

    def _grow(self, count: int) -> bool:
        """Have at least ``count`` pages; return False if there cannot be as many."""
        old = wanted = self.num_pages
        while wanted < count and wanted < self.most:
            wanted = min(2 * wanted, self.most)  # few sizes, since each is compiled
        if wanted > old:
            if not self._extend(wanted):
                self.most = old  # these pages are all there will be
                return False
            self.add(wanted - old)
        return wanted >= count

    def ref(self, pages: Iterable[int]) -> None:
        """Count one more sequence that shares cached pages."""
        for page in filter(None, pages):
            self._free.pop(page, None)
            self.ref_counts[page] += 1

    def free(self, pages: Sequence[int], *, is_clean: bool = True) -> None:
        """Count one sequence less of the pages of a text, whose end is freed first.

        Unless ``is_clean``, they may hold NaN, as may those that a window has left behind.
        """
        for page in filter(None, reversed(pages)):
            self.ref_counts[page] -= 1
            if not self.ref_counts[page]:
                self._free[page] = None
            if not is_clean or self.window is not None:
                self._unclean.add(page)

    def pages_to_clear(self) -> list[int]:
        """Return the allocated pages that may hold NaN, once: attention multiplies it by 0."""
        pages, self._to_clear = self._to_clear, []
        return pages

    # --------------------------------------------------------------------------- the prefix cache

    def prefixes(self, digests: Iterable[bytes]) -> Iterator[int]:
        """Yield the numbers of pages whose text a sequence can begin behind, ascending.

        Those that its first query sees are cached.
        """
        first = 0  # page of a row of cached ones
        for count, digest in enumerate(digests, 1):
            if digest not in self._cached:
                if self.window is None:
                    return
                first = count
            elif first <= self.unseen(count * self.size):
                yield count

    def cached(self, digests: Sequence[bytes]) -> list[int]:
        """Return the pages of a prefix of ``prefixes``; the null page for those not seen."""
        start = self.unseen(len(digests) * self.size)
        return [NULL_PAGE] * start + [self._cached[digest] for digest in digests[start:]]

    def cache(self, page: int, digest: bytes) -> None:
        """Cache a full page of a sequence; the first page of a text stays."""
        if digest not in self._cached and page not in self._digests:
            self._cached[digest] = page
            self._digests[page] = digest

    def evict(self, pages: Iterable[int]) -> None:
        """Cache these pages no more."""
        for page in pages:
            self._cached.pop(self._digests.pop(page, b""), None)

    def clear_cache(self) -> None:
        """Cache no page any more; sequences keep theirs."""
        self._cached.clear()
        self._digests.clear()

    def reset(self) -> None:
        """Start with new memory, in which no page is cached; no sequence may have a page."""
        self.clear_cache()
        self._unclean.clear()
        self._to_clear.clear()
