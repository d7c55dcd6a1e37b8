"""The memory of KV caches: how many pages an engine may have."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jspec import sharding
from jspec.core.types import Params
from jspec.core.weights import size_of, weights_of
from jspec.engine.pages import (
    PAGE_SIZE,
    Pool,
    held_by_kind,
    page_bytes,
    reads_pages,
    shapes_of,
    without_prefix,
)
from jspec.engine.plan import Plan
from jspec.engine.snapshots import bytes_of_row, most_within
from jspec.util.messages import shown

_CPU_BYTES = 4 * 2**30  # as vLLM's VLLM_CPU_KVCACHE_SPACE
_ACCELERATOR_SHARE = 0.9  # as vLLM's gpu_memory_utilization
_FIRST_BYTES = 2**27  # most of a pool that grows
_MEMINFO = Path("/proc/meminfo")
# The arguments of ``LLM`` that are those of ``pool_of``, where None is their default.
SETTINGS = (
    "block_size",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
)


@dataclasses.dataclass(frozen=True)
class Device:
    """The memory of a device, or of the machine for a CPU.

    Attributes:
      total: bytes that it has.
      free: bytes that a program may take; on an accelerator all of them.
      is_host: whether it is a CPU.
      sharing: virtual devices of the CPU, each of which has as much.
    """

    total: int
    free: int
    is_host: bool = False
    sharing: int = 1

    def bytes_for_pages(self, held: int, reserved: int, share: float | None) -> int:
        """Return the bytes that are left for a KV cache.

        Args:
          held: bytes of the weights.
          reserved: bytes that programs need beside weights and KV cache, on an accelerator.
          share: ``gpu_memory_utilization``; None for 0.9, or 4 GiB of cache on a CPU.
        """
        if share is None and self.is_host:
            return _CPU_BYTES // self.sharing
        most = int((share or _ACCELERATOR_SHARE) * self.total)
        most = most if self.is_host else min(most, self.total - reserved)
        return max(0, most - held)


def this_device(held: Any = (), sharing: int = 1) -> Device:
    """Return the memory of the first device here, of which the arrays of ``held`` count.

    Of a CPU it is the part of one device, if a model has ``sharing`` devices.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return Device(limit, limit)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = _MEMINFO.read_text().splitlines() if _MEMINFO.is_file() else []
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    arrays = [leaf for leaf in jax.tree.leaves(held) if isinstance(leaf, jax.Array)]
    free = min([total, *(each + bytes_of(arrays) for each in free)])
    sharing = min(sharing, jax.local_device_count())  # The others are on other machines.
    return Device(total // sharing, free // sharing, is_host=True, sharing=sharing)


def bytes_of(tree: Any) -> int:
    """Return the bytes of the arrays of a pytree, or of their shapes."""
    leaves = (leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))
    return sum(map(size_of, leaves))


def bytes_on_each(params: Any) -> int:
    """Return the bytes that the arrays of a pytree take on each of their devices."""
    leaves = (leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array))
    return sum(
        size_of(jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype))
        for leaf in leaves
    )


def dtype_of_pages(params: Params) -> jnp.dtype | None:
    """Return the dtype of keys and values in pages; None for that of the caches.

    A CPU computes in float32, but its pages are bfloat16 if most of the target's weights are.
    """
    weights = weights_of(params.target)
    largest = max(weights, key=lambda weight: math.prod(weight.shape), default=None)
    is_narrow = largest is not None and largest.dtype == jnp.bfloat16
    return jnp.dtype(jnp.bfloat16) if is_narrow else None


def most_windowed(held: Sequence[int], num_seqs: int) -> int:
    """Return the pages that layers with a window have at most, where others have none.

    Twice what ``num_seqs`` sequences hold, so that prefixes of past texts stay cached. ``held`` are
    the pages of one sequence by kind.
    """
    return 2 * num_seqs * held[-1] + 1


def num_pages(limit: int, each: Sequence[int], most_windowed: int) -> int:
    """Return the pages of the first kind of layers that fit into ``limit`` bytes with the others.

    Args:
      limit: bytes.
      each: bytes of a page, by kind.
      most_windowed: as of ``Pool``.
    """
    count = limit // sum(each) if any(each) else 2**20
    if len(each) > 1 and count > most_windowed:
        return (limit - most_windowed * each[1]) // each[0]
    return count


def pool_if_any(
    plan: Plan,
    params: Params,
    settings: dict[str, int | float | None],
    *,
    shares_prefixes: bool | None,
    num_tokens: int,
    num_seqs: int = 1,
    reserved: int = 0,
) -> Pool | None:
    """Return the pool of a model; None for a model whose caches have no pages.

    Args:
      plan: static.
      params: weights.
      settings: values of ``SETTINGS`` in their ranges.
      shares_prefixes: its ``enable_prefix_caching``; None wherever target and drafter support it.
      num_tokens: as of ``pool_of``.
      num_seqs: as of ``pool_of``.
      reserved: as of ``pool_of``.

    Raises:
      ValueError: as ``pool_of``, or something is set that the model has no use for.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    target, drafter = type(plan.target).__name__, type(plan.drafter).__name__
    if not reads_pages(plan):
        given |= {"enable_prefix_caching": True} if shares_prefixes else {}
        for name, value in given.items():
            raise ValueError(
                f"{name}={shown(value)} needs a KV cache with pages, which {target} with {drafter} "
                "does not have; leave it out."
            )
        return None
    part = without_prefix(plan) if shares_prefixes else None
    if part is not None:
        raise ValueError(
            f"enable_prefix_caching=True: {part} cannot start behind a cached prefix; leave it out."
        )
    shares = shares_prefixes is not False and not without_prefix(plan)
    return pool_of(
        plan,
        params,
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        reserved=reserved,
        enable_prefix_caching=shares,
        **given,
    )


def pool_of(
    plan: Plan,
    params: Params,
    *,
    num_tokens: int,
    num_seqs: int = 1,
    reserved: int = 0,
    block_size: int = PAGE_SIZE,
    num_gpu_blocks_override: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float | None = None,
    enable_prefix_caching: bool = True,
) -> Pool:
    """Return the pool of a model, under vLLM's names; all bytes are those of each device.

    A number of pages or bytes is allocated at once. Otherwise the pool grows as it is needed, up to
    4 GiB on a CPU, or the share ``gpu_memory_utilization`` of the device's memory that the weights
    leave (0.9 on an accelerator). Layers with a window get no more than ``most_windowed`` where
    others have none. Snapshots of recurrent states get a part of the bytes.

    Args:
      plan: static.
      params: weights.
      num_tokens: tokens that may run together: a pool that grows begins with no more.
      num_seqs: sequences that may run together.
      reserved: bytes that programs need beside weights and pages.
      block_size: tokens of a page.
      num_gpu_blocks_override: pages; it goes before the bytes.
      kv_cache_memory_bytes: bytes of all pages.
      gpu_memory_utilization: share of the device's memory for weights and pages.
      enable_prefix_caching: whether sequences that begin alike share pages.

    Raises:
      ValueError: the bytes do not suffice for one page, or the device has less memory than asked.
    """
    dtype = dtype_of_pages(params)
    each = page_bytes(plan, params, block_size, dtype)
    held = held_by_kind(plan, params, block_size, -(-num_tokens // num_seqs))
    windowed = most_windowed(held, num_seqs)
    options = dict(
        page_size=block_size,
        most_windowed=windowed,
        enable_prefix_caching=enable_prefix_caching,
        dtype=dtype,
    )
    if num_gpu_blocks_override is not None:
        _check_device("num_gpu_blocks_override", num_gpu_blocks_override, each, windowed)
        return Pool(plan, params, num_pages=num_gpu_blocks_override + 1, **options)
    name, limit = "kv_cache_memory_bytes", kv_cache_memory_bytes
    if limit is None:
        name, share = "gpu_memory_utilization", gpu_memory_utilization
        device = this_device((), sharding.num_shards())
        limit = device.bytes_for_pages(bytes_on_each(params), reserved, share)
    if enable_prefix_caching:
        caches, share = shapes_of(plan, params, block_size), sharding.num_shards()
        is_split = any(entry.is_divided for cache in caches[1:] for entry in cache.layers)
        row = bytes_of_row(caches, share, share if is_split else 1)
        options["most_snapshots"] = most_within(limit, row)
        limit -= options["most_snapshots"] * row
    count = num_pages(limit, each, windowed)
    if count < 2:
        raise ValueError(
            f"{name} leaves {limit:,} bytes, but one page of {block_size} tokens takes "
            f"{sum(each):,}, and two are the least; give more, or a smaller block_size."
        )
    if kv_cache_memory_bytes is not None:
        _check_device("kv_cache_memory_bytes", count, each, windowed)
        return Pool(plan, params, num_pages=count, **options)
    first = min(_FIRST_BYTES // max(sum(each), 1), -(-num_tokens // block_size) + 1)
    first = max(2, min(count, first))
    return Pool(plan, params, num_pages=first, most=count, **options)


def _check_device(name: str, count: int, each: Sequence[int], most_windowed: int) -> None:
    """Refuse pages that take more memory than the device has, before they are allocated."""
    needed = sum(size * min(count, most_windowed) for size in each[1:]) + count * each[0]
    limit = this_device((), sharding.num_shards()).total
    if needed > limit:
        raise ValueError(
            f"{name} asks for {count:,} pages, which take {needed:,} bytes, but the device has "
            f"{limit:,}; ask for less."
        )
