"""Pages: KV caches as pools of pages that sequences take, share and give back.

A page holds the keys and values of ``size`` consecutive tokens, in the caches of the target and of
the drafter alike. The host owns the table of pages. It sends a copy with every launch, so no
program allocates memory.

A full page is known by a digest of all text that its entries depend on: up to its end, and for some
drafters the token after it. A sequence that begins with known pages shares them and prefills only
the rest. A free page stays known until it is taken again; the page freed first goes first.

If all layers have sliding windows, a sequence gives pages back as its text leaves them behind, and
shares those of a prefix that its first query sees. Models that mix layers keep all pages.
"""

import collections
import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import kv_cache
from jspec.core.types import Params
from jspec.engine.loop import DecodeState
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile, request_of
from jspec.util.messages import shown
from jspec.util.promotion import standard_promotion
from jspec.util.untouched import give_back_zeros
from jspec.util.values import is_whole

PAGE_SIZE = 64  # tokens: a block of the kernels, and as fast as 128 on a CPU
_NOBODY = 0  # the page that fills the rows of a table; it is never taken
_CLEARED = 16  # pages that one program clears


class PageTable:
    """The pages that are free, held or known; on the host.

    Args:
      count: pages, of which number 0 is nobody's.
      size: tokens of a page.
      window: tokens that a query sees at most, its own included; None for all.
    """

    def __init__(self, count: int, size: int, window: int | None = None):
        self.size, self.window = size, window
        self.holders = np.zeros(count, np.int32)  # sequences that hold a page
        # Of no sequence, the first freed first; values are not used.
        self._free = collections.OrderedDict.fromkeys(range(_NOBODY + 1, count))
        self._known: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}  # of the known pages
        self.unclean: set[int] = set()  # pages that may hold NaN: to be cleared when they are taken

    @property
    def num_free(self) -> int:
        """Pages that may be taken."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that sequences hold."""
        return len(self.holders) - 1 - len(self._free)

    def pages_of(self, num_tokens: int) -> int:
        """Return the number of pages for ``num_tokens`` tokens."""
        return -(-num_tokens // self.size)

    def unseen(self, num_tokens: int) -> int:
        """Return the number of pages that no query sees after a prefix of ``num_tokens``."""
        return 0 if self.window is None else max(num_tokens + 1 - self.window, 0) // self.size

    def add(self, count: int) -> None:
        """Add ``count`` free pages."""
        first = len(self.holders)
        self.holders = np.pad(self.holders, (0, count))
        self._free.update(dict.fromkeys(range(first, first + count)))

    def known(self, digests: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest prefix of ``digests`` whose seen pages are known.

        Nobody's page is in the place of those that are not seen.
        """
        pages = [self._known.get(digest, _NOBODY) for digest in digests]
        longest = first = 0  # page of a row of known ones
        for index, page in enumerate(pages):
            if page == _NOBODY:
                if self.window is None:
                    break
                first = index + 1
            elif first <= self.unseen((index + 1) * self.size):
                longest = index + 1
        start = self.unseen(longest * self.size)
        return [_NOBODY] * start + pages[start:longest]

    def hold(self, pages: Iterable[int]) -> None:
        """Count one more holder of known pages."""
        for page in filter(None, pages):
            self._free.pop(page, None)
            self.holders[page] += 1

    def take(self, count: int) -> list[int] | None:
        """Return ``count`` free pages for new tokens, which are then held; None if there are less.

        Known pages are forgotten as they are taken.
        """
        if len(self._free) < count:
            return None
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        self.forget_pages(pages)
        self.holders[pages] = 1
        return pages

    def drop(self, pages: Sequence[int], *, is_clean: bool = True) -> None:
        """Count one holder less of the pages of a sequence, the end of its text first.

        Unless ``is_clean``, they may hold NaN, as may those that a window has left behind.
        """
        for page in filter(None, reversed(pages)):
            self.holders[page] -= 1
            if not self.holders[page]:
                self._free[page] = None
            if not is_clean or self.window is not None:
                self.unclean.add(page)

    def learn(self, page: int, digest: bytes) -> None:
        """Know a page that is held and full; the first page of a text is kept."""
        if digest not in self._known and page not in self._digests:
            self._known[digest] = page
            self._digests[page] = digest

    def forget(self) -> None:
        """Know no page any more; sequences keep theirs."""
        self._known.clear()
        self._digests.clear()

    def forget_pages(self, pages: Iterable[int]) -> None:
        """Know these pages no more."""
        for page in pages:
            self._known.pop(self._digests.pop(page, b""), None)


def digests_of(
    text: np.ndarray,
    size: int,
    *,
    lookahead: int = 0,
    salt: str = "",
    so_far: Sequence[bytes] = (),
) -> list[bytes]:
    """Return the digests of the full pages of a text [n].

    A digest stands for the salt, all tokens up to the end of the page, and ``lookahead`` tokens
    after it, on which the entries of its last tokens depend. ``so_far`` are those of a prefix of
    the text.
    """
    digests = list(so_far)
    last = digests[-1] if digests else hashlib.blake2b(salt.encode(), digest_size=16).digest()
    for page in range(len(digests), (len(text) - lookahead) // size):
        tokens = text[page * size : (page + 1) * size + lookahead]
        tokens = np.asarray(tokens, "<i4").tobytes()
        last = hashlib.blake2b(last + tokens, digest_size=16).digest()
        digests.append(last)
    return digests


class Pool:
    """The pages of the caches of a target and a drafter. Engines of one plan may share it.

    Args:
      plan: static.
      params: weights.
      num_pages: pages to begin with, one of which is nobody's.
      page_size: tokens of a page.
      most: pages that the pool may grow to, by doubling, when they run out; None for ``num_pages``.
      enable_prefix_caching: whether sequences that begin alike share pages.
      dtype: of keys and values in pages; None for that of the caches.

    Raises:
      ValueError: a number is out of range, or the target or the drafter reads no pages.
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        *,
        num_pages: int,
        page_size: int = PAGE_SIZE,
        most: int | None = None,
        enable_prefix_caching: bool = True,
        dtype: jnp.dtype | None = None,
    ):
        check(plan)
        for name, value, least in (("page_size", page_size, 1), ("num_pages", num_pages, 2)):
            if not is_whole(value, least):
                raise ValueError(f"{name}={shown(value)} must be whole and at least {least}.")
        caches = _caches_of_page(plan, params, page_size, dtype)
        self._like = tuple(cache.layers for cache in caches)
        self._in_bits = jax.default_backend() == "cpu"
        self.buffers = self._allocate(num_pages)
        window = kv_cache.widest(cache.window for cache in caches)
        self.table = PageTable(num_pages, page_size, window)
        self.most = num_pages if most is None else most
        self._lookahead = plan.drafter.lookahead
        self.shares_prefixes = enable_prefix_caching and self._lookahead is not None
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()  # that take its pages
        self.queries = self.hits = 0  # tokens of prompts, and those of them that pages held

    def check_fit(self, num_tokens: int) -> None:
        """Refuse a text that would need more pages than there can be."""
        needed, most = self.table.pages_of(num_tokens), self.most - 1
        if needed > most:
            raise ValueError(
                f"prompt and max_tokens are {num_tokens} tokens together, which need {needed} "
                f"pages of {self.table.size}, but the KV cache has at most {most}; shorten one of "
                "them, or give the cache more memory."
            )

    def take(self, count: int, spare: int = 0) -> list[int] | None:
        """Return ``count`` free pages, with ``spare`` left; grow if needed; None if impossible."""
        missing = count + spare - self.table.num_free
        if missing > 0 and not self.reserve(len(self.table.holders) + missing):
            return None
        pages = self.table.take(count)
        self._clear(pages or [])
        return pages

    def _clear(self, pages: Sequence[int]) -> None:
        """Clear the unclean ones of ``pages``: attention multiplies hidden slots by 0, NaN too."""
        unclean = sorted(self.table.unclean.intersection(pages))
        self.table.unclean.difference_update(unclean)
        for first in range(0, len(unclean), _CLEARED):
            ids = np.full(_CLEARED, _NOBODY, np.int32)
            ids[: len(unclean) - first] = unclean[first : first + _CLEARED]
            self.buffers = _cleared(self.buffers, ids)

    def reserve(self, count: int) -> bool:
        """Have at least ``count`` pages; return False if there cannot be as many."""
        old = wanted = len(self.table.holders)
        while wanted < count and wanted < self.most:
            wanted = min(2 * wanted, self.most)  # few sizes, since each is compiled
        if wanted > old:
            try:
                self.buffers = jax.block_until_ready(_extended(self.buffers, wanted))
            except jax.errors.JaxRuntimeError:  # out of memory: these pages are all there will be
                self.most = old
                return False
            self.table.add(wanted - old)
        return wanted >= count

    def fix(self, count: int) -> None:
        """Have ``count`` pages, or as many as there may be, and never more.

        Each number of pages has programs of its own. No sequence may hold a page now; known pages
        are forgotten.
        """
        self.most = max(len(self.table.holders), min(self.most, count))
        self.table.add(self.most - len(self.table.holders))
        self.renew()
        self.buffers = _cleared(self.buffers, np.full(_CLEARED, _NOBODY, np.int32))  # compile it
        # The process holds the memory of a page from its first use on.
        give_back_zeros(jax.block_until_ready(self.buffers))

    def lend(self, state: DecodeState) -> DecodeState:
        """Return ``state`` with the buffers, for a program that consumes it."""
        return state.replace(pools=self.buffers)

    def take_back(self, state: DecodeState) -> DecodeState:
        """Keep the buffers that a program returned; return the state without them."""
        self.buffers = state.pools
        return state.replace(pools=())

    @property
    def is_lost(self) -> bool:
        """True if a program that failed has consumed the buffers."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.buffers))

    def renew(self) -> None:
        """Allocate the buffers anew; no sequence may hold a page. Known pages are forgotten."""
        self.buffers = ()  # before the new ones: memory may be short
        self.buffers = self._allocate(len(self.table.holders))
        self.table.forget()
        self.table.unclean.clear()

    def digests_of(self, text: np.ndarray, salt: str, so_far: Sequence[bytes] = ()) -> list[bytes]:
        """Return ``digests_of`` for these pages."""
        options = dict(lookahead=self._lookahead, salt=salt, so_far=so_far)
        return digests_of(text, self.table.size, **options) if self.shares_prefixes else []

    def shared(self, text: np.ndarray, digests: Sequence[bytes]) -> list[int]:
        """Return known pages that ``text`` [n] begins with.

        At least one token is left for the prefill, since some drafters start from its features.
        """
        return self.table.known(digests[: self.most_shared(text)])

    def most_shared(self, text: np.ndarray) -> int:
        """Return the number of pages that ``text`` [n] may share."""
        return max(len(text) - 2, 0) // self.table.size

    @property
    def usage(self) -> float:
        """The share of the pages that there may be that sequences hold."""
        return self.table.num_used / max(self.most - 1, 1)

    def _allocate(self, num_pages: int) -> tuple[Any, ...]:
        allocate = lambda: tuple(
            kv_cache.allocate_pool(layers, num_pages, self._in_bits) for layers in self._like
        )
        return jax.jit(allocate)()


@dataclasses.dataclass
class Holding:
    """The pages of one sequence; without a ``pool``, it has and needs none."""

    pool: Pool | None
    salt: str = ""
    pages: list[int] = dataclasses.field(default_factory=list)  # in order; nobody's if unseen
    _digests: list[bytes] = dataclasses.field(default_factory=list)  # of the full pages of the text
    _num_shared: int = 0  # pages that were known before
    _num_known: int = 0  # pages that were shared or learned

    def begin(self, text: np.ndarray, *, reads_known: bool = True, spare: int = 0) -> int | None:
        """Take pages for a text [n], known ones first; return the number of tokens that these hold.

        None: there are not enough, or less than ``spare`` would be left; nothing is taken then.
        """
        if self.pool is None:
            return 0
        table, size = self.pool.table, self.pool.table.size
        self._digests = self.pool.digests_of(text, self.salt, self._digests)
        known = self.pool.shared(text, self._digests) if reads_known else []
        table.hold(known)
        taken = self.pool.take(table.pages_of(len(text)) - len(known), spare)
        if taken is None:
            table.drop(known)
            return None
        self.pages, self._num_shared, self._num_known = known + taken, len(known), len(known)
        self.pool.queries += len(text) - 1
        self.pool.hits += len(known) * size
        return len(known) * size

    def follows(self, text: np.ndarray, others: Iterable["Holding"]) -> bool:
        """Return whether another sequence will know the next page that ``text`` could share."""
        if self.pool is None or not self.pool.shares_prefixes:
            return False
        self._digests = self.pool.digests_of(text, self.salt, self._digests)
        num_known = len(self.pool.shared(text, self._digests))
        if num_known == self.pool.most_shared(text):
            return False
        following = self._digests[num_known]
        return any(each._digests[num_known : num_known + 1] == [following] for each in others)

    def grow(self, num_tokens: int) -> bool:
        """Have pages for a text of ``num_tokens``; return whether there were enough."""
        if self.pool is None:
            return True
        missing = self.pool.table.pages_of(num_tokens) - len(self.pages)
        taken = self.pool.take(max(missing, 0))
        self.pages += taken or []
        return taken is not None

    def lacks(self, num_tokens: int) -> bool:
        """Return whether a text of ``num_tokens`` would need more pages."""
        return self.pool is not None and self.pool.table.pages_of(num_tokens) > len(self.pages)

    def advance(self, text: np.ndarray, num_cached: int) -> None:
        """Know the pages in the first ``num_cached`` tokens of a text, which caches hold.

        Give those back that no later query sees.
        """
        if self.pool is None:
            return
        if self.pool.shares_prefixes:
            self._learn(text, num_cached)
        count = self.pool.table.unseen(num_cached)
        self.pool.table.drop(self.pages[:count][::-1])  # the start of the text first
        self.pages[:count] = [_NOBODY] * count

    def _learn(self, text: np.ndarray, num_cached: int) -> None:
        count = num_cached // self.pool.table.size
        if count > self._num_known:
            self._digests = self.pool.digests_of(text, self.salt, self._digests)
            count = min(count, len(self._digests))
            for page in range(self._num_known, count):
                self.pool.table.learn(self.pages[page], self._digests[page])
            self._num_known = count

    def forget(self) -> None:
        """Have no later sequence share the pages that this one filled."""
        if self.pool is not None:
            self.pool.table.forget_pages(self.pages[self._num_shared :])

    def release(self, *, is_clean: bool = True) -> None:
        """Give all pages back; unless ``is_clean``, they may hold NaN."""
        if self.pool is not None:
            self.pool.table.drop(self.pages, is_clean=is_clean)
        self.pages, self._num_shared, self._num_known = [], 0, 0


def table_of(holdings: Sequence[Holding | None], pool: Pool | None, capacity: int):
    """Return the pages of the rows for texts of up to ``capacity`` tokens, int32 [B, M]."""
    if pool is None:
        return None
    table = np.full((len(holdings), pool.table.pages_of(capacity)), _NOBODY, np.int32)
    for row, holding in enumerate(holdings):
        pages = [] if holding is None else holding.pages
        table[row, : len(pages)] = pages
    return table


def reads_pages(plan: Plan) -> bool:
    """Return whether target and drafter read caches with pages."""
    return plan.target.reads_pages and plan.drafter.reads_pages


def check(plan: Plan) -> None:
    """Refuse a plan whose caches cannot have pages."""
    if not reads_pages(plan):
        part = plan.drafter if plan.target.reads_pages else plan.target
        raise ValueError(
            f"{type(part).__name__} reads no KV cache with pages; run it without a pool."
        )


def page_layers(
    plan: Plan, params: Params, size: int, dtype: jnp.dtype | None = None
) -> tuple[Any, ...]:
    """Return the shapes of one page in each cache of target and drafter."""
    return tuple(cache.layers for cache in _caches_of_page(plan, params, size, dtype))


def _caches_of_page(
    plan: Plan, params: Params, size: int, dtype: jnp.dtype | None
) -> list[kv_cache.KVCache]:
    request, _ = request_of([None], Profile(), plan.target.vocab_size)
    caches = lambda: kv_cache.caches_of(
        (plan.target.init_cache(1, size), plan.drafter.init(params, request, size))
    )
    # Drafters may allocate more slots than asked for, but all caches share the table of pages.
    shape = lambda like: (*like.shape[:2], size, *like.shape[3:])
    stored = lambda like: jax.ShapeDtypeStruct(shape(like), dtype or like.dtype)
    return [
        cache.replace(layers=jax.tree.map(stored, cache.layers)) for cache in jax.eval_shape(caches)
    ]


def page_bytes(plan: Plan, params: Params, size: int, dtype: jnp.dtype | None = None) -> int:
    """Return the bytes of one page in all caches."""
    leaves = jax.tree.leaves(page_layers(plan, params, size, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@functools.partial(jax.jit, static_argnames="count")
@standard_promotion
def _extended(buffers: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    grow = lambda pool: jnp.pad(pool, ((0, count - len(pool)), *[(0, 0)] * (pool.ndim - 1)))
    return jax.tree.map(grow, buffers)


@functools.partial(jax.jit, donate_argnames="buffers")
def _cleared(buffers: tuple[Any, ...], pages: np.ndarray) -> tuple[Any, ...]:
    return jax.tree.map(lambda pool: pool.at[pages].set(0), buffers)
