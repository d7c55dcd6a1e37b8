"""The pages of one sequence, on the host; a launch gets those of all rows."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jspec.engine.block_kind import NULL_PAGE, BlockKind
from jspec.engine.block_pool import BlockPool

Tables = tuple[np.ndarray, ...]  # int32 [B, M] for each kind of layers


@dataclasses.dataclass
class BlockTable:
    """The pages of one sequence; without a pool it has and needs none."""

    pool: BlockPool | None
    salt: str = ""
    # By kind of layers, in order of the text; the null page if unseen.
    pages: list[list[int]] = dataclasses.field(default_factory=list)
    # A digest for each full page of the text.
    digests: list[bytes] = dataclasses.field(default_factory=list)
    _num_shared: int = 0  # pages of a kind that were cached before
    _num_cached: int = 0  # pages of a kind that were shared or cached

    def allocate(
        self, text: np.ndarray, *, reads_cached: bool = True, spare: int = 0
    ) -> int | None:
        """Have pages to begin with a text [n], cached ones first; return the tokens of these.

        None: there are not enough, or less than ``spare`` would be left; nothing changes then.
        """
        if self.pool is None:
            return 0
        pool, count = self.pool, self.num_cached_pages(text) if reads_cached else 0
        self.pages = [kind.cached(self.digests[:count]) for kind in pool.kinds]
        fresh = [kind.first_pages(len(text), count) - count for kind in pool.kinds]
        for kind, pages in zip(pool.kinds, self.pages, strict=True):
            kind.ref(pages)
        if not self._extend(fresh, spare):
            self.free()
            return None
        self._num_shared = self._num_cached = count
        pool.queries += len(text) - 1
        pool.hits += count * pool.size
        return count * pool.size

    def _extend(self, counts: Sequence[int], spare: int = 0) -> bool:
        """Have ``counts`` more pages by kind, so that ``spare`` are left; False changes nothing."""
        parts = [part for part in zip(self.pool.kinds, self.pages, counts, strict=True) if part[2]]
        if not all(kind.has_room(count + spare) for kind, _, count in parts):
            return False
        for kind, pages, count in parts:
            pages += kind.take(count)
        return True

    def follows(self, text: np.ndarray, others: Iterable["BlockTable"]) -> bool:
        """Return whether the next page that a waiting ``text`` could share is another one's."""
        if self.pool is None or not self.pool.shares_prefixes:
            return False
        count = self.num_cached_pages(text)
        if count >= self.pool.most_shared(len(text)):
            return False
        following = self.digests[count : count + 1]
        return any(each.digests[count : count + 1] == following for each in others)

    def grow(self, num_tokens: int) -> bool:
        """Have pages for a text of ``num_tokens``; return whether there were enough."""
        if self.pool is None:
            return True
        count = self.pool.pages_of(num_tokens)
        return self._extend([max(count - len(pages), 0) for pages in self.pages])

    def lacks(self, num_tokens: int) -> bool:
        """Return whether a text of ``num_tokens`` would need more pages."""
        if self.pool is None:
            return False
        return any(self.pool.pages_of(num_tokens) > len(pages) for pages in self.pages)

    def advance(self, text: np.ndarray, num_tokens: int) -> None:
        """Cache the full pages of the first ``num_tokens`` of a text, which the caches hold.

        Free those that no later query sees.
        """
        if self.pool is None:
            return
        first = last = self._num_cached
        if self.pool.shares_prefixes and num_tokens // self.pool.size > first:
            self.pool.add_digests(self.digests, text, self.salt)
            last = max(min(num_tokens // self.pool.size, len(self.digests)), first)
        self._num_cached = last
        for kind, pages in zip(self.pool.kinds, self.pages, strict=True):
            for page in range(first, last):
                kind.cache(pages[page], self.digests[page])
            unseen = kind.unseen(num_tokens)
            begin = unseen
            while begin and pages[begin - 1] != NULL_PAGE:
                begin -= 1
            kind.free(pages[begin:unseen][::-1])  # the start of the text first
            pages[begin:unseen] = [NULL_PAGE] * (unseen - begin)

    def new_snapshot(self, text: np.ndarray, num_tokens: int) -> int | None:
        """Return the number of a snapshot to be made behind the first ``num_tokens`` of a text.

        None: there is one, or none is made there.
        """
        pool = self.pool
        if pool is None or not pool.is_end_of_snapshot(num_tokens, len(text)):
            return None
        page = num_tokens // pool.size
        return pool.snapshots.add(self.digests[page - 1]) if page <= len(self.digests) else None

    def snapshot_of_end(self, text: np.ndarray, num_cached: int) -> int | None:
        """Return the number of a snapshot to be made behind the last page of a text that ended.

        None: there is one, or none is made. ``num_cached`` are the tokens that all caches hold; one
        that holds more may have passed the next page's end.
        """
        if self.pool is None or self.pool.snapshots is None:
            return None
        page = (len(text) - 1) // self.pool.size
        if page != num_cached // self.pool.size or not 0 < page <= len(self.digests):
            return None
        return self.pool.snapshots.add(self.digests[page - 1])

    def snapshot(self, num_tokens: int) -> int | None:
        """Return the number of the snapshot behind the first ``num_tokens``; None without states.

        They are those of ``allocate``.
        """
        if not num_tokens or self.pool.snapshots is None:
            return None
        return self.pool.snapshots.find(self.digests[num_tokens // self.pool.size - 1])

    @property
    def _parts(self) -> Iterable[tuple[BlockKind, list[int]]]:
        return () if self.pool is None else zip(self.pool.kinds, self.pages, strict=False)

    def evict(self) -> None:
        """Have no later sequence share the pages that this one filled."""
        for kind, pages in self._parts:
            kind.evict(pages[self._num_shared :])
        if self.pool is not None and self.pool.snapshots is not None:
            self.pool.snapshots.drop(self.digests[self._num_shared :])

    def free(self, *, is_clean: bool = True) -> None:
        """Free all pages; unless ``is_clean``, they may hold NaN."""
        for kind, pages in self._parts:
            kind.free(pages, is_clean=is_clean)
        self.pages, self._num_shared, self._num_cached = [], 0, 0

    def num_cached_pages(self, text: np.ndarray) -> int:
        """Return the number of cached pages of each kind that a text [n] begins with."""
        if self.pool is None or not self.pool.shares_prefixes:
            return 0
        self.pool.add_digests(self.digests, text, self.salt)
        return self.pool.num_cached(self.digests[: self.pool.most_shared(len(text))])


def rows_of(
    tables: Sequence[BlockTable | None], pool: BlockPool | None, capacity: int
) -> Tables | None:
    """Return the pages of the rows for texts of up to ``capacity`` tokens; None without a pool."""
    if pool is None:
        return None
    shape = len(tables), pool.pages_of(capacity)
    arrays = tuple(np.full(shape, NULL_PAGE, np.int32) for _ in pool.kinds)
    for row, table in enumerate(tables):
        for array, pages in zip(arrays, [] if table is None else table.pages, strict=False):
            array[row, : len(pages)] = pages
    return arrays
