"""Rules as a kernel of rejection sampling judges them, as in a plan with a ``sampling_backend``."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec import ops
from jspec.core.types import Array, Draft, Proposal, Sampling, Tree
from jspec.verify import Rule, check_backend

# The proposals that no kernel judges: ``Plan`` refuses them.
_NEVER_DRAWN = frozenset({"deterministic", "deterministic_last"})


@dataclasses.dataclass(frozen=True)
class KernelWalk:
    """The walk of a rule through a kernel, in float32, with the weights that it draws from."""

    rule: str
    backend: str
    max_children: int  # Most children of a node.

    def __call__(
        self, processed: Array, draft: Draft, tree: Tree, uniforms: Array, proposal: Proposal
    ) -> tuple[Array, Array, Array]:
        """Judge a draft; arguments and results as for ``jspec.verify.rejection``."""
        ones = jnp.ones(len(processed), jnp.float32)
        off = dict(temperature=ones, min_p=0 * ones, top_k=ones.astype(jnp.int32), top_p=ones)
        path, num_accepted, weights = ops.rejection_sampling(
            processed.astype(jnp.float32),
            Sampling(off, names=("temperature",)),
            draft.replace(logits=draft.logits.astype(jnp.float32)),
            tree,
            uniforms.astype(jnp.float32),
            None,
            rule=self.rule,
            max_children=self.max_children,
            implementation=self.backend,
        )
        return path, num_accepted, jnp.log(weights)


def judges(backend: str | None, proposal: Proposal) -> bool:
    """Return whether drafts of ``proposal`` reach a back-end."""
    return backend in (None, "xla") or proposal not in _NEVER_DRAWN


def through(rule: Rule, backend: str | None, proposal: Proposal, parents: Sequence[int]) -> Rule:
    """Return a rule for the enumeration of trees with ``parents``, judged by a back-end.

    The kernel is interpreted, since the enumeration runs on a CPU.

    Raises:
      ValueError: the back-end does not exist, has no kernel for the rule or for such drafts, or
        JAX cannot interpret it.
    """
    check_backend(rule, backend)
    if backend in (None, "xla"):
        return rule
    if not judges(backend, proposal):
        raise ValueError(
            f"sampling_backend={backend!r} does not judge {proposal!r} drafts; leave it out, or "
            "name another proposal."
        )
    if not can_interpret(backend):
        raise ValueError(
            f"sampling_backend={backend!r} cannot be enumerated, because JAX does not interpret "
            "its kernels on a CPU; leave it out, or count tokens on a device that runs it."
        )
    children = int(np.bincount(parents[1:], minlength=1).max(initial=1))
    walk = KernelWalk(rule.name, _interpreted(backend), children)
    return dataclasses.replace(rule, walk=walk)


def can_interpret(backend: str) -> bool:
    """Return whether a back-end runs in Pallas' interpreter."""
    return backend == "xla" or _interpreted(backend) in ops.backend_names("rejection_sampling")


def on_device(backend: str | None) -> str | None:
    """Return the back-end that JAX's device runs: ``backend`` itself, else interpreted."""
    table = {each.name: each for each in ops.BACKENDS["rejection_sampling"]}
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    if backend in (None, "xla") or table[backend].platform == here:
        return backend
    if not can_interpret(backend):
        raise ValueError(
            f"sampling_backend={backend!r} does not run on {here!r}, and JAX does not interpret "
            "it; leave it out."
        )
    return _interpreted(backend)


def _interpreted(backend: str) -> str:
    return f"{backend}_interpreted"
