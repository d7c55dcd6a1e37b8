"""The memory of KV caches: pools of pages that the programs of an engine read and write.

The host owns the tables of pages, one for each kind of layers. It sends copies with every launch,
so no program allocates memory.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import entries, kv_cache, paging
from jspec.core.entries import Entry
from jspec.core.types import Params
from jspec.engine.block_kind import NULL_PAGE, BlockKind, most_held
from jspec.engine.block_pool import BlockPool
from jspec.engine.chunks import TOTALS
from jspec.engine.loop import DecodeState
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile, request_of
from jspec.engine.snapshots import Snapshots, bytes_of_row
from jspec.sharding.channel import Replica, everywhere
from jspec.util.messages import shown
from jspec.util.promotion import standard_promotion
from jspec.util.untouched import give_back_zeros
from jspec.util.values import is_whole

PAGE_SIZE = 64  # tokens: a block of the kernels, and as fast as 128 on a CPU
_CLEARED = 16  # pages that one program clears
_LAUNCHES = 3  # of a sequence, before its pages come back: being read, running and next


class Pool(Replica):
    """The pages of the caches of a target and a drafter, for one engine at a time.

    Args:
      plan: static.
      params: weights.
      num_pages: pages of each kind of layers to begin with, one of which is the null page.
      page_size: tokens of a page.
      most: pages that the pool may grow to, by doubling, when they run out; None for ``num_pages``.
      most_windowed: most pages of layers with a window, if others have none; None for ``most``.
      enable_prefix_caching: whether sequences that begin alike share pages, if target and drafter
        can begin behind them (``without_prefix``).
      dtype: of keys and values in pages; None for that of the caches.
      most_snapshots: most copies of states behind prefixes, for targets with recurrent layers.

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
        most_windowed: int | None = None,
        enable_prefix_caching: bool = True,
        dtype: jnp.dtype | None = None,
        most_snapshots: int = 16,
    ):
        check(plan)
        for name, value, least in (("page_size", page_size, 1), ("num_pages", num_pages, 2)):
            if not is_whole(value, least):
                raise ValueError(f"{name}={shown(value)} must be whole and at least {least}.")
        caches = shapes_of(plan, params, page_size)
        self._allocate = functools.partial(
            allocate,
            caches,
            page_size=page_size,
            dtype=dtype,
            in_bits=jax.default_backend() == "cpu",
        )
        self._kinds = _kinds_of(caches)
        windows, most = paging.kinds(caches), num_pages if most is None else most
        mosts = dict.fromkeys(windows, most)
        if len(windows) > 1 and most_windowed is not None:
            mosts[windows[1]] = min(most, most_windowed)
        has_states = bytes_of_row(caches) > 0
        shares = enable_prefix_caching and not without_prefix(plan)
        shares = shares and (most_snapshots > 0 or not has_states)
        self.snapshots = Snapshots(caches, most_snapshots) if has_states and shares else None
        self.blocks = BlockPool(
            [
                BlockKind(
                    min(num_pages, mosts[window]),
                    page_size,
                    window=window,
                    reach=reach(plan),
                    most=mosts[window],
                    extend=functools.partial(self._extend, kind),
                )
                for kind, window in enumerate(windows)
            ],
            lookahead=plan.drafter.lookahead,
            shares_prefixes=shares,
            snapshots=self.snapshots,
        )
        self.buffers = self._allocate(self._counts)

    @property
    def keeps_states(self) -> bool:
        """True if snapshots are made of copies of states behind the last page's end."""
        return self.snapshots is not None and self.snapshots.has_copies

    @property
    def _counts(self) -> tuple[int, ...]:
        return tuple(kind.num_pages for kind in self.blocks.kinds)

    def fix(self, count: int) -> None:
        """Have ``count`` pages of each kind, or as many as there may be, and never more.

        Each number of pages has programs of its own. No sequence may have a page now; no page is
        cached then.
        """
        for kind in self.blocks.kinds:
            kind.most = max(kind.num_pages, min(kind.most, count))
            kind.add(kind.most - kind.num_pages)
        self.renew()
        for kind in range(len(self.blocks.kinds)):
            self._clear(kind, np.full(_CLEARED, NULL_PAGE, np.int32))  # compile it
        # The process holds the memory of a page from its first use on.
        give_back_zeros(jax.block_until_ready(self.buffers))

    def renew(self) -> None:
        """Allocate the buffers anew; no sequence may have a page. No page is cached then."""
        self._fill(self._counts)
        for kind in self.blocks.kinds:
            kind.reset()
        if self.snapshots is not None:
            self.snapshots.clear()

    def clean(self) -> None:
        """Clear the pages that sequences got since the last call and that may hold NaN."""
        for kind, blocks in enumerate(self.blocks.kinds):
            pages = blocks.pages_to_clear()
            for first in range(0, len(pages), _CLEARED):
                ids = np.full(_CLEARED, NULL_PAGE, np.int32)
                part = pages[first : first + _CLEARED]
                ids[: len(part)] = part
                self._clear(kind, ids)

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
        is_lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.buffers))
        return is_lost or (self.snapshots is not None and self.snapshots.is_lost)

    def _extend(self, kind: int, count: int) -> bool:
        """Have memory for ``count`` pages of a kind; return False if there is too little."""
        try:
            self._change(kind, lambda buffers: jax.block_until_ready(_extended(buffers, count)))
        except jax.errors.JaxRuntimeError:
            return False
        return True

    @everywhere
    def _fill(self, counts: tuple[int, ...]) -> None:
        if self.snapshots is not None:
            self.snapshots.free()
        self.buffers = ()  # before the new ones: memory may be short
        self.buffers = self._allocate(counts)

    @everywhere
    def _clear(self, kind: int, pages: np.ndarray) -> None:
        self._change(kind, lambda buffers: _cleared(buffers, pages))

    def _change(self, kind: int, function: Callable[[tuple[Entry, ...]], Any]) -> None:
        """Replace the buffers of one kind of layers."""
        layers, structure = jax.tree.flatten(self.buffers, is_leaf=_is_entry)
        mine = [index for index, each in enumerate(self._kinds) if each == kind]
        for index, entry in zip(mine, function(tuple(layers[i] for i in mine)), strict=True):
            layers[index] = entry
        self.buffers = structure.unflatten(layers)


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


def without_prefix(plan: Plan) -> str | None:
    """Return who cannot begin behind a cached prefix, by name; None if target and drafter can."""
    return type(plan.drafter).__name__ if plan.drafter.lookahead is None else None


def shapes_of(plan: Plan, params: Params, capacity: int) -> list[kv_cache.KVCache]:
    """Return the shapes of the caches of target and drafter for one row, the target's first."""
    request, _ = request_of([None], Profile(), plan.target.vocab_size)
    return jax.eval_shape(
        lambda: paging.caches_of(
            (plan.target.init_cache(1, capacity), plan.drafter.init(params, request, capacity))
        )
    )


def allocate(
    caches: Sequence[kv_cache.KVCache],
    num_pages: Sequence[int],
    page_size: int,
    dtype: jnp.dtype | None = None,
    *,
    in_bits: bool = False,
) -> tuple[Any, ...]:
    """Return empty pools for caches, which may be shapes; see ``paging.allocate_pool``."""

    def pools() -> tuple[Any, ...]:
        return entries.settled(
            tuple(
                paging.allocate_pool(cache, num_pages, page_size, dtype, in_bits=in_bits)
                for cache in caches
            )
        )

    return jax.jit(pools)()


def page_bytes(
    plan: Plan, params: Params, size: int, dtype: jnp.dtype | None = None
) -> tuple[int, ...]:
    """Return the bytes of a page of each kind of layers, on each device of the mesh that is set."""

    def of(_: int, leaf: Any) -> int:
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        return math.prod(shape) * leaf.dtype.itemsize

    return bytes_by_kind(plan, params, size, dtype, of)


def bytes_by_kind(
    plan: Plan,
    params: Params,
    size: int,
    dtype: jnp.dtype | None,
    of: Callable[[int, Any], int],
) -> tuple[int, ...]:
    """Return the bytes of a page of each kind of layers.

    ``of`` returns those of an array, from the number of its cache (0 for the target's) and its
    shape.
    """
    caches = shapes_of(plan, params, size)
    windows, kinds = paging.kinds(caches), iter(_kinds_of(caches))
    one_each = (1,) * len(windows)
    pools = entries.settled(jax.eval_shape(lambda: allocate(caches, one_each, size, dtype)))
    totals = [0] * len(windows)
    for number, pool in enumerate(pools):
        for entry in jax.tree.leaves(pool, is_leaf=_is_entry):
            totals[next(kinds)] += sum(of(number, leaf) for leaf in jax.tree.leaves(entry))
    return tuple(totals)


def reach(plan: Plan) -> int:
    """Return the tokens that a sequence may write before its pages behind a window are free."""
    return max(TOTALS[-1], _LAUNCHES * Profile().rounds * (plan.drafter.max_depth + 1))


def held_by_kind(plan: Plan, params: Params, size: int, num_tokens: int) -> tuple[int, ...]:
    """Return the most pages of each kind that a text of ``num_tokens`` holds at a time."""
    windows = paging.kinds(shapes_of(plan, params, size))
    return tuple(most_held(num_tokens, size, window, reach(plan)) for window in windows)


def _kinds_of(caches: Sequence[kv_cache.KVCache]) -> tuple[int, ...]:
    """Return the kind of each layer with pages, in the order of the buffers."""
    count = len(paging.kinds(caches))
    return tuple(
        cache.kind_of(layer) % count
        for cache in caches
        for layer, entry in enumerate(cache.layers)
        if entry.has_pages
    )


def _is_entry(x: Any) -> bool:
    return isinstance(x, Entry)


@functools.partial(jax.jit, static_argnames="count")
@standard_promotion
def _extended(buffers: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    grown = jax.tree.map(
        lambda pool: jnp.pad(pool, ((0, count - len(pool)), *[(0, 0)] * (pool.ndim - 1))), buffers
    )
    return entries.settled(grown)


@functools.partial(jax.jit, donate_argnames="buffers")
def _cleared(buffers: tuple[Any, ...], pages: np.ndarray) -> tuple[Any, ...]:
    cleared = jax.tree.map(lambda pool: pool.at[pages].set(0), buffers)
    return entries.settled(cleared)
