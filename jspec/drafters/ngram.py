"""Prompt lookup: propose what followed the last tokens when they occurred before.

The rule is vLLM's n-gram proposer. It takes the longest suffix of the history, of
``prompt_lookup_min`` to ``prompt_lookup_max`` tokens, that occurs earlier, and its earliest
occurrence. The continuation may overlap the suffix, and the end of the history may cut it short.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.core import trees
from jspec.core.history import root_token
from jspec.core.types import Array, Draft, Drafter
from jspec.drafters.trees.tree_settings import check_positive


@dataclasses.dataclass(frozen=True)
class NGram(Drafter):
    """N-gram lookup over a row's own history, on the device.

    Raises:
      ValueError: a setting is out of range.
    """

    num_speculative_tokens: int
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5

    proposal = "deterministic"
    reads_pages = True
    lookahead = 0
    max_depth = property(lambda self: self.num_speculative_tokens)
    tree_size = property(lambda self: self.num_speculative_tokens + 1)

    def __post_init__(self):
        check_positive(
            num_speculative_tokens=self.num_speculative_tokens,
            prompt_lookup_min=self.prompt_lookup_min,
            prompt_lookup_max=self.prompt_lookup_max,
        )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} must be <= "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )

    def propose(self, params, request, shared, memory, history):
        """Copy a chain of 0 to K tokens a row from the history."""
        count = self.num_speculative_tokens
        start, matched = jax.vmap(self._find)(history.tokens, history.length)
        index = start[:, None] + jnp.arange(count)
        drafted = jnp.take_along_axis(history.tokens, index, 1, mode="clip")
        valid = matched[:, None] & (index < history.length[:, None])
        root = root_token(history)[:, None]
        return Draft(
            tokens=jnp.concatenate([root, jnp.where(valid, drafted, 0)], 1),
            parents=trees.chain(count),
            valid=jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True),
            max_depth=count,
        ), memory

    def _find(self, row: Array, length: Array) -> tuple[Array, Array]:
        """Return the start of the continuation in one row [T], and whether there is one."""
        size = row.shape[0]
        start = jnp.arange(size)  # a candidate: the tokens before it match the suffix
        matched = jnp.zeros(size, jnp.int32)
        unbroken = (start > 0) & (start < length)
        for back in range(1, self.prompt_lookup_max + 1):
            last = row[jnp.maximum(length - back, 0)]
            unbroken &= (jnp.roll(row, back) == last) & (start >= back)
            matched += unbroken
        longest = matched.max()
        return jnp.argmax(matched == longest), longest >= self.prompt_lookup_min
