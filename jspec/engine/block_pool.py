"""The pages of KV caches, on the host: which are free, which sequences share, which are cached.

A page holds the keys and values of ``size`` consecutive tokens, in the caches of the target and of
the drafter alike. A full page is cached by a digest of all text that its entries depend on: up to
its end, and for some drafters the token after it. A sequence that begins with cached pages shares
them. A free page stays cached until it is allocated again; the page freed first goes first.

If all layers have sliding windows, a sequence frees pages as its text leaves them behind, and
shares those of a prefix that its first query sees. Models that mix layers keep all pages.
"""

import collections
import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

NULL_PAGE = 0  # the page that fills the rows of a table; it is never allocated


class BlockPool:
    """The pages that are free, allocated or cached.

    Args:
      count: pages, of which number 0 is the null page.
      size: tokens of a page.
      window: tokens that a query sees at most, its own included; None for all.
      lookahead: tokens after a page that its entries depend on; None if no prefix can be shared.
      shares_prefixes: whether sequences that begin alike share pages.
      most: pages that there may be, by doubling when they run out; None for ``count``.
      extend: allocates the memory for a number of pages; returns False if there is too little.
    """

    def __init__(
        self,
        count: int,
        size: int,
        *,
        window: int | None = None,
        lookahead: int | None = 0,
        shares_prefixes: bool = True,
        most: int | None = None,
        extend: Callable[[int], bool] = lambda _: True,
    ):
        self.size, self.window, self.most = size, window, count if most is None else most
        self.shares_prefixes = shares_prefixes and lookahead is not None
        self.ref_counts = np.zeros(count, np.int32)  # sequences that share a page
        self.queries = self.hits = 0  # tokens of prompts, and those of them that pages held
        self._lookahead, self._extend = lookahead or 0, extend
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

    @property
    def usage(self) -> float:
        """The share of the pages that there may be that sequences have."""
        return self.num_used / max(self.most - 1, 1)

    def pages_of(self, num_tokens: int) -> int:
        """Return the number of pages for ``num_tokens`` tokens."""
        return -(-num_tokens // self.size)

    def check_fit(self, num_tokens: int) -> None:
        """Refuse a text that would need more pages than there can be."""
        needed, most = self.pages_of(num_tokens), self.most - 1
        if needed > most:
            raise ValueError(
                f"prompt and max_tokens are {num_tokens} tokens together, which need {needed} "
                f"pages of {self.size}, but the KV cache has at most {most}; shorten one of "
                "them, or give the cache more memory."
            )

    def unseen(self, num_tokens: int) -> int:
        """Return the number of pages that no query sees after a prefix of ``num_tokens``."""
        return 0 if self.window is None else max(num_tokens + 1 - self.window, 0) // self.size

    def add(self, count: int) -> None:
        """Add ``count`` free pages."""
        first = self.num_pages
        self.ref_counts = np.pad(self.ref_counts, (0, count))
        self._free.update(dict.fromkeys(range(first, first + count)))

    def allocate(self, count: int, spare: int = 0) -> list[int] | None:
        """Return ``count`` free pages for new tokens, so that ``spare`` are left.

        They are evicted from the prefix cache. There will be more pages if needed. None: there
        cannot be as many.
        """
        missing = count + spare - self.num_free
        if missing > 0 and not self._grow(self.num_pages + missing):
            return None
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

    def cached(self, digests: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest prefix of ``digests`` whose seen pages are cached.

        The null page is in the place of those that are not seen.
        """
        pages = [self._cached.get(digest, NULL_PAGE) for digest in digests]
        longest = first = 0  # page of a row of cached ones
        for index, page in enumerate(pages):
            if page == NULL_PAGE:
                if self.window is None:
                    break
                first = index + 1
            elif first <= self.unseen((index + 1) * self.size):
                longest = index + 1
        start = self.unseen(longest * self.size)
        return [NULL_PAGE] * start + pages[start:longest]

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

    def most_shared(self, num_tokens: int) -> int:
        """Return the number of pages that a text may share.

        At least one token is left for the prefill, since some drafters start from its features.
        """
        return max(num_tokens - 2, 0) // self.size

    def add_digests(self, digests: list[bytes], text: np.ndarray, salt: str) -> None:
        """Add those of the new full pages of a text [n] to the ``digests`` of a prefix.

        A digest stands for the salt, all tokens up to the end of the page, and ``lookahead`` tokens
        after it, on which the entries of its last tokens depend.
        """
        last = digests[-1] if digests else hashlib.blake2b(salt.encode(), digest_size=16).digest()
        for page in range(len(digests), max(len(text) - self._lookahead, 0) // self.size):
            tokens = text[page * self.size : (page + 1) * self.size + self._lookahead]
            tokens = np.asarray(tokens, "<i4").tobytes()
            last = hashlib.blake2b(last + tokens, digest_size=16).digest()
            digests.append(last)
