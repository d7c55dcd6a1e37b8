"""Back-ends and dtypes of caches that a user names, checked before weights are loaded."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec import ops
from jspec.core.entries import AttentionKV
from jspec.engine.pages import PAGE_SIZE
from jspec.models import decoder
from jspec.models.blocks.latent_attention import LatentKV
from jspec.models.decoder import DecoderConfig
from jspec.util import cache_dtypes
from jspec.util.messages import shown

DRAFT_KEY = "speculative_config: "
_DEVICES = {"cuda": "an NVIDIA GPU", "tpu": "a TPU", "cpu": "a CPU"}  # by JAX's names


@dataclasses.dataclass(frozen=True)
class Backends:
    """The back-ends of a target, by the arguments of ``LLM``; None for defaults."""

    attention: str | None = None
    sampling: str | None = None
    page_size: int = PAGE_SIZE
    kv_cache_dtype: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "attention", named("attention_backend", self.attention))
        _check_device("sampling_backend", self.sampling, "rejection_sampling")

    def running(
        self,
        network: Any,
        attention: str | None,
        kv_cache_dtype: str | None,
        owner: str = "",
    ) -> Any:
        """Return a network with a back-end of attention and a dtype of its cache, unless None.

        Raises:
          ValueError: as ``named``; the network has no attention, or its sizes do not suit the
            back-end. The message begins with ``owner``.
        """
        key = f"{owner}attention_backend"
        changes = {"attention": named(key, attention)}
        changes["kv_cache_dtype"] = cache_dtypes.NAMES[kv_cache_dtype or "auto"]
        changes = {name: value for name, value in changes.items() if value is not None}
        if not changes:
            return network
        is_decoder = isinstance(network, DecoderConfig)
        decoder = network if is_decoder else getattr(network, "network", None)
        if not isinstance(decoder, DecoderConfig):
            asked = f"{key}={attention!r}"
            if "attention" not in changes:
                asked = f"{owner}kv_cache_dtype={kv_cache_dtype!r}"
            raise ValueError(f"{asked} is for drafters with attention; leave it out.")
        changed = dataclasses.replace(decoder, **changes)
        if changes.get("attention") == "xla":
            changed = changed.with_experts(matmul="xla")
        if "attention" in changes:
            self._check_sizes(key, changes["attention"], changed)
        return changed if is_decoder else dataclasses.replace(network, network=changed)

    def check_vocabulary(self, size: int) -> None:
        """Raise ValueError if the back-end of rejection sampling does not take so many tokens."""
        logits = jax.ShapeDtypeStruct((1, 1, size), jnp.float32)
        _check_arrays("sampling_backend", self.sampling, "rejection_sampling", logits, None)

    def _check_sizes(self, key: str, name: str, config: DecoderConfig) -> None:
        cache = jax.eval_shape(lambda: decoder.init_cache(config, 1, self.page_size))
        table = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        for page in [
            layer.k for layer in cache.layers if isinstance(layer, AttentionKV | LatentKV)
        ]:
            node = (*page.shape[:2], 1, page.shape[3])
            q, tree_k = (jax.ShapeDtypeStruct(node, dtype) for dtype in (jnp.float32, page.dtype))
            _check_arrays(key, name, "tree_attention", q, tree_k, page, table)


def named(key: str, name: Any) -> str | None:
    """Return a back-end of attention, None for the device's default.

    Raises:
      ValueError: there is none of that name, or the device of JAX does not run it. The message
        begins with ``key``.
    """
    known = ops.backend_names("tree_attention")
    if name in (None, "auto"):
        return None
    if name not in known:
        raise ValueError(
            f"{key}={shown(name)} must be one of {', '.join(map(repr, known))}, or None for the "
            "device's default; jspec has no other back-ends, vLLM's among them."
        )
    _check_device(key, name, "tree_attention")
    return name


def _check_device(key: str, name: str | None, operation: str) -> None:
    if name is None:
        return
    platforms = {each.platform for each in ops.BACKENDS[operation] if each.name == name}
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    if platforms and not platforms & {None, here}:
        raise ValueError(
            f"{key}={name!r} runs on {_DEVICES[platforms.pop()]} alone, and JAX's device is "
            f"{_DEVICES.get(here, here)}; leave it out."
        )


def _check_arrays(key: str, name: str | None, operation: str, *arrays: Any) -> None:
    for each in ops.BACKENDS[operation]:
        if each.name == name and (reason := each.refusal(operation, *arrays)):
            raise ValueError(f"{key}={name!r} {reason}, or leave {key.split()[-1]} out.")
