"""``EngineArgs``: the arguments of ``LLM``, of which commands make their flags. It loads no JAX."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jspec.util import arguments, cache_dtypes, neutral
from jspec.util.arguments import argument
from jspec.util.messages import shown
from jspec.util.values import is_real, is_whole

_MOST_INDEX = 2**31 - 2  # the device counts pages and tokens in int32
_AT_LEAST_ONE = "a whole number of at least 1"
_AT_MOST = f"{_AT_LEAST_ONE}, and at most {_MOST_INDEX}"
_DRAW = "for other texts draw one by secrets.randbits(64)"
_INDEX = (lambda value: is_whole(value, 1, _MOST_INDEX), _AT_MOST)
_COUNT = (lambda value: is_whole(value, 1), _AT_LEAST_ONE)
_BYTES = (lambda value: is_whole(value, 1, 2**63 - 1), _AT_LEAST_ONE)
_SEED = (
    lambda value: is_whole(value, 0, 2**64 - 1),
    f"a whole number from 0 to 2**64 - 1; {_DRAW}",
)
_SHARE = (lambda value: is_real(value) and 0 < value <= 1, "a number from 0 to 1")
_STATS = (lambda value: value in ("summary", "detailed"), "None, 'summary' or 'detailed'")
_MOST_SCORES = (lambda value: is_whole(value, -1), "whole, or -1 for no limit")
_BOOL = (lambda value: isinstance(value, bool), "True or False")
_BOOL_OR_NONE = (lambda value: isinstance(value, bool), "True, False or None")
_FROM_0 = (lambda value: is_whole(value, 0), "a whole number of at least 0")
_CACHE_DTYPE = cache_dtypes.is_known, cache_dtypes.KNOWN
_MEMORY, _PROCESSES = "KV cache", "Several processes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The arguments of ``LLM`` beside its model; ``LLM`` describes them.

    Those with a ``help`` are flags of ``jspec serve``, and of other commands that name them.

    Raises:
      ValueError: a value is out of range. Values that need the files of the model, and the keys of
        ``speculative_config``, are checked by ``LLM``.
    """

    speculative_config: Mapping[str, Any] | str | None = argument(
        None, "JSON object with vLLM's keys.", kind=str | None
    )
    dtype: str | None = argument(
        None, "auto, float32, bfloat16 or float16.", kind=str, default="auto"
    )
    quantization: str | None = argument(
        None,
        "int8, fp8 or int4; gguf to keep the blocks of a GGUF file; w8a8 to quantise rows too.",
        kind=str | None,
    )
    max_model_len: int | None = argument(None, "Longest text, prompt included.")
    seed: int = argument(0, "Seed of requests without one.", check=_SEED)
    max_num_seqs: int | None = argument(
        None, "Sequences that run together.", check=_COUNT, kind=int, default=32, min=1
    )
    tensor_parallel_size: int = argument(
        1, "Devices that the target is split among.", check=_COUNT, min=1
    )
    data_parallel_size: int = argument(
        1, "Engines side by side, each with the model on devices of its own.", check=_COUNT, min=1
    )
    enable_expert_parallel: bool = argument(
        False, "Devices have some experts each, not a part of every expert.", check=_BOOL
    )
    coordinator: str | None = argument(
        None, "HOST:PORT of process 0; auto on TPU pods and Slurm.", rich_help_panel=_PROCESSES
    )
    num_processes: int | None = argument(
        None,
        "Processes of the coordinator.",
        check=_COUNT,
        rich_help_panel=_PROCESSES,
    )
    process_id: int | None = argument(
        None, "This one, from 0 on; 0 serves.", check=_FROM_0, rich_help_panel=_PROCESSES
    )
    per_request_stats: str | None = argument(None, check=_STATS)
    tokenizer: Any = argument(
        None, "Directory of a tokenizer. Default: the model's own.", kind=str | None
    )
    logprobs_mode: str = argument("raw_logprobs", "raw_logprobs, processed_logprobs, ...")
    max_logprobs: int = argument(20, "Largest logprobs of a request.", check=_MOST_SCORES)
    deterministic: bool = argument(False, "Texts equal to the bit in every batch.", check=_BOOL)
    attention_backend: str | None = argument(
        None, "xla, pallas_gpu, pallas_tpu or reference. Default: by device."
    )
    sampling_backend: str | None = argument(None, "xla, pallas_gpu or pallas_tpu.")
    enable_prefix_caching: bool | None = argument(
        None,
        "Share the cache of what prompts begin with. Default: if supported.",
        check=_BOOL_OR_NONE,
        rich_help_panel=_MEMORY,
    )
    block_size: int | None = argument(
        None, "Tokens of a page.", check=_INDEX, rich_help_panel=_MEMORY
    )
    num_gpu_blocks_override: int | None = argument(
        None, "Pages.", check=_INDEX, rich_help_panel=_MEMORY
    )
    kv_cache_memory_bytes: int | None = argument(
        None, "Bytes of the cache.", check=_BYTES, rich_help_panel=_MEMORY
    )
    kv_cache_dtype: str | None = argument(
        None,
        f"Numbers of the cache: {', '.join(cache_dtypes.NAMES)}.",
        check=_CACHE_DTYPE,
        kind=str,
        default="auto",
        rich_help_panel=_MEMORY,
    )
    gpu_memory_utilization: float | None = argument(
        None, "Share of memory for weights and cache.", check=_SHARE, rich_help_panel=_MEMORY
    )

    def __post_init__(self):
        arguments.check(self)
        alone = {"deterministic": False, "sampling_backend": "xla"}
        for name, value in alone.items():
            if self.tensor_parallel_size > 1 and getattr(self, name) not in (None, value):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} works on one device, but "
                    f"tensor_parallel_size={self.tensor_parallel_size}; leave one of them out."
                )
        self._check_processes()

    def _check_processes(self) -> None:
        """Raise ValueError unless the arguments of several processes fit each other."""
        coordinator, count, index = self.coordinator, self.num_processes, self.process_id
        if coordinator in (None, "auto"):
            for name in ("num_processes", "process_id"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)} needs coordinator='HOST:PORT'; give it "
                        f"too, or leave {name} out."
                    )
            return
        host, _, port = str(coordinator).rpartition(":")
        if not (host and port.isdecimal()):
            raise ValueError(
                f"coordinator={shown(coordinator)} must be HOST:PORT of process 0, or 'auto' on a "
                "TPU pod or under Slurm."
            )
        if count is None or index is None or index >= count:
            raise ValueError(
                f"process_id={index} and num_processes={count} belong to "
                f"coordinator={shown(coordinator)}; give both, and count processes from 0."
            )


FIELDS = {field.name: field for field in dataclasses.fields(EngineArgs)}


def of(owner: str, given: Mapping[str, Any]) -> EngineArgs:
    """Return the arguments that a caller of ``owner`` gave.

    Raises:
      ValueError: an argument is out of range or unknown, or is vLLM's alone and has an effect.
    """
    check_unknown(owner, {name: value for name, value in given.items() if name not in FIELDS})
    return EngineArgs(**{name: value for name, value in given.items() if name in FIELDS})


def check_unknown(owner: str, unknown: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that is not vLLM's, or that has an effect there."""
    neutral.check(owner, unknown, neutral.ENGINE, known=["model", *FIELDS])


def in_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function that takes ``EngineArgs`` by ``**unknown`` show them in its signature."""
    signature = inspect.signature(function)
    *before, unknown = signature.parameters.values()
    only = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(name, only, default=field.default, annotation=field.type)
        for name, field in FIELDS.items()
        if name not in signature.parameters
    ]

    # A function without defaults of its own: Sphinx looks for their texts in its source.
    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    del call.__wrapped__
    call.__signature__ = signature.replace(parameters=[*before, *more, unknown])
    return call
