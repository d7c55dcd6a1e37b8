"""The pages of KV caches, on the host: those of all kinds of layers, and the prefix cache.

A page holds the keys and values of ``size`` consecutive tokens, in the layers of one kind of the
caches of target and drafter. A full page is cached by a digest of all text that its entries depend
on: up to its end, and for some drafters the token after it. A sequence that begins with cached
pages shares them. A free page stays cached until it is allocated again; the page freed first goes
first.

A sequence begins behind a prefix if every kind has the pages that its first query sees there, and
if there is a snapshot of the states of recurrent layers.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from jspec.engine.block_kind import BlockKind
from jspec.engine.snapshots import Snapshots

_BETWEEN = 512  # tokens between the snapshots of a long text


class BlockPool:
    """The pages of all kinds of layers.

    Args:
      kinds: pages by kind, of one size; layers without a window come first.
      lookahead: tokens after a page that its entries depend on; None if no prefix can be shared.
      shares_prefixes: whether sequences that begin alike share pages.
      snapshots: states behind prefixes; None for a model without states.
    """

    def __init__(
        self,
        kinds: Sequence[BlockKind],
        *,
        lookahead: int | None = 0,
        shares_prefixes: bool = True,
        snapshots: Snapshots | None = None,
    ):
        self.kinds, self.size = tuple(kinds), kinds[0].size
        self.shares_prefixes = shares_prefixes and lookahead is not None
        self.snapshots = snapshots
        self.queries = self.hits = 0  # tokens of prompts, and those of them that pages held
        self._lookahead = lookahead or 0

    @property
    def num_free(self) -> int:
        """Pages that may be allocated."""
        return sum(kind.num_free for kind in self.kinds)

    @property
    def num_used(self) -> int:
        """Pages of sequences."""
        return sum(kind.num_used for kind in self.kinds)

    @property
    def usage(self) -> float:
        """The share of the pages of a kind that there may be that sequences have, at most."""
        return max(kind.num_used / max(kind.most - 1, 1) for kind in self.kinds)

    @property
    def most_tokens(self) -> int:
        """The tokens that all pages suffice for."""
        return (self.kinds[0].most - 1) * self.size

    def pages_of(self, num_tokens: int) -> int:
        """Return the number of pages for ``num_tokens`` tokens."""
        return self.kinds[0].pages_of(num_tokens)

    def check_fit(self, num_tokens: int) -> None:
        """Refuse a text that would need more pages than there can be."""
        for kind in self.kinds:
            needed, most = kind.most_held(num_tokens), kind.most - 1
            if needed > most:
                raise ValueError(
                    f"prompt and max_tokens are {num_tokens} tokens together, which need {needed} "
                    f"pages of {self.size}, but the KV cache has at most {most}; shorten one of "
                    "them, or give the cache more memory."
                )

    # --------------------------------------------------------------------------- the prefix cache

    def num_cached(self, digests: Sequence[bytes]) -> int:
        """Return the pages of the longest prefix of ``digests`` that a sequence begins behind."""
        first, *others = (kind.prefixes(digests) for kind in self.kinds)
        counts = set(first).intersection(*others)
        if self.snapshots is not None:
            counts = {count for count in counts if digests[count - 1] in self.snapshots}
        return max(counts, default=0)

    def clear_cache(self) -> None:
        """Cache no page any more; sequences keep theirs."""
        for kind in self.kinds:
            kind.clear_cache()
        if self.snapshots is not None:
            self.snapshots.clear()

    def is_end_of_snapshot(self, num_prefilled: int, num_tokens: int) -> bool:
        """Return whether a snapshot is made behind the first tokens of a text.

        They are the last pages that a text may share, and a few before.
        """
        if self.snapshots is None or num_prefilled % self.size or not num_prefilled:
            return False
        is_last = num_prefilled == self.most_shared(num_tokens) * self.size
        return is_last or num_prefilled % _BETWEEN == 0

    def next_end(self, num_prefilled: int, num_tokens: int) -> int:
        """Return the token where the prefill of a text ends, or stops for a snapshot before."""
        end = self.most_shared(num_tokens) * self.size
        stops = self.snapshots is not None and end > num_prefilled
        return end if stops else num_tokens - 1

    def most_shared(self, num_tokens: int) -> int:
        """Return the number of pages that a text may share.

        At least one token is left for the prefill, since some drafters start from its features.
        """
        return max(num_tokens - 2, 0) // self.size

    def add_digests(self, digests: list[bytes], text: np.ndarray, salt: str) -> None:
        """Add those of the new full pages of a text [n] to the ``digests`` of a prefix.

        A digest stands for the salt, all tokens up to the end of the page, and ``lookahead`` tokens
        after it, on which the entries of its last tokens depend.
        """
        last = digests[-1] if digests else hashlib.blake2b(salt.encode(), digest_size=16).digest()
        for page in range(len(digests), max(len(text) - self._lookahead, 0) // self.size):
            tokens = text[page * self.size : (page + 1) * self.size + self._lookahead]
            tokens = np.asarray(tokens, "<i4").tobytes()
            last = hashlib.blake2b(last + tokens, digest_size=16).digest()
            digests.append(last)
