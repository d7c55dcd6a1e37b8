"""The memory of KV caches: how many pages an engine may have."""

import os

import jax
import jax.numpy as jnp

from jspec.core.types import Params
from jspec.engine.pages import PAGE_SIZE, Pool, page_bytes, reads_pages, without_prefix
from jspec.engine.plan import Plan
from jspec.util.messages import shown

_CPU_BYTES = 4 * 2**30  # as vLLM's VLLM_CPU_KVCACHE_SPACE
_ACCELERATOR_SHARE = 0.9  # as vLLM's gpu_memory_utilization
_FIRST_BYTES = 2**27  # most of a pool that grows
# The arguments of ``LLM`` that are those of ``pool_of``, where None is their default.
SETTINGS = (
    "block_size",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
)


def dtype_of_pages(params: Params) -> jnp.dtype | None:
    """Return the dtype of keys and values in pages; None for that of the caches.

    A CPU computes in float32, but its pages are bfloat16 if most of the target's weights are.
    """
    largest = max(jax.tree.leaves(params.target), key=lambda leaf: leaf.size, default=None)
    is_narrow = largest is not None and largest.dtype == jnp.bfloat16
    return jnp.dtype(jnp.bfloat16) if is_narrow else None


def pool_if_any(
    plan: Plan,
    params: Params,
    settings: dict[str, int | float | None],
    *,
    shares_prefixes: bool | None,
    num_tokens: int,
) -> Pool | None:
    """Return the pool of a model; None for a model whose caches have no pages.

    Args:
      plan: static.
      params: weights.
      settings: values of ``SETTINGS`` in their ranges.
      shares_prefixes: its ``enable_prefix_caching``; None wherever target and drafter support it.
      num_tokens: as of ``pool_of``.

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
    part = without_prefix(plan, params) if shares_prefixes else None
    if part is not None:
        raise ValueError(
            f"enable_prefix_caching=True: {part} cannot start behind a cached prefix; leave it out."
        )
    shares = shares_prefixes is not False
    return pool_of(plan, params, num_tokens=num_tokens, enable_prefix_caching=shares, **given)


def pool_of(
    plan: Plan,
    params: Params,
    *,
    num_tokens: int,
    block_size: int = PAGE_SIZE,
    num_gpu_blocks_override: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float | None = None,
    enable_prefix_caching: bool = True,
) -> Pool:
    """Return the pool of a model, under vLLM's names.

    A number of pages or bytes is allocated at once. Otherwise the pool grows as it is needed, up to
    4 GiB on a CPU, or the share ``gpu_memory_utilization`` of the device's memory that the weights
    leave (0.9 on an accelerator).

    Args:
      plan: static.
      params: weights.
      num_tokens: tokens that may run together: a pool that grows begins with no more.
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
    options = dict(page_size=block_size, enable_prefix_caching=enable_prefix_caching, dtype=dtype)
    if num_gpu_blocks_override is not None:
        _check_device("num_gpu_blocks_override", num_gpu_blocks_override, each)
        return Pool(plan, params, num_pages=num_gpu_blocks_override + 1, **options)
    name, limit = "kv_cache_memory_bytes", kv_cache_memory_bytes
    if limit is None:
        name, limit = "gpu_memory_utilization", _bytes_left(params, gpu_memory_utilization)
    count = limit // each if each else 2**20
    if count < 2:
        raise ValueError(
            f"{name} leaves {limit:,} bytes, but one page of {block_size} tokens takes {each:,}, "
            "and two are the least; give more, or a smaller block_size."
        )
    if kv_cache_memory_bytes is not None:
        _check_device("kv_cache_memory_bytes", count, each)
        return Pool(plan, params, num_pages=count, **options)
    first = max(2, min(count, _FIRST_BYTES // max(each, 1), -(-num_tokens // block_size) + 1))
    return Pool(plan, params, num_pages=first, most=count, **options)


def _bytes_left(params: Params, share: float | None) -> int:
    """Return the bytes that the weights leave of a share of the device's memory."""
    if share is None and _accelerator_bytes() is None:
        return _CPU_BYTES
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params) if hasattr(leaf, "nbytes"))
    return max(0, int((share or _ACCELERATOR_SHARE) * _device_bytes()) - weights)


def _check_device(name: str, num_pages: int, bytes_of_page: int) -> None:
    """Refuse pages that take more memory than the device has, before they are allocated."""
    needed, limit = num_pages * bytes_of_page, _device_bytes()
    if needed > limit:
        raise ValueError(
            f"{name} asks for {num_pages:,} pages, which take {needed:,} bytes, but the device has "
            f"{limit:,}; ask for less."
        )


def _device_bytes() -> int:
    """Return the memory of the device, or of the machine on a CPU."""
    limit = _accelerator_bytes()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if limit is None else limit


def _accelerator_bytes() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
