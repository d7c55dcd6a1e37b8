"""Memory of a model on a device that is not there, and a limit of its speed: ``jspec plan``.

The limit is the time to read once what every round reads: the weights, of experts those of one
token, and the KV cache of the texts so far. If the products take longer, it is their time.
Communication, launches, sampling and a second reading by the drafter come on top.
"""

import dataclasses
import functools
import math
import os
from typing import Any

import jax

from jspec.api import build, config
from jspec.api.backends import Backends
from jspec.api.config import checking
from jspec.core.types import Params
from jspec.core.weights import weights_of
from jspec.drafters.none import NoDrafter
from jspec.engine.functional import MAX_NUM_SEQS
from jspec.engine.memory import Device, bytes_of
from jspec.engine.memory_plan import MemoryPlan, amount, plan_memory
from jspec.engine.plan import Plan
from jspec.models.decoder import DecoderConfig, DecoderParams
from jspec.tools import chips
from jspec.tools.chips import CHIPS, Chip
from jspec.util.messages import shown
from jspec.util.values import is_real, is_whole

_CONTEXT = 2048  # default tokens of a sequence


@dataclasses.dataclass(frozen=True)
class Limit:
    """The least time of a round, and the most tokens a second; no measurement.

    Attributes:
      name: method, and the nodes of a round.
      acceptance_length: tokens of a round and sequence.
      round_bytes: bytes that each device reads.
      seconds: of a round.
      tokens_per_second: of all sequences.
    """

    name: str
    acceptance_length: float
    round_bytes: float
    seconds: float
    tokens_per_second: float

    def times(self, count: int) -> "Limit":
        """Return the limit of ``count`` engines side by side."""
        return dataclasses.replace(self, tokens_per_second=count * self.tokens_per_second)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of ``plan``; the memory is that of each device.

    Attributes:
      model: path or id.
      device: kind of the chips.
      num_chips: number of chips.
      memory: the memory plan.
      num_seqs: sequences that run together in an engine.
      context: tokens of each of them.
      is_assumed: whether the acceptance length was assumed.
      limits: plain, and with the drafter; empty if the model does not fit.
      data_parallel_size: engines side by side, each on its share of the chips.
    """

    model: str
    device: str
    num_chips: int
    memory: MemoryPlan
    num_seqs: int
    context: int
    is_assumed: bool
    limits: tuple[Limit, ...]
    data_parallel_size: int = 1

    def __str__(self) -> str:
        """Return lines for people."""
        plan, chip = self.memory, CHIPS[self.device]
        sizes = f"tensor_parallel_size={plan.tensor_parallel_size}"
        if self.data_parallel_size > 1:
            sizes += f", data_parallel_size={self.data_parallel_size}"
        lines = [
            f"{self.model} on {self.device}-{self.num_chips}, {plan.dtype}. Of each device's "
            f"{amount(plan.memory)} ({sizes}):",
            *(f"  {name:<12}{size}" for name, size in plan.parts().items()),
        ]
        if not plan.fits:
            try:
                plan.check()
            except ValueError as error:
                return "\n".join([*lines, f"It does not fit. {error}"])
        sizes = f"max_num_seqs={plan.max_num_seqs} of max_model_len={plan.max_model_len}"
        wanted = plan.max_num_seqs * plan.max_model_len
        enough = "all" if wanted <= plan.num_tokens else f"{plan.num_tokens / wanted:.0%}"
        lines += [
            f"It fits, with tokens for {enough} of {sizes}.",
            f"Limits, no measurements, at {chip.bandwidth:,} GB/s and {chip.peak:,} TFLOP/s "
            f"a chip, with {self.context:,} tokens in each sequence (running: {self.num_seqs}):",
        ]
        for limit in self.limits:
            word = " (assumed)" if self.is_assumed and limit.acceptance_length > 1 else ""
            lines.append(
                f"  {limit.name}: {amount(limit.round_bytes)} and {1e3 * limit.seconds:.2f} ms a "
                f"round, {limit.acceptance_length:.2f} tokens{word}: at most "
                f"{limit.tokens_per_second:,.0f} tokens/s"
            )
        return "\n".join(lines)


def plan(
    model: str | os.PathLike,
    device: str,
    *,
    speculative_config: Any = None,
    dtype: str | None = None,
    quantization: str | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    context: int | None = None,
    acceptance_length: float | None = None,
    memory_share: float | None = None,
    data_parallel_size: int = 1,
    kv_cache_dtype: str | None = None,
) -> Report:
    """Plan a model for a device that need not be there, from a config.json and files of heads.

    Args:
      model: a directory, a config.json, a GGUF file or a hub id.
      device: kind and number of chips, such as "v5e-8"; those of an engine share the model.
      speculative_config: as for ``LLM``, like all that is not described here.
      context: tokens of each sequence, for the limit; None for 2048 or ``max_model_len``.
      acceptance_length: tokens of a round and sequence; None assumes that half of K is accepted.
      memory_share: share of a chip's memory that JAX takes; None for its default.
      data_parallel_size: engines side by side.

    Raises:
      ValueError: the device is unknown, an argument is out of range, or as for ``LLM``.
    """
    kind, count = chips.parse(device)
    chip, speculative = CHIPS[kind], _read(speculative_config)
    num_seqs = MAX_NUM_SEQS if max_num_seqs is None else max_num_seqs
    backends = Backends(kv_cache_dtype=checking.kv_cache_dtype(kv_cache_dtype))
    sizes = dict(dtype=dtype, quantization=quantization, max_model_len=max_model_len)
    outline = build.outline(model, speculative, backends=backends, **sizes)
    context = min(_CONTEXT, outline.max_model_len) if context is None else context
    depth, ways = outline.plan.drafter.max_depth, _share(count * chip.devices, data_parallel_size)
    _check(num_seqs, context, outline.max_model_len, acceptance_length, depth)
    speculative.check_tensor_parallel(ways)
    check_heads(outline.model.config, ways)
    planned = functools.partial(
        plan_memory,
        settings={},
        device=_device(chip, memory_share),
        max_num_seqs=num_seqs,
        max_model_len=outline.max_model_len,
        longest=max_model_len,
        tensor_parallel_size=ways,
        draft_tensor_parallel_size=speculative.draft_tensor_parallel_size,
    )
    memory = planned(outline.plan, outline.params)
    alone = planned(Plan(outline.plan.target, NoDrafter()), Params(outline.params.target, None))
    limits = _limits(
        outline,
        chip,
        memory,
        alone,
        context=context,
        acceptance_length=acceptance_length or 1 + depth / 2,
        method=speculative.method,
    )
    return Report(
        model=str(model),
        device=kind,
        num_chips=count,
        memory=memory,
        num_seqs=_rows(memory, context),
        context=context,
        is_assumed=acceptance_length is None,
        limits=tuple(each.times(data_parallel_size) for each in limits),
        data_parallel_size=data_parallel_size,
    )


def _device(chip: Chip, share: float | None) -> Device:
    """Return the memory of one device of a chip; ``share`` is that of JAX, None for the default."""
    size = int((chip.share if share is None else share) * chip.memory * 2**30 / chip.devices)
    return Device(size, size)


def _read(speculative_config: Any) -> config.SpeculativeConfig:
    """Return a config; raise ValueError if the shapes of its weights are in no file."""
    speculative = config.read(speculative_config)
    if speculative.drafter_class:
        raise ValueError(
            f"method={shown(speculative.drafter_class)} makes its weights when it is loaded, so "
            "they cannot be planned; leave speculative_config out."
        )
    return speculative


def _share(devices: int, data_parallel_size: int) -> int:
    """Return the number of devices of an engine."""
    if not is_whole(data_parallel_size, 1) or devices % data_parallel_size:
        raise ValueError(
            f"data_parallel_size={shown(data_parallel_size)} does not divide the {devices} "
            "devices; change one of them."
        )
    return devices // data_parallel_size


def _rows(memory: MemoryPlan, context: int) -> int:
    """Return how many sequences of ``context`` tokens run together."""
    return min(memory.max_num_seqs, memory.num_tokens // context) if memory.fits else 0


def _limits(
    outline: build.Outline,
    chip: Chip,
    memory: MemoryPlan,
    alone: MemoryPlan,
    *,
    context: int,
    acceptance_length: float,
    method: str,
) -> tuple[Limit, ...]:
    """Return the limits, plain by the plan of the target ``alone`` and with the drafter if any."""
    rows, nodes = _rows(memory, context), outline.plan.drafter.tree_size
    if not rows:
        return ()
    of = functools.partial(
        limit,
        sizes=outline.model.config,
        chip=chip,
        target=outline.params.target,
        rows=rows,
        context=context,
    )
    plain = of("plain", memory=alone)
    if not outline.plan.drafter.max_depth:
        return (plain,)
    name = f"{method}, {nodes} nodes"
    return plain, of(name, memory=memory, nodes=nodes, acceptance_length=acceptance_length)


def limit(
    name: str,
    *,
    sizes: DecoderConfig,
    chip: Chip,
    memory: MemoryPlan,
    target: DecoderParams,
    rows: int,
    context: int,
    nodes: int = 1,
    acceptance_length: float = 1.0,
) -> Limit:
    """Return the limit of rounds over ``rows`` sequences of ``context`` tokens, ``nodes`` each."""
    weights = memory.weights * read_bytes(sizes, target) / bytes_of(target)
    windows = [min(context, window or context) / context for window in sizes.windows]
    live = rows * context * memory.token * sum(windows) / len(windows)
    size = weights + memory.drafter + live
    numbers = sum(math.prod(weight.shape) for weight in weights_of(target))
    products = 2 * numbers * weights / bytes_of(target) * rows * nodes
    seconds = chip.devices * max(size / (chip.bandwidth * 1e9), products / (chip.peak * 1e12))
    return Limit(name, acceptance_length, size, seconds, rows * acceptance_length / seconds)


def read_bytes(sizes: DecoderConfig, target: DecoderParams) -> float:
    """Return the bytes of the target's weights that a round reads at least.

    The embedding of a model with a head of its own is looked up, and so is that of the inputs of
    layers. A token reads k of E experts.
    """
    size = bytes_of(target) - (0 if target.head is None else bytes_of(target.embedding))
    if target.layer_inputs is not None:
        size -= bytes_of(target.layer_inputs.embedding)
    for layer, weights in zip(sizes.layers, target.layers, strict=True):
        kind = layer.feed_forward
        if hasattr(kind, "experts_per_token"):
            leaves = jax.tree.leaves(weights.feed_forward)
            routed = bytes_of([leaf for leaf in leaves if leaf.ndim == 3])
            size -= routed * (1 - kind.experts_per_token / kind.num_experts)
    return size


def check_heads(sizes: DecoderConfig, ways: int) -> None:
    """Raise ValueError if the heads of a model cannot be divided among devices."""
    mixer = sizes.layers[0].mixer
    heads, keys = mixer.num_heads, mixer.num_kv_heads

    def divides(size: int) -> bool:
        return heads % size == 0 and (keys % size == 0 or size % keys == 0)

    if not divides(ways):
        works = ", ".join(str(size) for size in range(1, heads + 1) if divides(size))
        raise ValueError(
            f"{ways} devices do not divide the {heads} heads and {keys} key heads of this model; "
            f"it works with {works}."
        )


def _check(
    num_seqs: int, context: int, longest: int, acceptance_length: float | None, depth: int
) -> None:
    if not is_whole(num_seqs, 1):
        raise ValueError(f"max_num_seqs={shown(num_seqs)} must be a whole number of at least 1.")
    if not is_whole(context, 1, longest):
        raise ValueError(
            f"context={shown(context)} must be a whole number from 1 to {longest}, max_model_len."
        )
    if acceptance_length is None:
        return
    if not depth:
        raise ValueError(
            f"acceptance_length={shown(acceptance_length)} needs speculative_config; give it too."
        )
    if not is_real(acceptance_length) or not 1 <= acceptance_length <= depth + 1:
        raise ValueError(
            f"acceptance_length={shown(acceptance_length)} must be a number from 1 to {depth + 1}, "
            "the drafted tokens and one."
        )
