"""The memory plan of a model: what it takes on a device, from the shapes of its weights alone."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec.core import paging
from jspec.core.types import Params
from jspec.core.weights import size_of, weights_of
from jspec.engine import chunks, slots
from jspec.engine.memory import Device, bytes_of, dtype_of_pages, most_windowed, num_pages
from jspec.engine.pages import (
    PAGE_SIZE,
    bytes_by_kind,
    held_by_kind,
    reads_pages,
    shapes_of,
    without_prefix,
)
from jspec.engine.plan import Plan
from jspec.engine.snapshots import bytes_of_row, most_within
from jspec.models import partition
from jspec.models.decoder import DecoderConfig

_LIVE = 4  # activations of a layer that live at once, in float32
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each of ``tensor_parallel_size`` devices, and the tokens that fit.

    Attributes:
      weights: bytes of the target's weights.
      drafter: bytes of the drafter's weights.
      workspace: bytes of logits, activations and the state of rows; an estimate.
      sequence: bytes of the KV cache of the longest sequence that must fit.
      token: bytes of a token in all caches.
      windowed: bytes of those that a sequence holds for its last tokens only: layers with a
        window, where others have none.
      in_windows: bytes of ``sequence`` that it holds in these layers.
      state: bytes of a sequence's states of recurrent layers.
      snapshots: copies of them for the prefix cache.
      block_size: tokens of a page; 1 for caches without pages.
      num_tokens: tokens that fit into the KV cache.
      memory: bytes that the device has for all of it.
      dtype: of the largest weight.
      max_num_seqs: sequences that run together.
      max_model_len: longest sequence.
      tensor_parallel_size: devices that share the model.
      splits: larger numbers of devices that could share it; none of a CPU, which has one memory.
    """

    weights: int
    drafter: int
    workspace: int
    sequence: int
    token: float
    block_size: int
    num_tokens: int
    memory: int
    dtype: str
    max_num_seqs: int
    max_model_len: int
    tensor_parallel_size: int = 1
    splits: tuple[int, ...] = ()
    windowed: float = 0
    in_windows: int = 0
    state: int = 0
    snapshots: int = 0

    @property
    def least(self) -> int:
        """Bytes without which the longest sequence cannot run."""
        return self.weights + self.drafter + self.workspace + self.sequence

    @property
    def fits(self) -> bool:
        """True if the device has as much memory."""
        return self.least <= self.memory and self.num_tokens > 0

    def parts(self) -> dict[str, str]:
        """Return the parts with their sizes, for people."""
        windowed = f" ({amount(self.windowed)} within windows)" if self.windowed else ""
        states = f"{amount(self.state)} a sequence, {self.snapshots:,} snapshots"
        return {
            "weights": amount(self.weights),
            "drafter": amount(self.drafter),
            "workspace": f"about {amount(self.workspace)}",
            "KV cache": f"{amount(self.token)} a token{windowed}, {self.num_tokens:,} tokens fit",
            **({"states": states} if self.state else {}),
        }

    def __str__(self) -> str:
        """Return one line for people."""
        parts = ", ".join(f"{name} {size}" for name, size in self.parts().items())
        return (
            f"memory {amount(self.memory)}: {parts} (max_num_seqs={self.max_num_seqs}, "
            f"max_model_len={self.max_model_len})"
        )

    def check(self) -> None:
        """Raise ValueError if the device has too little memory; the message has the remedies."""
        if self.fits:
            return
        raise ValueError(
            f"The model needs {amount(self.least)} on a device, which has {amount(self.memory)}: "
            f"weights {amount(self.weights)}, drafter {amount(self.drafter)}, workspace "
            f"{amount(self.workspace)} for max_num_seqs={self.max_num_seqs}, and a KV cache of "
            f"{amount(self.sequence)} at least; set {self._remedies()}."
        )

    def _remedies(self) -> str:
        """Return the settings that help, with values that would do where one alone does."""
        fixed = self.weights + self.drafter
        page = (self.token - self.windowed) * self.block_size
        left = self.memory - fixed - self.workspace - self.in_windows
        pages = left // page - 1 if page else 0
        row = self.workspace / self.max_num_seqs
        rows = int((self.memory - fixed - self.sequence) / row) if row else 0
        number = lambda n, most: f" of at most {n}" if 0 < n < most else ""
        wanted = self.tensor_parallel_size * self.least / max(self.memory, 1)
        enough = [size for size in self.splits if size >= wanted] or self.splits[-1:]
        split = f" or tensor_parallel_size={enough[0]}" if enough else ""
        length = number(int(pages) * self.block_size, self.max_model_len)
        narrow = "a narrower dtype" if self.dtype != "float32" else "dtype='bfloat16'"
        return (
            f"a smaller max_model_len{length}, a smaller max_num_seqs"
            f"{number(rows, self.max_num_seqs)}, or {narrow}{split}"
        )


def plan_memory(
    plan: Plan,
    params: Params,
    settings: Mapping[str, Any],
    device: Device,
    *,
    max_num_seqs: int,
    max_model_len: int,
    longest: int | None = None,
    shares_prefixes: bool | None = None,
    tensor_parallel_size: int = 1,
    draft_tensor_parallel_size: int = 1,
) -> MemoryPlan:
    """Return the memory plan of a model.

    Several devices share the target as ``partition.rules`` says. Key heads are repeated if they are
    too few.

    Args:
      plan: static.
      params: weights, or their shapes.
      settings: values of ``memory.SETTINGS``; None for a default.
      device: each of the devices.
      max_num_seqs: sequences that run together.
      max_model_len: longest sequence.
      longest: tokens of the longest sequence that must fit; None for one page.
      shares_prefixes: as of ``memory.pool_if_any``.
      tensor_parallel_size: devices that share the target.
      draft_tensor_parallel_size: devices that share the drafter; with 1 it is whole on each.
    """
    share = tensor_parallel_size
    target = _divided(plan, params, share)
    drafter = _split(params.drafter, draft_tensor_parallel_size)
    keeps = reads_pages(plan) and shares_prefixes is not False and not without_prefix(plan)
    row, workspace = _workspace(plan, params, max_num_seqs, max_model_len, share, keeps)
    size = settings.get("block_size") or PAGE_SIZE
    left, state, snapshots = max(0, device.free - target - drafter - workspace), 0, 0
    if reads_pages(plan):
        each = _page_bytes(plan, params, size, share, draft_tensor_parallel_size)
        most = most_windowed(held_by_kind(plan, params, size, max_model_len), max_num_seqs)
        limit = _limit(settings, device, target + drafter, workspace)
        caches = shapes_of(plan, params, size)
        state = bytes_of_row(caches, share, draft_tensor_parallel_size)
        snapshots = most_within(min(limit, left), state) if keeps else 0
        limit, left = limit - snapshots * state, left - snapshots * state
        count = _num_pages(each, most, settings, limit)
        count = min(count, max(0, num_pages(left, each, most) - 1)) if any(each) else count
        held, num_tokens = held_by_kind(plan, params, size, longest or 1), count * size
        sequences = [(pages + 1) * page for pages, page in zip(held, each, strict=True)]
    else:  # every row has the whole length
        size = slots.buffer_size(plan, max_model_len)
        sequences = each = [row]
        rows = min(max_num_seqs, left // row) if row else max_num_seqs
        num_tokens = rows * max_model_len
    return MemoryPlan(
        weights=target,
        drafter=drafter,
        workspace=workspace,
        sequence=sum(sequences),
        token=sum(each) / size,
        block_size=size if reads_pages(plan) else 1,
        num_tokens=num_tokens,
        memory=device.free,
        dtype=_largest(params.target).dtype.name,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        tensor_parallel_size=share,
        splits=() if device.is_host else _splits(plan, share),
        windowed=sum(each[1:]) / size,
        in_windows=sum(sequences[1:]),
        state=state,
        snapshots=snapshots,
    )


def amount(size: float) -> str:
    """Return a number of bytes for people."""
    unit, factor = next((pair for pair in _UNITS if size >= pair[1]), ("bytes", 1))
    return f"{size / factor:.1f} {unit}" if factor > 1 else f"{size:.0f} {unit}"


def _limit(settings: Mapping[str, Any], device: Device, held: int, reserved: int) -> int:
    """Return the bytes of ``memory.pool_of`` for pages and snapshots."""
    if settings.get("kv_cache_memory_bytes") is not None:
        return settings["kv_cache_memory_bytes"]
    return device.bytes_for_pages(held, reserved, settings.get("gpu_memory_utilization"))


def _num_pages(
    each: Sequence[int], most_windowed: int, settings: Mapping[str, Any], limit: int
) -> int:
    """Return the pages that the pool of ``memory.pool_of`` has for tokens."""
    if settings.get("num_gpu_blocks_override") is not None:
        return settings["num_gpu_blocks_override"]
    return max(0, num_pages(limit, each, most_windowed) - 1)


def _split(tree: Any, share: int) -> int:
    """Return the bytes of weights on each of ``share`` devices."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    sizes = [(size_of(leaf), leaf.ndim) for leaf in leaves]
    return sum(-(-size // share) if ndim > 1 else size for size, ndim in sizes)


def _splits(plan: Plan, share: int) -> tuple[int, ...]:
    """Return the numbers of devices above ``share`` that can split the target."""
    config = getattr(plan.target, "config", None)
    sizes = partition.sizes_of(config) if isinstance(config, DecoderConfig) else ()
    return tuple(size for size in sizes if size > share)


def _divided(plan: Plan, params: Params, share: int) -> int:
    """Return the bytes of the target's weights on each of ``share`` devices."""
    if share == 1:
        return _split(params.target, share)
    rules, total = partition.rules(plan.target.config, share), 0
    for keys, leaf in jax.tree.leaves_with_path(params.target, is_leaf=partition.is_array):
        spec, order = rules.get(partition.path_of(keys), partition.Rule())
        size = sum(map(size_of, jax.tree.leaves(leaf)))
        if order is not None:
            size = size // leaf.shape[len(spec) - 1] * len(order)
        total += size // share if spec else size
    return total


def _page_bytes(
    plan: Plan, params: Params, size: int, share: int, draft_share: int
) -> tuple[int, ...]:
    """Return the bytes of a page of ``size`` tokens on one device, for each kind of layers.

    The caches of the target are split among ``share`` devices by heads, the others among
    ``draft_share``.
    """

    def of(cache: int, leaf: Any) -> int:
        ways = draft_share if cache else share
        return leaf.size // leaf.shape[1] * -(-leaf.shape[1] // ways) * leaf.dtype.itemsize

    return bytes_by_kind(plan, params, size, dtype_of_pages(params), of)


def _workspace(
    plan: Plan, params: Params, max_num_seqs: int, max_model_len: int, share: int, keeps: bool
) -> tuple[int, int]:
    """Return the bytes of a row's caches without pages, and those of programs for all rows.

    Programs hold logits of all nodes in float32, also processed and of the drafter, and a few
    activations of a layer. Rows have copies of their states if it ``keeps``.
    """
    has_pages, size = reads_pages(plan), slots.buffer_size(plan, max_model_len)
    state = jax.eval_shape(lambda p: slots.allocate(plan, p, 1, size, has_pages, keeps), params)
    caches = bytes_of([cache.layers for cache in paging.caches_of(state)])
    nodes, kinds = plan.drafter.tree_size, 3 if plan.drafter.max_depth else 2
    logits = kinds * 4 * nodes * -(-plan.target.vocab_size // share)
    # Without slots of tokens, caches are the states of recurrent layers.
    states = caches // share if has_pages else 0
    row = bytes_of(state) - caches + states + logits
    vocabulary = plan.target.vocab_size
    widths = (size for weight in weights_of(params.target) for size in weight.shape[-2:])
    width = max((each for each in widths if each != vocabulary), default=0)
    tokens = max(max_num_seqs * nodes, chunks.TOTALS[-1])
    return caches, max_num_seqs * row + _LIVE * 4 * tokens * width


def _largest(tree: Any) -> Any:
    empty = jax.ShapeDtypeStruct((), jnp.float32)
    return max(weights_of(tree), key=lambda weight: math.prod(weight.shape), default=empty)
