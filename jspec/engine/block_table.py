"""The pages of one sequence, on the host; a launch gets those of all rows."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jspec.engine.block_pool import NULL_PAGE, BlockPool


@dataclasses.dataclass
class BlockTable:
    """The pages of one sequence; without a pool it has and needs none."""

    pool: BlockPool | None
    salt: str = ""
    pages: list[int] = dataclasses.field(default_factory=list)  # in order; the null page if unseen
    # A digest for each full page of the text.
    digests: list[bytes] = dataclasses.field(default_factory=list)
    _num_shared: int = 0  # pages that were cached before
    _num_cached: int = 0  # pages that were shared or cached
    _num_unseen: int = 0  # pages that were freed as the text left them behind

    def allocate(
        self, text: np.ndarray, *, reads_cached: bool = True, spare: int = 0
    ) -> int | None:
        """Have pages for a text [n], cached ones first; return the number of tokens of these.

        None: there are not enough, or less than ``spare`` would be left; nothing changes then.
        """
        if self.pool is None:
            return 0
        pool, cached = self.pool, self.cached_pages(text) if reads_cached else []
        pool.ref(cached)
        fresh = pool.allocate(pool.pages_of(len(text)) - len(cached), spare)
        if fresh is None:
            pool.free(cached)
            return None
        self.pages, self._num_unseen = cached + fresh, 0
        self._num_shared = self._num_cached = len(cached)
        pool.queries += len(text) - 1
        pool.hits += len(cached) * pool.size
        return len(cached) * pool.size

    def follows(self, text: np.ndarray, others: Iterable["BlockTable"]) -> bool:
        """Return whether the next page that a waiting ``text`` could share is another one's."""
        if self.pool is None or not self.pool.shares_prefixes:
            return False
        count = len(self.cached_pages(text))
        if count >= self.pool.most_shared(len(text)):
            return False
        following = self.digests[count : count + 1]
        return any(each.digests[count : count + 1] == following for each in others)

    def grow(self, num_tokens: int) -> bool:
        """Have pages for a text of ``num_tokens``; return whether there were enough."""
        if self.pool is None:
            return True
        missing = self.pool.pages_of(num_tokens) - len(self.pages)
        fresh = self.pool.allocate(missing) if missing > 0 else []
        self.pages += fresh or []
        return fresh is not None

    def lacks(self, num_tokens: int) -> bool:
        """Return whether a text of ``num_tokens`` would need more pages."""
        return self.pool is not None and self.pool.pages_of(num_tokens) > len(self.pages)

    def advance(self, text: np.ndarray, num_tokens: int) -> None:
        """Cache the full pages of the first ``num_tokens`` of a text, which the caches hold.

        Free those that no later query sees.
        """
        if self.pool is None:
            return
        if self.pool.shares_prefixes and num_tokens // self.pool.size > self._num_cached:
            self.pool.add_digests(self.digests, text, self.salt)
            count = min(num_tokens // self.pool.size, len(self.digests))
            for page in range(self._num_cached, count):
                self.pool.cache(self.pages[page], self.digests[page])
            self._num_cached = max(count, self._num_cached)
        first, count = self._num_unseen, self.pool.unseen(num_tokens)
        if count > first:
            self.pool.free(self.pages[first:count][::-1])  # the start of the text first
            self.pages[first:count] = [NULL_PAGE] * (count - first)
            self._num_unseen = count

    def evict(self) -> None:
        """Have no later sequence share the pages that this one filled."""
        if self.pool is not None:
            self.pool.evict(self.pages[self._num_shared :])

    def free(self, *, is_clean: bool = True) -> None:
        """Free all pages; unless ``is_clean``, they may hold NaN."""
        if self.pool is not None:
            self.pool.free(self.pages, is_clean=is_clean)
        self.pages, self._num_shared, self._num_cached, self._num_unseen = [], 0, 0, 0

    def cached_pages(self, text: np.ndarray) -> list[int]:
        """Return the cached pages that a text [n] begins with; the null page if unseen."""
        if self.pool is None or not self.pool.shares_prefixes:
            return []
        self.pool.add_digests(self.digests, text, self.salt)
        return self.pool.cached(self.digests[: self.pool.most_shared(len(text))])


def rows_of(
    tables: Sequence[BlockTable | None], pool: BlockPool | None, capacity: int
) -> np.ndarray | None:
    """Return the pages of the rows for texts of up to ``capacity`` tokens, int32 [B, M]."""
    if pool is None:
        return None
    rows = np.full((len(tables), pool.pages_of(capacity)), NULL_PAGE, np.int32)
    for row, table in enumerate(tables):
        pages = [] if table is None else table.pages
        rows[row, : len(pages)] = pages
    return rows
